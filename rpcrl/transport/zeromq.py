"""How do messages travel over ZeroMQ? A ROUTER that listens, DEALERs that connect, every option set on purpose.

What libzmq does by default and what is done about it: a ROUTER drops messages to unknown peers (MANDATORY: it says
so); a socket lingers for ever (bounded); frames have no size limit (bounded); a peer with a wrong key retries
silently for ever (its monitor is watched and the reason told); a socket breaks when a fork uses it (refused here,
the parent stays whole). Each endpoint has a context of its own, so closing one waits for nobody else.

Over TCP both sides need CURVE keys. A peer is known from its first message on: only then is its name proven. Its route
is its name and a secret token of its own. So no other peer of the run can stand in its place (the name alone would let
a peer that has some key catch messages for one that is away), a second peer of the same name is heard (a ROUTER ignores
it for ever, silently), and HANDOVER is safe: a peer whose old connection died unseen gets its route back at once.
"""

from __future__ import annotations

import os
import secrets
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import zmq

from rpcrl.errors import (
    AuthenticationError,
    PeerUnreachableError,
    TransportError,
    UsageError,
)
from rpcrl.logs import get_logger
from rpcrl.shm.buffers import Buffer, view_of
from rpcrl.traffic import count
from rpcrl.transport.addresses import check_identity, prepare_ipc_path, split_address
from rpcrl.transport.base import Allowed, ClientKeys, Frame, KeyPair, Limits
from rpcrl.transport.endpoint import Endpoint
from rpcrl.transport.keys import ZAP_DOMAIN, ZapThread, check_key, require_curve

__all__ = ["ZmqConnection", "ZmqEndpoint", "ZmqListener", "introduce", "remaining_ms"]

_log = get_logger(__name__)

_MAX_RECONNECT_S = 1.0
_MONITOR_ADDRESS = "inproc://rpcrl-monitor"
_FAILED = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH


class ZmqEndpoint(Endpoint):
    """What both ends share: the socket and its options, waking, waiting and closing."""

    def __init__(self, kind: int, limits: Limits, keyed: bool) -> None:
        super().__init__(limits)
        self._woken = False
        self._wake_lock = threading.Lock()
        self._context: zmq.Context[Any] = zmq.Context(io_threads=1)
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._socket = self._context.socket(kind)
        try:
            _set_options(self._socket, limits)
            if keyed:
                require_curve()
        except BaseException:
            self._release()
            raise
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._wake_fd, zmq.POLLIN)

    def wake(self) -> None:
        """Make a ``receive`` that waits (or the next one) return None soon; safe from any thread."""
        with self._wake_lock:
            if self._closed or self._woken:
                return
            self._woken = True
            os.eventfd_write(self._wake_fd, 1)

    def _take_wake(self) -> bool:
        if not self._woken:
            return False
        with self._wake_lock:
            os.eventfd_read(self._wake_fd)
            self._woken = False
        return True

    def _views(self, frames: Sequence[Buffer]) -> list[memoryview]:
        self._check_message(frames)
        views = [view_of(frame) for frame in frames]
        return [view.cast("B") if view.nbytes else memoryview(b"") for view in views]

    def _send_views(self, views: list[memoryview]) -> None:
        """Copy the frames into ZeroMQ's queue, so that the caller may change its buffers."""
        last = len(views) - 1
        for index, view in enumerate(views):
            self._socket.send(view, zmq.NOBLOCK | (zmq.SNDMORE if index < last else 0), copy=True)
        count(sent_messages=1, sent_bytes=sum(view.nbytes for view in views))

    def _rest(self, more: bool) -> list[Frame]:
        """Receive the frames that follow; each is copied once, into memory that the decoder can hand on."""
        frames: list[Frame] = []
        while more:
            frame = self._socket.recv(copy=False)
            frames.append(bytearray(frame.buffer))
            more = frame.more
        return frames

    def _send_routed(self, peer: str, route: bytes, views: list[memoryview], *, stalled: str, gone: str) -> None:
        """Send by a ROUTER's route; raises PeerUnreachableError saying that the peer is ``stalled`` or ``gone``."""
        try:
            self._socket.send(route, zmq.NOBLOCK | zmq.SNDMORE)
            self._send_views(views)
        except zmq.Again:
            raise PeerUnreachableError(
                f"{stalled}: {self._limits.max_queued_messages} messages wait for it (Limits.max_queued_messages)"
            ) from None
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise TransportError(f"cannot send to {peer!r}: {error}") from error
            raise PeerUnreachableError(gone) from None

    def _receive_routed(
        self, timeout_s: float | None, name: Callable[[zmq.Frame], str | None]
    ) -> tuple[str, list[Frame]] | None:
        """Receive from a ROUTER; ``name`` tells the peer by the route, or None for a message that is to be dropped."""
        self._check_usable()
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            try:
                head = self._socket.recv(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                # Only now: wakes that come without end must not keep messages waiting.
                if self._take_wake():
                    return None
                left_ms = remaining_ms(deadline_s)
                if left_ms == 0 or not self._poller.poll(left_ms):
                    return None
                continue
            first = self._socket.recv(copy=False)
            frames: list[Frame] = [first.bytes, *self._rest(first.more)]
            peer = name(head)
            if peer is not None:
                return peer, frames

    def close(self) -> None:
        """Close; waits at most ``Limits.linger_s`` for queued messages. A fork's copy closes nothing."""
        if self._closed or os.getpid() != self._pid:
            return
        self._release()

    def _release(self) -> None:
        with self._wake_lock:
            self._closed = True
            os.close(self._wake_fd)
        self._socket.close(linger=_milliseconds(self._limits.linger_s))
        self._context.term()


def introduce(socket: zmq.Socket[Any], name: bytes, keys: ClientKeys | None, *, ipv6: bool) -> None:
    """Set who a connecting socket is: its route (the name and a token that nobody else knows), and its keys."""
    socket.setsockopt(zmq.ROUTING_ID, name + b"\0" + secrets.token_bytes(16))
    if ipv6:
        socket.setsockopt(zmq.IPV6, 1)
    if keys is not None:
        check_key("public key", keys.own.public)
        check_key("secret key", keys.own.secret)
        check_key("listener's public key", keys.server_public)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.own.public.encode())
        socket.setsockopt(zmq.CURVE_SECRETKEY, keys.own.secret.encode())
        socket.setsockopt(zmq.CURVE_SERVERKEY, keys.server_public.encode())


def _milliseconds(seconds: float) -> int:
    return max(0, round(seconds * 1000))


def _set_options(socket: zmq.Socket[Any], limits: Limits) -> None:
    socket.setsockopt(zmq.SNDHWM, limits.max_queued_messages)
    socket.setsockopt(zmq.RCVHWM, limits.max_queued_messages)
    socket.setsockopt(zmq.LINGER, _milliseconds(limits.linger_s))
    socket.setsockopt(zmq.MAXMSGSIZE, limits.max_message_bytes)
    socket.setsockopt(zmq.HANDSHAKE_IVL, max(1, _milliseconds(limits.handshake_s)))
    socket.setsockopt(zmq.HEARTBEAT_IVL, _milliseconds(limits.heartbeat_s))
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _milliseconds(limits.heartbeat_timeout_s))
    ttl_s = limits.heartbeat_timeout_s if limits.heartbeat_ttl_s is None else limits.heartbeat_ttl_s
    socket.setsockopt(zmq.HEARTBEAT_TTL, _milliseconds(ttl_s))
    socket.setsockopt(zmq.RECONNECT_IVL, max(1, _milliseconds(limits.reconnect_s)))
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, _milliseconds(max(_MAX_RECONNECT_S, limits.reconnect_s)))
    socket.setsockopt(zmq.BACKLOG, limits.backlog)
    socket.setsockopt(zmq.SNDTIMEO, 0)
    socket.setsockopt(zmq.RCVTIMEO, 0)
    socket.setsockopt(zmq.IMMEDIATE, 0)  # a DEALER queues while it has no connection


def remaining_ms(deadline_s: float | None) -> int:
    """Return the milliseconds to a deadline of the monotonic clock, as ZeroMQ's poll takes them; -1 for none."""
    return -1 if deadline_s is None else max(0, round((deadline_s - time.monotonic()) * 1000))


class ZmqListener(ZmqEndpoint):
    """A ROUTER socket on ipc or tcp; see ``base.Listener``."""

    def __init__(self, address: str, limits: Limits, keys: KeyPair | None, allowed: Allowed | None) -> None:
        scheme, rest = split_address(address)
        if (scheme == "tcp" or keys is not None) and (keys is None or allowed is None):
            raise UsageError(f"{address}: a TCP listener needs keys and an allow-list; there is no unprotected TCP")
        self._path = Path(rest) if scheme == "ipc" else None
        if self._path is not None:
            prepare_ipc_path(self._path)
        super().__init__(zmq.ROUTER, limits, keys is not None)
        self._zap: ZapThread | None = None
        self._keyed = keys is not None
        self._routes: dict[str, bytes] = {}
        self._impostors = 0
        try:
            self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
            self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
            if "[" in rest:
                self._socket.setsockopt(zmq.IPV6, 1)
            if keys is not None and allowed is not None:
                check_key("public key", keys.public)
                check_key("secret key", keys.secret)
                self._protect(keys, allowed)
            self._socket.bind(address)
        except zmq.ZMQError as error:
            self.close()
            raise TransportError(f"cannot listen on {address}: {error}") from error
        except BaseException:
            self.close()
            raise
        self._address: str = self._socket.getsockopt(zmq.LAST_ENDPOINT).decode().rstrip("\0")  # type: ignore[union-attr]

    def _protect(self, keys: KeyPair, allowed: Allowed) -> None:
        self._socket.setsockopt(zmq.CURVE_SERVER, 1)
        self._socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public.encode())
        self._socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret.encode())
        self._socket.setsockopt(zmq.ZAP_DOMAIN, ZAP_DOMAIN)
        self._socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
        self._zap = ZapThread(self._context, allowed, _monitor(self._context, self._socket, _FAILED))

    @property
    def address(self) -> str:
        """Where peers connect, with the real port."""
        return self._address

    @property
    def rejected(self) -> int:
        """Handshakes that failed (wrong key, no key, unlisted key) and messages under a name that is not the key's."""
        return self._impostors + (self._zap.rejected if self._zap is not None else 0)

    def send(self, peer: str, frames: Sequence[Buffer]) -> None:
        """Queue one message for ``peer``; see ``base.Listener.send``."""
        self._check_usable()
        views = self._views(frames)
        route = self._routes.get(peer)
        if route is None:
            raise PeerUnreachableError(f"no peer {peer!r} is known on {self._address}: no message came from it yet")
        # A route that is gone stays known: it is the same when the peer comes back.
        self._send_routed(
            peer,
            route,
            views,
            stalled=f"{peer!r} does not read",
            gone=f"no peer {peer!r} is connected to {self._address} any more",
        )

    def receive(self, timeout_s: float | None) -> tuple[str, list[Frame]] | None:
        """Return the next ``(peer, frames)``; None after ``timeout_s`` or after ``wake``."""
        return self._receive_routed(timeout_s, self._name)

    def _name(self, head: zmq.Frame) -> str | None:
        """Return who sent a message; None (and counted) when the name is not the one that belongs to the key."""
        route = head.bytes
        owner: object = None
        try:
            peer = route.partition(b"\0")[0].decode()
            owner = head.get("User-Id") if self._keyed else peer
        except (UnicodeDecodeError, zmq.ZMQError):
            peer = repr(route[:80])
        if owner == peer and peer:
            self._routes[peer] = route
            return peer
        self._impostors += 1
        _log.warning("dropped a message of a peer that calls itself %.80r; its key is that of %r", peer, owner)
        return None

    def _release(self) -> None:
        zap = getattr(self, "_zap", None)
        if zap is not None:
            self._socket.disable_monitor()
        super()._release()
        if zap is not None:
            zap.join()
        if self._path is not None:
            self._path.unlink(missing_ok=True)


class ZmqConnection(ZmqEndpoint):
    """A DEALER socket to one listener on ipc or tcp; see ``base.Connection``."""

    def __init__(self, address: str, identity: str, limits: Limits, keys: ClientKeys | None) -> None:
        scheme, rest = split_address(address)
        name = check_identity(identity)
        if scheme == "tcp" and keys is None:
            raise UsageError(f"{address}: a TCP connection needs keys; there is no unprotected TCP")
        super().__init__(zmq.DEALER, limits, keys is not None)
        self._address = address
        self._ready = False
        self._refused = ""
        self._shaking_since_s: float | None = None
        try:
            introduce(self._socket, name, keys, ipv6="[" in rest)
            watched = _FAILED | zmq.EVENT_CONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED
            watched |= zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED
            self._monitor = _monitor(self._context, self._socket, watched)
            self._socket.connect(address)
        except zmq.ZMQError as error:
            self.close()
            raise TransportError(f"cannot connect to {address}: {error}") from error
        except BaseException:
            self.close()
            raise
        self._poller.register(self._monitor, zmq.POLLIN)

    @property
    def ready(self) -> bool:
        """Whether the handshake with the listener is done, as far as ``send`` and ``receive`` have seen."""
        return self._ready

    def send(self, frames: Sequence[Buffer]) -> None:
        """Queue one message for the listener; see ``base.Connection.send``. Raises AuthenticationError as well."""
        self._check_usable()
        views = self._views(frames)
        if not self._ready:
            self._watch_handshake()
        try:
            self._send_views(views)
        except zmq.Again:
            raise PeerUnreachableError(
                f"{self._address} does not read or is not there: {self._limits.max_queued_messages} messages wait"
                " for it (Limits.max_queued_messages)"
            ) from None
        except zmq.ZMQError as error:
            raise TransportError(f"cannot send to {self._address}: {error}") from error

    def receive(self, timeout_s: float | None) -> list[Frame] | None:
        """Return the next message; None after ``timeout_s`` or after ``wake``. Raises AuthenticationError."""
        self._check_usable()
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            try:
                first = self._socket.recv(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                if self._take_wake():
                    return None
                self._watch_handshake()
                left_ms = self._patience_ms(deadline_s)
                if remaining_ms(deadline_s) == 0:
                    return None
                self._poller.poll(left_ms)
                continue
            return [first.bytes, *self._rest(first.more)]

    def _patience_ms(self, deadline_s: float | None) -> int:
        """How long to wait: to the caller's deadline, or to the handshake's if that is sooner."""
        if self._shaking_since_s is None:
            return remaining_ms(deadline_s)
        handshake_ms = remaining_ms(self._shaking_since_s + self._limits.handshake_s) + 1
        return handshake_ms if deadline_s is None else min(handshake_ms, remaining_ms(deadline_s))

    def _watch_handshake(self) -> None:
        """Read what libzmq tells about the connection; raise when it was refused or its handshake takes too long."""
        while True:
            try:
                event, _ = self._monitor.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            self._note(zmq.Event(int.from_bytes(event[:2], sys.byteorder)), int.from_bytes(event[2:6], sys.byteorder))
        since_s = self._shaking_since_s
        if since_s is None or self._ready:
            return
        if self._refused or time.monotonic() - since_s >= self._limits.handshake_s:
            reason = self._refused or (
                f"no handshake within {self._limits.handshake_s:g} s (Limits.handshake_s): the listener's public key is"
                " not the one this side was given, what listens there is no rpcrl listener with CURVE, or it is stuck"
            )
            raise AuthenticationError(f"{self._address} did not let this peer in: {reason}")

    def _note(self, event: int, value: int) -> None:
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._ready, self._refused, self._shaking_since_s = True, "", None
        elif event == zmq.EVENT_DISCONNECTED:
            self._ready = False
        elif event == zmq.EVENT_CLOSED:  # nobody listens there now: that says nothing about keys
            self._shaking_since_s = None
        elif event in (
            zmq.EVENT_CONNECTED,
            zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL,
            zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL,
        ):
            self._ready = False
            if self._shaking_since_s is None:
                self._shaking_since_s = time.monotonic()
        elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            self._ready = False
            self._shaking_since_s = self._shaking_since_s or time.monotonic()
            self._refused = f"it refused the key (status {value}): the public key of this peer is not on its allow-list"

    def _release(self) -> None:
        if getattr(self, "_monitor", None) is not None:
            self._socket.disable_monitor()
            self._monitor.close(linger=0)
        super()._release()


def _monitor(context: zmq.Context[Any], socket: zmq.Socket[Any], events: int) -> zmq.Socket[Any]:
    """Return the socket on which libzmq reports about ``socket``. Unbounded: a full one would stop libzmq's thread."""
    socket.monitor(_MONITOR_ADDRESS, events)
    monitor: zmq.Socket[Any] = context.socket(zmq.PAIR)
    monitor.setsockopt(zmq.RCVHWM, 0)
    monitor.setsockopt(zmq.LINGER, 0)
    monitor.connect(_MONITOR_ADDRESS)
    return monitor
