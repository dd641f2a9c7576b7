"""How do large buffers get past a socket? An end that sends them by shared memory to the peers that can see it.

A message with buffers in shared memory has one frame more, before the others: the byte 0xC1, which begins no msgpack
value and so no envelope, and then a note as msgpack (see ``shm.arena.Loan``). The buffers that it names are left out.
For every other message, and every peer that does not share memory, the frames are those of the end below.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgpack

from rpcrl.errors import DecodeError
from rpcrl.logs import get_logger
from rpcrl.shm.buffers import Buffer, Lent, Placed, view_of
from rpcrl.shm.exchange import Exchange

__all__ = ["SharingEnd", "without_note"]

_NOTE = b"\xc1"
_MAX_NOTE_BYTES = 16 << 20

logger = get_logger(__name__)


class _End(Protocol):
    """The end below; what ``ManyPeers`` is."""

    def send(self, peer: str, frames: Sequence[Buffer]) -> None: ...
    def receive(self, timeout_s: float | None) -> tuple[str, Sequence[Buffer]] | None: ...
    def wake(self) -> None: ...
    def close(self) -> None: ...


class SharingEnd:
    """An end with many peers that sends by shared memory what is placed there. Belongs to one thread, as all ends do.

    ``received``: buffers of a message that lie in shared memory arrive as ``Lent``, in their places.
    """

    def __init__(self, end: _End, exchange: Exchange) -> None:
        self._end = end
        self._exchange = exchange
        self.wake = end.wake
        self.close = end.close

    def send(self, peer: str, frames: Sequence[Buffer]) -> None:
        """Queue one message for ``peer``; see ``base.Listener.send``."""
        lent = self._exchange.lend(peer, frames[1:])
        if lent is None:
            self._end.send(peer, frames)
            return
        note, loan = lent
        named = {row[0] for row in note[2]}  # type: ignore[attr-defined]
        rest = [frame for position, frame in enumerate(frames[1:]) if position not in named]
        try:
            self._end.send(peer, [_NOTE + msgpack.packb(note), frames[0], *rest])
        except BaseException:
            loan.cancel()
            raise

    def receive(self, timeout_s: float | None) -> tuple[str, Sequence[Buffer]] | None:
        """Return the next ``(peer, frames)``; None after ``timeout_s`` or after ``wake``.

        A message whose shared memory is not there (its sender is gone, or gave it up) counts as lost.
        """
        self._exchange.tidy()
        while True:
            received = self._end.receive(timeout_s)
            if received is None or not _has_note(received[1]):
                return received
            peer, frames = received
            try:
                return peer, self._opened(frames)
            except DecodeError as error:
                logger.error("a message of %s was dropped: %s", peer, error)

    def _opened(self, frames: Sequence[Buffer]) -> list[Buffer]:
        if len(frames) < 2 or view_of(frames[0]).nbytes > _MAX_NOTE_BYTES:
            raise DecodeError("a note of shared buffers without a message, or too long")
        try:
            note = msgpack.unpackb(view_of(frames[0])[1:])
        except Exception as error:
            raise DecodeError(f"not a valid note of shared buffers ({type(error).__name__})") from error
        return [frames[1], *self._exchange.merge(note, frames[2:])]


def without_note(frames: Sequence[Buffer]) -> Sequence[Buffer]:
    """Return the frames of a message without its note, for who looks at envelopes only."""
    return frames[1:] if _has_note(frames) else frames


def _has_note(frames: Sequence[Buffer]) -> bool:
    first = frames[0] if frames else b""
    return not isinstance(first, Placed | Lent) and bytes(view_of(first)[:1]) == _NOTE
