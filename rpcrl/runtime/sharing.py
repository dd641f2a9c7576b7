"""How do payloads get into shared memory, and ends past their sockets, where a run has some?"""

from __future__ import annotations

from collections.abc import Sequence

from rpcrl.shm.exchange import Exchange
from rpcrl.transport.base import ManyPeers
from rpcrl.transport.shared import SharingEnd
from rpcrl.wire.messages import Encoded

__all__ = ["place", "sharing"]


def place(exchange: Exchange | None, payload: Encoded, receivers: Sequence[str]) -> Encoded:
    """Return the payload with its large buffers in shared memory, if a receiver sees it and there is room."""
    if exchange is None or not payload.buffers:
        return payload
    return Encoded(payload.tree, exchange.place(payload.buffers, receivers))


def sharing(end: ManyPeers, exchange: Exchange | None) -> ManyPeers:
    """Return an end that sends what is placed by shared memory to the peers that see it."""
    return end if exchange is None else SharingEnd(end, exchange)
