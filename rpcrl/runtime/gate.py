"""Which methods of one role may run at the same time?

Synchronous methods hold their role's gate alone, ``async def`` methods share it, ``concurrent=True`` passes by. So an
update never runs under a generation of the same role. First come, first served: nobody starves.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["RoleGate"]


@dataclass
class _Waiter:
    alone: bool
    enter: Callable[[], None]


class RoleGate:
    """A first-come-first-served lock, held alone or shared. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: deque[_Waiter] = deque()
        self._shared = 0
        self._held_alone = False

    def request(self, *, alone: bool, enter: Callable[[], None]) -> None:
        """Call ``enter`` as soon as the gate is open for it: at once, or later from another thread."""
        with self._lock:
            self._waiting.append(_Waiter(alone, enter))
            entered = self._admit()
        for waiter in entered:
            waiter.enter()

    def enter_alone(self) -> None:
        """Wait until nobody else is inside, then hold the gate."""
        entered = threading.Event()
        self.request(alone=True, enter=entered.set)
        entered.wait()

    def leave(self, *, alone: bool) -> None:
        """Give the gate back."""
        with self._lock:
            if alone:
                self._held_alone = False
            else:
                self._shared -= 1
            entered = self._admit()
        for waiter in entered:
            waiter.enter()

    def _admit(self) -> list[_Waiter]:
        entered: list[_Waiter] = []
        while self._waiting and not self._held_alone:
            if self._waiting[0].alone:
                if self._shared:
                    break
                self._held_alone = True
            else:
                self._shared += 1
            entered.append(self._waiting.popleft())
        return entered
