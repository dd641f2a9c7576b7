"""What does a transport promise?

A ``Listener`` serves many named peers, a ``Connection`` reaches one listener, a ``Dialer`` reaches many. All move
messages that are lists of frames, and each belongs to **one** thread: only ``wake`` may be called from another.

Promises, checked by ``rpcrl.testing.transport_kit`` on every implementation:

* messages of one peer arrive whole, in order, at most once;
* a listener knows a peer from its first message on; of two of one name, the one heard last gets the answers;
* ``send`` takes the frames over: the caller may change its buffers as soon as ``send`` has returned;
* a message that cannot be delivered (unknown peer, over ``Limits.max_message_bytes``) raises; nothing is
  sent;
* a stalled reader costs bounded memory: ``send`` raises ``PeerUnreachableError`` once its queue is full;
* a lost connection comes back by itself; messages in flight may be lost then: calls above are idempotent;
* ``close`` is idempotent, waits at most ``Limits.linger_s`` for queued messages, and leaves no socket,
  thread or file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from rpcrl.shm.buffers import Buffer, Raw

__all__ = ["Allowed", "ClientKeys", "Connection", "Dialer", "Frame", "KeyPair", "Limits", "Listener", "ManyPeers"]

Frame = Raw
"""What arrives. What is sent may be ``Placed`` in shared memory as well: a plain end sends its bytes."""


@dataclass(frozen=True)
class Limits:
    """Bounds of a connection; every one is set on purpose, none is inherited from ZeroMQ."""

    max_message_bytes: int = 1 << 36
    """Per frame (ZMQ_MAXMSGSIZE), and in sum where the transport can tell."""
    max_queued_messages: int = 10_000
    """High-water mark in each direction."""
    linger_s: float = 1.0
    heartbeat_s: float = 2.0
    heartbeat_timeout_s: float = 60.0
    heartbeat_ttl_s: float | None = None
    """How long the other side waits for us before it cuts the connection; None: as long as we for it, 0: for ever."""
    handshake_s: float = 10.0
    reconnect_s: float = 0.1
    backlog: int = 4_096


@dataclass(frozen=True)
class KeyPair:
    """A CURVE key pair in Z85 text."""

    public: str
    secret: str = field(repr=False)


@dataclass(frozen=True)
class ClientKeys:
    """What one peer needs to reach a CURVE listener."""

    own: KeyPair
    server_public: str


class Allowed(Protocol):
    """Who may connect: answers for a public key with the one identity that may use it, or None."""

    def __call__(self, public_key: str, /) -> str | None:
        """Return the identity that ``public_key`` may use, or None."""
        ...


class ManyPeers(Protocol):
    """An end that has many peers, each known by its name: what listeners and dialers share."""

    def send(self, peer: str, frames: Sequence[Buffer]) -> None:
        """Queue one message for ``peer``.

        Raises PeerUnreachableError (unknown peer, or its queue is full), MessageTooLargeError, ClosedError.
        """
        ...

    def receive(self, timeout_s: float | None) -> tuple[str, Sequence[Buffer]] | None:
        """Return the next ``(peer, frames)``; when there is none, None after ``timeout_s`` or after ``wake``.

        The frames are the caller's own.
        """
        ...

    def wake(self) -> None:
        """Make a ``receive`` that waits, or the next that would, return None soon; any thread may call it."""
        ...

    def close(self) -> None:
        """Close; see the module's promises."""
        ...


class Listener(ManyPeers, Protocol):
    """Bound end: many peers, each known by its identity."""

    @property
    def address(self) -> str:
        """Where peers connect, with the real port."""
        ...

    def receive(self, timeout_s: float | None) -> tuple[str, list[Frame]] | None:
        """Return the next ``(peer, frames)`` as ``ManyPeers.receive`` does; all frames came by the socket."""
        ...


class Dialer(ManyPeers, Protocol):
    """Connecting end with many listeners, each known by the name that this side gave it."""

    def dial(self, peer: str, address: str, *, server_public: str | None = None) -> None:
        """Connect to a listener, which need not be there yet, and call it ``peer`` from now on.

        TCP needs the listener's public key. Raises UsageError for a name that is in use, TransportError.
        """
        ...

    def hang_up(self, peer: str) -> None:
        """Give a listener up; unsent messages to it are dropped. Nothing happens if it was not dialled."""
        ...

    def receive(self, timeout_s: float | None) -> tuple[str, list[Frame]] | None:
        """Return the next ``(peer, frames)`` as ``ManyPeers.receive`` does; all frames came by the socket."""
        ...


class Connection(Protocol):
    """Connecting end: one listener, known by its address."""

    def send(self, frames: Sequence[Buffer]) -> None:
        """Queue one message for the listener. Raises as ``Listener.send`` does."""
        ...

    def receive(self, timeout_s: float | None) -> list[Frame] | None:
        """Return the next message; when there is none, None after ``timeout_s`` or after ``wake``."""
        ...

    def wake(self) -> None:
        """Make a ``receive`` that waits, or the next that would, return None soon; any thread may call it."""
        ...

    def close(self) -> None:
        """Close; see the module's promises."""
        ...
