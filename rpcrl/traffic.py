"""What have this process's messages cost so far? Counters that only rise; the difference of two is what lies between.

before = traffic()
group.method(x)
print(traffic() - before)
"""

from __future__ import annotations

import threading
from dataclasses import astuple, dataclass

__all__ = ["Traffic", "count", "traffic"]


@dataclass(frozen=True)
class Traffic:
    """What one process has done since its start, over all its connections."""

    encodes: int = 0
    """Values turned into their wire form: one for each distinct share of a call, whatever the number of receivers."""
    copied_bytes: int = 0
    """Bytes of buffers copied within the process's own memory: arguments kept until they are sent, and what was
    received in memory that could not be handed on."""
    shared_bytes: int = 0
    """Bytes copied into shared memory."""
    sent_messages: int = 0
    sent_bytes: int = 0
    """Bytes of frames given to sockets."""

    def __sub__(self, earlier: Traffic) -> Traffic:
        return Traffic(*(mine - its for mine, its in zip(astuple(self), astuple(earlier), strict=True)))


_lock = threading.Lock()
_totals = [0, 0, 0, 0, 0]


def count(
    *, encodes: int = 0, copied_bytes: int = 0, shared_bytes: int = 0, sent_messages: int = 0, sent_bytes: int = 0
) -> None:
    """Add to the counters; for any thread, not for finalizers."""
    with _lock:
        _totals[0] += encodes
        _totals[1] += copied_bytes
        _totals[2] += shared_bytes
        _totals[3] += sent_messages
        _totals[4] += sent_bytes


def traffic() -> Traffic:
    """Return what this process has done so far; on a worker, call it in a method."""
    with _lock:
        return Traffic(*_totals)
