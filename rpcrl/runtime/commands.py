"""How do other threads tell the I/O thread what to do, without drowning it?

A queue with room for so many commands: who comes when it is full waits until some are done. Otherwise threads that
submit calls in a tight loop would keep the interpreter to themselves, and replies would not be read.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

__all__ = ["Commands"]

MAX_WAITING = 1_000


class Commands:
    """Commands from any thread to the one that runs them."""

    def __init__(self, *, max_waiting: int = MAX_WAITING) -> None:
        self._max_waiting = max_waiting
        self._queue: deque[Callable[[], None]] = deque()
        self._changed = threading.Condition(threading.RLock())
        self._ended = False
        self._taker: int | None = None

    def __len__(self) -> int:
        return len(self._queue)

    def put(self, command: Callable[[], None]) -> None:
        """Queue a command; waits while the queue is full. Runs it here and now when that thread has ended."""
        with self._changed:
            while len(self._queue) >= self._max_waiting and not self._ended and threading.get_ident() != self._taker:
                self._changed.wait()
            if not self._ended:
                self._queue.append(command)
                return
            command()

    def run(self) -> None:
        """Run what is queued now, oldest first, and let the waiting in; called by one thread alone.

        Not what comes meanwhile: that thread has other work too. A command that raises leaves the later ones queued.
        """
        self._taker = threading.get_ident()
        for _ in range(len(self._queue)):
            with self._changed:
                command = self._queue.popleft()
                self._changed.notify()
            command()

    def end(self) -> None:
        """Run what is still queued; whatever comes from now on is run by whoever brings it."""
        with self._changed:
            self._ended = True
            while self._queue:
                self._queue.popleft()()
            self._changed.notify_all()
