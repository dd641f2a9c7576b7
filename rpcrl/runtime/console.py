"""Where do the workers' lines go? To the driver's standard error, with role and rank, from a thread of its own.

The controller's I/O thread never waits for a terminal: when the console falls behind, lines are counted and left out
here, with the path of the file that has them all.
"""

from __future__ import annotations

import queue
import sys
import threading
from collections.abc import Callable

from rpcrl.logs import get_logger

__all__ = ["Console"]

logger = get_logger(__name__)

MAX_WAITING_LINES = 10_000


class Console:
    """Prints lines in order; ``write`` never blocks."""

    def __init__(self, sink: Callable[[str], None] | None = None) -> None:
        self._sink = sink or _to_stderr
        self._lines: queue.Queue[str | None] = queue.Queue(MAX_WAITING_LINES)
        self._num_left_out = 0
        self._has_failed = False
        self._thread = threading.Thread(target=self._run, name="rpcrl-console", daemon=True)
        self._thread.start()

    def write(self, prefix: str, lines: tuple[str, ...], log_path: str) -> None:
        """Queue lines of one worker."""
        for line in lines:
            try:
                if self._num_left_out:
                    self._lines.put_nowait(
                        f"{prefix} … {self._num_left_out} lines left out here; all are in {log_path}"
                    )
                    self._num_left_out = 0
                self._lines.put_nowait(f"{prefix} {line}")
            except queue.Full:
                self._num_left_out += 1

    def close(self) -> None:
        """Print what is queued, for at most two seconds, and end the thread."""
        try:
            self._lines.put(None, timeout=1.0)
        except queue.Full:
            return  # nobody reads the terminal: the daemon thread ends with the process
        self._thread.join(timeout=2.0)

    def _run(self) -> None:
        while (line := self._lines.get()) is not None:
            try:
                self._sink(line)
            except Exception as error:
                if not self._has_failed:
                    logger.warning("the console takes no lines (%s: %s)", type(error).__name__, error)
                self._has_failed = True


def _to_stderr(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()
