"""How does a run end that is told to: by Ctrl-C, by SIGTERM, or because its terminal is gone? Always in order."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["Ended", "ending_in_order"]


class Ended(KeyboardInterrupt):
    """A signal asked the run to end; it goes where Ctrl-C goes."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.exit_code = 128 + number


@contextmanager
def ending_in_order() -> Iterator[None]:
    """Raise Ended in the main thread on SIGTERM and SIGHUP meanwhile; one that is ignored (nohup) stays ignored."""

    def end(number: int, _: FrameType | None) -> None:
        raise Ended(number)

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    taken = {number: handler for number, handler in before.items() if handler is not signal.SIG_IGN}
    for number in taken:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number, handler in taken.items():
            signal.signal(number, handler)
