"""Why may Ctrl-C not come while a large library is imported? Half of torch in a process is worse than none.

Compiled modules run Python code as they are imported. A KeyboardInterrupt that is raised in there aborts the process,
is swallowed, or leaves a lock behind on which another thread's import waits for ever.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

__all__ = ["loading"]

_ENDING = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)


@contextmanager
def loading() -> Iterator[None]:
    """Let signals that end the program wait until the imports in here are done; a second one ends it at once.

    Signals whose handler is not a Python function stay as they are. In other threads than the main one, which get no
    signals, it does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers: dict[int, Any] = {number: signal.getsignal(number) for number in _ENDING}
    held: list[tuple[int, FrameType | None]] = []

    def hold(number: int, frame: FrameType | None) -> None:
        if held:
            # whoever asks twice does not want to wait; the agent ends the workers of a driver that is gone
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        held.append((number, frame))

    taken = {number: handler for number, handler in handlers.items() if callable(handler)}
    try:
        for number in taken:
            signal.signal(number, hold)
        yield
    finally:
        for number, handler in taken.items():
            signal.signal(number, handler)
        for number, frame in held:
            taken[number](number, frame)
