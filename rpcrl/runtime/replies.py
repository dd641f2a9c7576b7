"""Has this call been seen, and what was its reply? What a worker remembers so that nothing runs twice.

Replies are kept until their caller says that it has them (``answered_below``), within bounds; the *ids* outlive
their evicted replies, so that a call that is sent again is answered, or reported as discarded, and never run again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from rpcrl.shm.buffers import Buffer, Placed, view_of

__all__ = ["Discarded", "Known", "ReplyCache"]

MAX_BYTES = 64 << 20
MAX_REPLIES = 1_024


@dataclass(frozen=True)
class Discarded:
    """The call has run, its reply is no longer kept."""


Known = Sequence[Buffer] | Discarded | None
"""Frames of the reply, or Discarded; None while the call is queued or running."""


@dataclass
class _Caller:
    answered_below: int = 0
    seen: dict[int, bool] = field(default_factory=dict)
    """sequence → has it run to its end?"""
    replies: OrderedDict[int, Sequence[Buffer]] = field(default_factory=OrderedDict)
    num_bytes: int = 0


class ReplyCache:
    """What one worker remembers of its callers. Not thread-safe: it belongs to the worker's I/O thread."""

    def __init__(self, *, max_bytes: int = MAX_BYTES, max_replies: int = MAX_REPLIES) -> None:
        self._max_bytes = max_bytes
        self._max_replies = max_replies
        self._callers: dict[str, _Caller] = {}

    def admit(self, caller: str, sequence: int) -> bool:
        """Enter a call; False if it was seen before and must not run."""
        entry = self._callers.setdefault(caller, _Caller())
        if sequence < entry.answered_below or sequence in entry.seen:
            return False
        entry.seen[sequence] = False
        return True

    def lookup(self, caller: str, sequence: int) -> tuple[bool, Known]:
        """Return (was the call seen?, its reply as far as it is kept)."""
        entry = self._callers.get(caller)
        if entry is None:
            return False, None
        if sequence < entry.answered_below:
            return True, Discarded()
        if sequence not in entry.seen:
            return False, None
        if not entry.seen[sequence]:
            return True, None
        return True, entry.replies.get(sequence, Discarded())

    def store(self, caller: str, sequence: int, frames: Sequence[Buffer]) -> None:
        """Keep a reply; the oldest ones make room. A reply over the whole bound is not kept at all."""
        entry = self._callers.setdefault(caller, _Caller())
        if sequence < entry.answered_below:
            return  # nobody will ask for it
        entry.seen[sequence] = True
        num_bytes = _num_bytes(frames)
        if num_bytes > self._max_bytes:
            return
        entry.replies[sequence] = frames
        entry.num_bytes += num_bytes
        while len(entry.replies) > self._max_replies or entry.num_bytes > self._max_bytes:
            _, evicted = entry.replies.popitem(last=False)
            entry.num_bytes -= _num_bytes(evicted)

    def forget_below(self, caller: str, answered_below: int) -> None:
        """Free everything that the caller has the reply of."""
        entry = self._callers.setdefault(caller, _Caller())
        if answered_below <= entry.answered_below:
            return
        below = range(entry.answered_below, answered_below)
        entry.answered_below = answered_below
        # Whichever is shorter: with a thousand open calls, looking at all of them for each one is what costs.
        stale = below if len(below) <= len(entry.seen) else [number for number in entry.seen if number < answered_below]
        for sequence in stale:
            entry.seen.pop(sequence, None)
            frames = entry.replies.pop(sequence, None)
            if frames is not None:
                entry.num_bytes -= _num_bytes(frames)

    def forget(self, caller: str) -> None:
        """Free everything that is kept for a caller that is gone."""
        self._callers.pop(caller, None)

    @property
    def num_bytes(self) -> int:
        """Bytes of all replies that are kept."""
        return sum(entry.num_bytes for entry in self._callers.values())


def _num_bytes(frames: Sequence[Buffer]) -> int:
    """Return what a reply costs this process; shared memory is bounded by its own limit."""
    return sum(view_of(frame).nbytes for frame in frames if not isinstance(frame, Placed))
