"""How does one thread reach many listeners? A ROUTER that connects: one socket, one route for each listener.

The routes are names that this side gives (ZMQ_CONNECT_ROUTING_ID), so a message goes to exactly one listener, and a
reply says by its route which listener it came from. Each listener knows this end by its identity, as it knows a
``Connection``. A name that is dialled again gets a new route: libzmq aborts the process when two of its pipes,
one of them still closing, are given the same one.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import zmq

from rpcrl.errors import PeerUnreachableError, TransportError, UsageError
from rpcrl.shm.buffers import Buffer
from rpcrl.transport.addresses import check_identity, split_address
from rpcrl.transport.base import Frame, KeyPair, Limits
from rpcrl.transport.keys import check_key
from rpcrl.transport.zeromq import ZmqEndpoint

__all__ = ["ZmqDialer"]


@dataclass(frozen=True)
class _Line:
    address: str
    route: bytes


class ZmqDialer(ZmqEndpoint):
    """Connects to any number of listeners on ipc or tcp; see ``base.Dialer``."""

    def __init__(self, identity: str, limits: Limits, keys: KeyPair | None) -> None:
        name = check_identity(identity)
        super().__init__(zmq.ROUTER, limits, keys is not None)
        self._keys = keys
        self._lines: dict[str, _Line] = {}
        self._peers: dict[bytes, str] = {}
        self._numbers = itertools.count()
        try:
            self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
            self._socket.setsockopt(zmq.ROUTING_ID, name + b"\0" + secrets.token_bytes(16))
            if keys is not None:
                check_key("public key", keys.public)
                check_key("secret key", keys.secret)
                self._socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public.encode())
                self._socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret.encode())
        except BaseException:
            self.close()
            raise

    def dial(self, peer: str, address: str, *, server_public: str | None = None) -> None:
        """Connect to a listener and call it ``peer`` from now on; see ``base.Dialer.dial``."""
        self._check_usable()
        scheme, rest = split_address(address)
        if peer in self._lines:
            raise UsageError(f"{peer!r} is dialled already, at {self._lines[peer].address}")
        if scheme == "tcp" and (self._keys is None or server_public is None):
            raise UsageError(f"{address}: a TCP connection needs keys; there is no unprotected TCP")
        route = check_identity(peer) + b"\0%d" % next(self._numbers)
        try:
            if server_public is not None:
                check_key("listener's public key", server_public)
                self._socket.setsockopt(zmq.CURVE_SERVERKEY, server_public.encode())
            if "[" in rest:
                self._socket.setsockopt(zmq.IPV6, 1)
            self._socket.setsockopt(zmq.CONNECT_ROUTING_ID, route)
            self._socket.connect(address)
        except zmq.ZMQError as error:
            raise TransportError(f"cannot connect to {address}: {error}") from error
        self._lines[peer], self._peers[route] = _Line(address, route), peer

    def hang_up(self, peer: str) -> None:
        """Give a listener up; unsent messages to it are dropped. Nothing happens if it was not dialled."""
        self._check_usable()
        line = self._lines.pop(peer, None)
        if line is not None:
            del self._peers[line.route]
            self._socket.disconnect(line.address)

    def send(self, peer: str, frames: Sequence[Buffer]) -> None:
        """Queue one message for ``peer``; see ``base.Listener.send``."""
        self._check_usable()
        views = self._views(frames)
        line = self._lines.get(peer)
        if line is None:
            raise PeerUnreachableError(f"{peer!r} was not dialled, or was hung up")
        self._send_routed(
            peer,
            line.route,
            views,
            stalled=f"{peer!r} does not read or is not there",
            gone=f"{peer!r} at {line.address} is not reachable",
        )

    def receive(self, timeout_s: float | None) -> tuple[str, list[Frame]] | None:
        """Return the next ``(peer, frames)``; None after ``timeout_s`` or after ``wake``."""
        # A peer that was hung up meanwhile has no name any more.
        return self._receive_routed(timeout_s, lambda head: self._peers.get(head.bytes))
