"""Does a peer still run, whatever its interpreter and its bulk connection are busy with?

A small connection beside the bulk one, answered by libzmq's own thread in the peer: a peer that holds the interpreter
lock for an hour, or sends a gigabyte, is heard; one that is stopped, frozen or cut off is not. The peer says its name
once and never touches its socket again.

The listener lets libzmq send ZMTP heartbeats and cut what does not answer. Which peer that was is found out by sending:
a ROUTER with MANDATORY refuses a message to a route that is not connected. That is libzmq's own table, so there is
nothing to keep in step with it; and a peer that comes back has its old route, also when nobody reads in it. What is
sent that way piles up nowhere: the peer's socket is conflated, it keeps one message.
"""

from __future__ import annotations

import os
from typing import Any

import zmq

from rpcrl.errors import UsageError
from rpcrl.transport.addresses import check_identity, split_address
from rpcrl.transport.base import Allowed, ClientKeys, KeyPair, Limits
from rpcrl.transport.zeromq import ZmqListener, introduce

__all__ = ["CUT_AFTER", "Pulse", "PulseListener"]

CUT_AFTER = 1.5
"""A peer that does not answer for this many heartbeats is cut off."""
_PING_EVERY = 0.5
"""Heartbeats between two questions to a peer."""
_RECONNECT_MS = 100
_HANDSHAKE_MS = 10_000


class PulseListener(ZmqListener):
    """Listening end: knows which of its peers answer heartbeats. Belongs to one thread, but for ``wake``.

    ``heartbeat_s`` is the pace: peers are asked every half of it and cut off after ``CUT_AFTER`` of it. ``keys`` and
    ``allowed`` as for any listener; TCP needs them. Raises UsageError, TransportError, AuthenticationError.
    """

    def __init__(
        self, address: str, *, heartbeat_s: float, keys: KeyPair | None = None, allowed: Allowed | None = None
    ) -> None:
        limits = Limits(
            max_message_bytes=1024,
            linger_s=0.0,
            heartbeat_s=heartbeat_s * _PING_EVERY,
            heartbeat_timeout_s=heartbeat_s * CUT_AFTER,
            heartbeat_ttl_s=0.0,  # this side may pause: a laptop sleeps, a debugger stops it; peers then just wait
        )
        super().__init__(address, limits, keys, allowed)

    def look(self, timeout_s: float) -> dict[str, bool]:
        """Wait for ``timeout_s`` or ``wake``; return who has ever said its name, and whether it is connected now."""
        received = self.receive(timeout_s)
        while received is not None:
            received = self.receive(0.0)
        return {peer: self._is_connected(route) for peer, route in self._routes.items()}

    def forget(self, peer: str) -> None:
        """Ask about this peer no more."""
        self._routes.pop(peer, None)

    def _is_connected(self, route: bytes) -> bool:
        try:
            self._socket.send_multipart([route, b""], zmq.NOBLOCK)
        except zmq.Again:
            return True  # connected, and full
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return False
        return True


class Pulse:
    """Connecting end: as long as this process runs, the listener knows it. Holds no Python thread.

    Raises UsageError for an address or identity that cannot be one, and for TCP without keys.
    """

    def __init__(self, address: str, identity: str, *, keys: ClientKeys | None = None) -> None:
        scheme, rest = split_address(address)
        name = check_identity(identity)
        if scheme == "inproc" or (scheme == "tcp" and keys is None):
            raise UsageError(f"{address}: a pulse needs another process to listen, and keys on TCP")
        self._pid = os.getpid()
        self._context: zmq.Context[Any] = zmq.Context(io_threads=1)
        self._socket = self._context.socket(zmq.DEALER)
        try:
            self._socket.setsockopt(zmq.CONFLATE, 1)
            self._socket.setsockopt(zmq.LINGER, 0)
            self._socket.setsockopt(zmq.MAXMSGSIZE, 1024)
            self._socket.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
            self._socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
            introduce(self._socket, name, keys, ipv6="[" in rest)
            self._socket.connect(address)
            self._socket.send(b"", zmq.NOBLOCK)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close; the listener sees this peer go. Idempotent; a fork's copy closes nothing."""
        if os.getpid() == self._pid and not self._socket.closed:
            self._socket.close(linger=0)
            self._context.term()
