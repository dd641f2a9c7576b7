"""What does a person see while nothing new comes? After some seconds, what the run is waiting in and for how long.

A thread of its own watches the clock, so that it speaks also while the driver waits for a worker.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

__all__ = ["FIRST_NOTICE_S", "Waiting", "next_notice_s"]

FIRST_NOTICE_S = 10.0
LONGEST_BETWEEN_S = 300.0


def next_notice_s(waited_s: float) -> float:
    """Return after how many seconds of waiting the notice after ``waited_s`` comes: 10, 20, 40 …, then every 300."""
    if waited_s < FIRST_NOTICE_S:
        return FIRST_NOTICE_S
    return waited_s + min(waited_s, LONGEST_BETWEEN_S)


class Waiting:
    """Calls ``notice(what, seconds)`` from its thread while one thing lasts; a context manager that ends the thread."""

    def __init__(self, notice: Callable[[str, float], None]) -> None:
        self._notice = notice
        self._changed = threading.Condition()
        self._what = ""
        self._since_s = time.monotonic()
        self._ended = False
        self._thread = threading.Thread(target=self._watch, name="waiting", daemon=True)

    @property
    def what(self) -> str:
        """What is waited in now; empty before the first."""
        return self._what

    @property
    def waited_s(self) -> float:
        """Seconds since it began."""
        return time.monotonic() - self._since_s

    def begin(self, what: str) -> None:
        """Start the clock for the next thing."""
        with self._changed:
            self._what, self._since_s = what, time.monotonic()
            self._changed.notify()

    def __enter__(self) -> Waiting:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._ended = True
            self._changed.notify()
        self._thread.join()

    def _watch(self) -> None:
        since_s, due_s = 0.0, FIRST_NOTICE_S
        while True:
            with self._changed:
                if self._ended:
                    return
                if since_s != self._since_s:
                    since_s, due_s = self._since_s, FIRST_NOTICE_S
                left_s = since_s + due_s - time.monotonic()
                if not self._what or left_s > 0:
                    self._changed.wait(left_s if self._what else None)
                    continue
                what, waited_s = self._what, due_s
            self._notice(what, waited_s)
            due_s = next_notice_s(waited_s)
