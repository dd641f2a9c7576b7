"""What if a message is lost, comes twice, late or broken? A man in the middle that does it on purpose.

``FaultProxy`` listens where peers connect and opens one connection per peer towards the real listener, under the
peer's name. Faults pick messages by a predicate, in one direction, and count what they matched: leaving the proxy's
``with`` block raises AssertionError when a fault never matched anything, since such a test would prove nothing.

It works on every transport, because it knows only ``transport.base`` and the messages.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypedDict, Unpack

from rpcrl.errors import AuthenticationError, PeerUnreachableError, WireError
from rpcrl.transport.base import Allowed, ClientKeys, Connection, Frame, KeyPair, Limits, Listener
from rpcrl.transport.open import connect, listen
from rpcrl.transport.shared import without_note
from rpcrl.wire.frames import from_frames
from rpcrl.wire.messages import Message

__all__ = ["Direction", "Fault", "FaultProxy", "Predicate", "Where"]

Direction = Literal["up", "down"]
"""``up``: from a peer to the listener; ``down``: from the listener to a peer."""
Predicate = Callable[[Message], bool]
"""Whether the fault hits this message. Runs on the proxy's threads."""
Frames = list[Frame]


@dataclass(frozen=True)
class Where:
    """Which messages a fault hits: the next ``count`` that match (None: all), of one direction or peer (None: any)."""

    count: int | None = 1
    direction: Direction | None = None
    peer: str | None = None


class WhereOptions(TypedDict, total=False):
    """The fields of ``Where`` as keyword arguments."""

    count: int | None
    direction: Direction | None
    peer: str | None


class Fault:
    """One kind of trouble, for the messages that match."""

    def __init__(
        self,
        name: str,
        predicate: Predicate,
        apply: Callable[[Frames], list[Frames]],
        where: Where,
    ) -> None:
        self.name = name
        self.held: deque[tuple[Direction, str, Frames]] = deque()
        self._predicate = predicate
        self._apply = apply
        self._where = where
        self._left = where.count
        self._matched = 0
        self._changed = threading.Condition()

    @property
    def num_matched(self) -> int:
        """Number of messages that were hit so far."""
        with self._changed:
            return self._matched

    def wait(self, count: int = 1, *, patience_s: float = 20.0) -> None:
        """Wait until ``count`` messages were hit. Raises AssertionError when that takes too long."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._matched >= count, patience_s):
                raise AssertionError(f"{self}: {self._matched} of {count} messages within {patience_s:g} s")

    def stop(self) -> None:
        """Let everything pass from now on."""
        with self._changed:
            self._left = 0

    def strike(self, direction: Direction, peer: str, message: Message, frames: Frames) -> list[Frames] | None:
        """Return what goes on instead of ``frames``; None when this fault does not mind them."""
        with self._changed:
            if self._left == 0 or self._where.direction not in (None, direction):
                return None
            if self._where.peer not in (None, peer) or not self._predicate(message):
                return None
            if self._left is not None:
                self._left -= 1
            self._matched += 1
            self._changed.notify_all()
        if self.name == "hold":
            self.held.append((direction, peer, frames))
        return self._apply(frames)

    def __repr__(self) -> str:
        return f"<{self.name} ({self._where}), matched {self._matched}>"


class _Upstream:
    """The connection of one peer towards the real listener; its thread owns it."""

    def __init__(self, proxy: FaultProxy, peer: str) -> None:
        self._proxy = proxy
        self._peer = peer
        self._outbox: deque[Frames] = deque()
        self._connection: Connection | None = None
        self._opened = threading.Event()
        self._ends = False
        self.thread = threading.Thread(target=self._run, name=f"proxy-{peer}", daemon=True)
        self.thread.start()

    def post(self, frames: Frames) -> None:
        """Send towards the listener; safe from any thread."""
        self._outbox.append(frames)
        self.wake()

    def end(self) -> None:
        """Make the thread close the connection and end."""
        self._ends = True
        self.wake()

    def wake(self) -> None:
        self._opened.wait()
        if self._connection is not None:
            self._connection.wake()

    def _run(self) -> None:
        try:
            self._connection = self._proxy.open_upstream(self._peer)
        finally:
            self._opened.set()
        try:
            while not self._ends:
                while self._outbox:
                    self._connection.send(self._outbox.popleft())
                frames = self._connection.receive(None)
                if frames is not None:
                    self._proxy.route("down", self._peer, frames)
        except (AuthenticationError, PeerUnreachableError) as error:
            self._proxy.failures.append(f"{self._peer}: {error}")
        finally:
            self._connection.close()


class FaultProxy:
    """Stands between peers and the listener at ``upstream``; peers connect to ``address``. Use it with ``with``.

    On TCP ``keys`` and ``allowed`` are the proxy's own as a listener, and ``client_keys`` gives the keys of a peer
    towards the real listener.
    """

    def __init__(
        self,
        upstream: str,
        address: str,
        *,
        limits: Limits | None = None,
        keys: KeyPair | None = None,
        allowed: Allowed | None = None,
        client_keys: Callable[[str], ClientKeys] | None = None,
    ) -> None:
        self.failures: list[str] = []
        self.undeliverable = 0
        """Messages down to peers that were not there any more."""
        self.passed = {"up": 0, "down": 0}
        self._upstream_address = upstream
        self._limits = limits if limits is not None else Limits()
        self._client_keys = client_keys
        self._lock = threading.Lock()
        self._faults: list[Fault] = []
        self._upstreams: dict[str, _Upstream] = {}
        self._outbox: deque[tuple[str, Frames]] = deque()
        self._ends = False
        self._front: Listener = listen(address, limits=self._limits, keys=keys, allowed=allowed)
        self._thread = threading.Thread(target=self._run, name="proxy-front", daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        """Where peers connect."""
        return self._front.address

    def drop(self, predicate: Predicate, **where: Unpack[WhereOptions]) -> Fault:
        """Lose messages that match; ``count``, ``direction`` and ``peer`` as in ``Where``."""
        return self._add(Fault("drop", predicate, lambda frames: [], Where(**where)))

    def duplicate(self, predicate: Predicate, **where: Unpack[WhereOptions]) -> Fault:
        """Deliver messages that match twice."""
        return self._add(Fault("duplicate", predicate, lambda frames: [frames, frames], Where(**where)))

    def replace(self, predicate: Predicate, change: Callable[[Frames], Frames], **where: Unpack[WhereOptions]) -> Fault:
        """Deliver ``change(frames)`` instead of messages that match."""
        return self._add(Fault("replace", predicate, lambda frames: [change(frames)], Where(**where)))

    def hold(self, predicate: Predicate, **where: Unpack[WhereOptions]) -> Fault:
        """Keep messages that match until ``release``; later ones overtake them."""
        return self._add(Fault("hold", predicate, lambda frames: [], Where(**where)))

    def release(self, fault: Fault) -> int:
        """Deliver what ``fault`` holds, in order; returns how many messages that were."""
        count = 0
        while fault.held:
            self._deliver(*fault.held.popleft())
            count += 1
        return count

    def __enter__(self) -> FaultProxy:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        self.close()
        if kind is None:
            self.check()

    def check(self) -> None:
        """Raise AssertionError when a fault matched nothing, or when the proxy itself had trouble."""
        idle = [str(fault) for fault in self._faults if fault.num_matched == 0]
        if idle:
            raise AssertionError(
                f"these faults matched nothing, so the test proves nothing: {', '.join(idle)} (passed: {self.passed})"
            )
        if self.failures:
            raise AssertionError(f"the proxy failed: {'; '.join(self.failures)}")

    def close(self) -> None:
        """Close every connection and the listener, and end the threads."""
        self._ends = True
        self._front.wake()
        self._thread.join()
        for upstream in self._upstreams.values():
            upstream.end()
        for upstream in self._upstreams.values():
            upstream.thread.join()

    def open_upstream(self, peer: str) -> Connection:
        """Return a peer's connection to the real listener."""
        keys = self._client_keys(peer) if self._client_keys is not None else None
        return connect(self._upstream_address, identity=peer, limits=self._limits, keys=keys)

    def route(self, direction: Direction, peer: str, frames: Frames) -> None:
        """Pass one message on, after the faults have had their say."""
        for each in self._strike(direction, peer, frames):
            self._deliver(direction, peer, each)

    def _strike(self, direction: Direction, peer: str, frames: Frames) -> Sequence[Frames]:
        try:
            message = from_frames(without_note(frames))
        except WireError:
            return [frames]  # not a message: nothing for a predicate to look at
        with self._lock:
            faults = list(self._faults)
        for fault in faults:
            instead = fault.strike(direction, peer, message, frames)
            if instead is not None:
                return instead
        return [frames]

    def _deliver(self, direction: Direction, peer: str, frames: Frames) -> None:
        with self._lock:
            self.passed[direction] += 1
            if direction == "up":
                upstream = self._upstreams.get(peer) or self._upstreams.setdefault(peer, _Upstream(self, peer))
        if direction == "up":
            upstream.post(frames)
        else:
            self._outbox.append((peer, frames))
            self._front.wake()

    def _add(self, fault: Fault) -> Fault:
        with self._lock:
            self._faults.append(fault)
        return fault

    def _run(self) -> None:
        try:
            while not self._ends:
                while self._outbox:
                    peer, frames = self._outbox.popleft()
                    try:
                        self._front.send(peer, frames)
                    except PeerUnreachableError:
                        self.undeliverable += 1
                got = self._front.receive(None)
                if got is not None:
                    self.route("up", *got)
        finally:
            self._front.close()
