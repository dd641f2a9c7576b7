"""Where does a chained call go on when what it waited for has settled? In one thread, started when needed.

Encoding has no place in an I/O thread. What is run here must wait for no call: all chained calls share the thread.
"""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Callable

__all__ = ["Deferred"]


class Deferred:
    """Runs work in order. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pool: concurrent.futures.ThreadPoolExecutor | None = None
        self._closed = False

    def run(self, work: Callable[[], None]) -> None:
        """Run ``work`` soon; after ``close`` here and now: nothing that it could wait for is open then."""
        with self._lock:
            if not self._closed:
                if self._pool is None:
                    self._pool = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="rpcrl-deferred")
                self._pool.submit(work)
                return
        work()

    def close(self) -> None:
        """Finish what was brought; called when all calls have failed, so that nothing waits long."""
        with self._lock:
            self._closed = True
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(wait=True)
