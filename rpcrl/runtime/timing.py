"""Where did the time of a call go, and what did it move? Read ``group.m.timing`` after ``group.m(x)``.

Every mark is one read of a monotonic clock. A worker sends its own marks with the result. On one host they are on the
caller's clock; another host's clock has another zero, and then what lies outside the worker is split evenly in
``send_s`` and ``return_s``.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rpcrl.shm.buffers import Placed, num_bytes
from rpcrl.wire.messages import Encoded

__all__ = ["CallTiming", "Stopwatch"]


@dataclass(frozen=True)
class CallTiming:
    """One call in seconds, along the rank whose reply came last; and what the caller's process did for it.

    The seconds of the phases add up to ``total_s`` less the time in which nobody asked for a settled future's value.
    """

    encode_s: float
    """Bound, dispatched, each distinct share encoded and put in its place."""
    send_s: float
    """From there to the worker's I/O thread."""
    queue_s: float
    """Until the method could begin."""
    run_s: float
    """Arguments decoded, method run."""
    return_s: float
    """Result encoded, and back to the caller's I/O thread."""
    collect_s: float
    """Results decoded, collected, unpadded."""
    total_s: float
    """From the call to its value."""
    index: int
    """Which of the called ranks replied last."""
    encodes: int
    """Distinct shares that were encoded."""
    copied_bytes: int
    """Bytes of arguments copied in the caller's memory or into shared memory."""
    shared_bytes: int
    """Bytes of arguments that lie in shared memory, each once."""
    sent_bytes: int
    """Bytes of arguments that are for the sockets, once a receiver."""


class Stopwatch:
    """The marks of one call. Each is set by one thread, before the next one is."""

    __slots__ = (
        "_called_at",
        "_collect_from",
        "_copied_bytes",
        "_encoded_at",
        "_encodes",
        "_index",
        "_received_at",
        "_sent_bytes",
        "_shared_bytes",
        "_worker",
        "timing",
    )

    def __init__(self) -> None:
        self._called_at = time.monotonic()
        self._encoded_at = self._received_at = self._collect_from = self._called_at
        self._encodes = self._copied_bytes = self._shared_bytes = self._sent_bytes = self._index = 0
        self._worker: Sequence[float] = ()
        self.timing: CallTiming | None = None
        """None until the value of the call has been asked for, and of a call that failed."""

    def encoded(self, distinct: Iterable[Encoded], sent: Iterable[Encoded], *, copied: bool) -> None:
        """Take the end of encoding: what was encoded, and what goes to each rank."""
        self._encoded_at = time.monotonic()
        for each in distinct:
            self._encodes += 1
            for buffer in each.buffers:
                size = num_bytes(buffer)
                if isinstance(buffer, Placed):
                    self._shared_bytes += size
                    self._copied_bytes += size
                elif copied:
                    self._copied_bytes += size
        for each in sent:
            self._sent_bytes += len(each.tree)
            self._sent_bytes += sum(num_bytes(buffer) for buffer in each.buffers if not isinstance(buffer, Placed))

    def received(self, index: int, worker: Sequence[float]) -> None:
        """Take a reply; ``worker`` are its marks: arrived, begun, ended."""
        self._received_at = time.monotonic()
        self._index, self._worker = index, worker

    def collecting(self) -> None:
        """Take the begin of decoding."""
        self._collect_from = time.monotonic()

    def collected(self) -> None:
        """Take the end of the call."""
        now = time.monotonic()
        send_s, queue_s, run_s, return_s = self._split()
        self.timing = CallTiming(
            encode_s=self._encoded_at - self._called_at,
            send_s=send_s,
            queue_s=queue_s,
            run_s=run_s,
            return_s=return_s,
            collect_s=now - self._collect_from,
            total_s=now - self._called_at,
            index=self._index,
            encodes=self._encodes,
            copied_bytes=self._copied_bytes,
            shared_bytes=self._shared_bytes,
            sent_bytes=self._sent_bytes,
        )

    def _split(self) -> tuple[float, float, float, float]:
        away_s = self._received_at - self._encoded_at
        if len(self._worker) != 3:
            return away_s / 2, 0.0, 0.0, away_s / 2
        arrived, begun, ended = self._worker
        queue_s, run_s = begun - arrived, ended - begun
        if self._encoded_at <= arrived and ended <= self._received_at:
            return arrived - self._encoded_at, queue_s, run_s, self._received_at - ended
        trip_s = max(0.0, away_s - queue_s - run_s) / 2
        return trip_s, queue_s, run_s, trip_s
