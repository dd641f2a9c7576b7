"""How do messages travel within one process? Queues with the promises of ``base``, for tests and dry runs."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Sequence

from rpcrl.errors import PeerUnreachableError, TransportError, UsageError
from rpcrl.shm.buffers import Buffer, view_of
from rpcrl.transport.addresses import check_identity, split_address
from rpcrl.transport.base import Frame, Limits
from rpcrl.transport.endpoint import Endpoint

__all__ = ["InprocConnection", "InprocDialer", "InprocListener"]

_lock = threading.RLock()
_listeners: dict[str, InprocListener] = {}
_connections: dict[str, list[InprocConnection]] = {}


class _Endpoint(Endpoint):
    """A queue of received messages, with waking and closing."""

    def __init__(self, address: str, limits: Limits) -> None:
        self._name = split_address(address)[1]
        self._address = address
        super().__init__(limits)
        self._woken = False
        self._inbox: deque[tuple[str, list[Frame]]] = deque()
        self._waiting: dict[str, int] = {}
        self._changed = threading.Condition(_lock)

    def wake(self) -> None:
        """Make a ``receive`` that waits (or the next one) return None soon; safe from any thread."""
        with self._changed:
            self._woken = True
            self._changed.notify_all()

    def _copy(self, frames: Sequence[Buffer]) -> list[Frame]:
        self._check_message(frames)
        return [bytes(view_of(frames[0])), *(bytearray(view_of(frame)) for frame in frames[1:])]

    def _put(self, sender: str, frames: list[Frame]) -> bool:
        """Queue a message of ``sender``; False when its share of the queue is full."""
        if self._waiting.get(sender, 0) >= self._limits.max_queued_messages:
            return False
        self._waiting[sender] = self._waiting.get(sender, 0) + 1
        self._inbox.append((sender, frames))
        self._changed.notify_all()
        return True

    def _take(self, timeout_s: float | None) -> tuple[str, list[Frame]] | None:
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        with self._changed:
            while True:
                self._check_usable()
                if self._inbox:
                    sender, frames = self._inbox.popleft()
                    self._waiting[sender] -= 1
                    return sender, frames
                if self._woken:
                    self._woken = False
                    return None
                remaining_s = None if deadline_s is None else deadline_s - time.monotonic()
                if remaining_s is not None and remaining_s <= 0:
                    return None
                self._changed.wait(remaining_s)


class InprocListener(_Endpoint):
    """Listening end; see ``base.Listener``."""

    rejected = 0
    """Nobody is turned away within a process."""

    def __init__(self, address: str, limits: Limits) -> None:
        super().__init__(address, limits)
        self._peers: dict[str, InprocConnection] = {}
        with _lock:
            if self._name in _listeners:
                raise TransportError(f"cannot listen on {address}: it is in use in this process")
            _listeners[self._name] = self
            for connection in _connections.get(self._name, []):
                connection._attach(self)

    @property
    def address(self) -> str:
        """Where peers connect."""
        return self._address

    def send(self, peer: str, frames: Sequence[Buffer]) -> None:
        """Queue one message for ``peer``; see ``base.Listener.send``."""
        self._check_usable()
        message = self._copy(frames)
        with _lock:
            connection = self._peers.get(peer)
            if connection is None:
                raise PeerUnreachableError(f"no peer {peer!r} is connected to {self._address}")
            if not connection._put("", message):
                raise PeerUnreachableError(
                    f"{peer!r} does not read: {self._limits.max_queued_messages} messages wait for it"
                    " (Limits.max_queued_messages)"
                )

    def receive(self, timeout_s: float | None) -> tuple[str, list[Frame]] | None:
        """Return the next ``(peer, frames)``; None after ``timeout_s`` or after ``wake``."""
        self._check_usable()
        return self._take(timeout_s)

    def close(self) -> None:
        """Close; messages that nobody received are dropped, and peers wait for the next listener of the name."""
        if os.getpid() != self._pid:
            return
        with _lock:
            if self._closed:
                return
            self._closed = True
            del _listeners[self._name]
            for connection in _connections.get(self._name, []):
                connection._listener = None
            self._peers.clear()
            self._changed.notify_all()


class InprocConnection(_Endpoint):
    """Connecting end; see ``base.Connection``."""

    def __init__(self, address: str, identity: str, limits: Limits) -> None:
        super().__init__(address, limits)
        check_identity(identity)
        self._identity = identity
        self._listener: InprocListener | None = None
        self._outbox: deque[list[Frame]] = deque()
        with _lock:
            _connections.setdefault(self._name, []).append(self)
            listener = _listeners.get(self._name)
            if listener is not None:
                self._attach(listener)

    def _attach(self, listener: InprocListener) -> None:
        """Belong to a listener; deliver what was queued meanwhile."""
        self._listener = listener
        while self._outbox and self._deliver(listener, self._outbox[0]):
            self._outbox.popleft()

    def _deliver(self, listener: InprocListener, message: list[Frame]) -> bool:
        if not listener._put(self._identity, message):
            return False
        listener._peers[self._identity] = self
        return True

    def send(self, frames: Sequence[Buffer]) -> None:
        """Queue one message for the listener; see ``base.Connection.send``."""
        self._check_usable()
        message = self._copy(frames)
        with _lock:
            if self._listener is not None and not self._outbox:
                if self._deliver(self._listener, message):
                    return
            elif len(self._outbox) < self._limits.max_queued_messages:
                self._outbox.append(message)
                return
        raise PeerUnreachableError(
            f"{self._address} does not read or is not there: {self._limits.max_queued_messages} messages wait for it"
            " (Limits.max_queued_messages)"
        )

    def receive(self, timeout_s: float | None) -> list[Frame] | None:
        """Return the next message; None after ``timeout_s`` or after ``wake``."""
        self._check_usable()
        taken = self._take(timeout_s)
        return None if taken is None else taken[1]

    def close(self) -> None:
        """Close; what was sent stays with the listener."""
        if os.getpid() != self._pid:
            return
        with _lock:
            if self._closed:
                return
            self._closed = True
            same = _connections[self._name]
            same.remove(self)
            if not same:
                del _connections[self._name]
            listener = self._listener
            if listener is not None and listener._peers.get(self._identity) is self:
                del listener._peers[self._identity]
            self._changed.notify_all()


class _Line(InprocConnection):
    """One of a dialer's connections: what arrives here goes to the dialer."""

    def __init__(self, address: str, identity: str, limits: Limits, peer: str, dialer: InprocDialer) -> None:
        self._peer = peer
        self._dialer = dialer
        super().__init__(address, identity, limits)

    def _put(self, sender: str, frames: list[Frame]) -> bool:
        return self._dialer._put(self._peer, frames)


class InprocDialer(_Endpoint):
    """Connects to any number of listeners; see ``base.Dialer``."""

    def __init__(self, identity: str, limits: Limits) -> None:
        super().__init__(f"inproc://dialer-of-{identity}", limits)
        check_identity(identity)
        self._identity = identity
        self._lines: dict[str, _Line] = {}

    def dial(self, peer: str, address: str, *, server_public: str | None = None) -> None:
        """Connect to a listener and call it ``peer`` from now on; see ``base.Dialer.dial``."""
        self._check_usable()
        if peer in self._lines:
            raise UsageError(f"{peer!r} is dialled already")
        if server_public is not None:
            raise UsageError(f"{address}: keys protect nothing within a process; pass server_public=None")
        self._lines[peer] = _Line(address, self._identity, self._limits, peer, self)

    def hang_up(self, peer: str) -> None:
        """Give a listener up. Nothing happens if it was not dialled."""
        self._check_usable()
        line = self._lines.pop(peer, None)
        if line is not None:
            line.close()

    def send(self, peer: str, frames: Sequence[Buffer]) -> None:
        """Queue one message for ``peer``; see ``base.Listener.send``."""
        self._check_usable()
        if peer not in self._lines:
            raise PeerUnreachableError(f"{peer!r} was not dialled, or was hung up")
        self._lines[peer].send(frames)

    def receive(self, timeout_s: float | None) -> tuple[str, list[Frame]] | None:
        """Return the next ``(peer, frames)``; None after ``timeout_s`` or after ``wake``."""
        self._check_usable()
        while (taken := self._take(timeout_s)) is not None:
            if taken[0] in self._lines:
                return taken
        return None

    def close(self) -> None:
        """Close every connection; what was sent stays with the listeners."""
        if os.getpid() != self._pid or self._closed:
            return
        for line in self._lines.values():
            line.close()
        with self._changed:
            self._closed = True
            self._changed.notify_all()
