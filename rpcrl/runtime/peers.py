"""How do workers call each other? Directly, once the controller has introduced them.

A worker that is given a group's handle asks the controller for an introduction at its first call; the group's members
start to listen (each at an address and, on TCP, with a key of its own) and let it in. Both halves are the same as
between driver and workers: calls that run at most once, replies that are asked for again, ends told at once.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rpcrl.errors import AgentLostError, ClosedError, RpcrlError, WorkerLostError
from rpcrl.logs import get_logger
from rpcrl.runtime.caller import Caller, Part, Seat
from rpcrl.runtime.deferred import Deferred
from rpcrl.runtime.future import PendingReplies
from rpcrl.runtime.io_thread import IoThread
from rpcrl.runtime.line import Line
from rpcrl.runtime.serve import CallServer
from rpcrl.runtime.sharing import place, sharing
from rpcrl.shm.buffers import Buffer
from rpcrl.shm.exchange import Exchange
from rpcrl.transport.base import Dialer, KeyPair
from rpcrl.transport.keys import AllowList
from rpcrl.transport.open import dialer, listen
from rpcrl.wire.frames import from_frames, to_frames
from rpcrl.wire.imports import ImportPolicy
from rpcrl.wire.messages import (
    Encoded,
    ExpectPeer,
    Failure,
    ForgetPeer,
    GroupEnded,
    Introduce,
    Introduction,
    Message,
    PeerExpected,
    Result,
    Status,
)

__all__ = ["Me", "Peers", "listening_address"]

ASK_AGAIN_S = 5.0
"""Pace at which the controller is asked again about a group that calls wait for."""

logger = get_logger(__name__)


@dataclass(frozen=True)
class Me:
    """Who this worker is for its peers."""

    run_id: str
    identity: str
    incarnation: str
    address: str
    """Where it listens once a peer is announced; port 0 on TCP."""
    keys: KeyPair | None = field(repr=False)


def listening_address(controller: str, host: str, incarnation: str) -> str:
    """Return where a worker listens for peers: beside the controller's socket, or on any free port of the host."""
    scheme, _, rest = controller.partition("://")
    if scheme == "ipc":
        return f"ipc://{rest.rpartition('/')[0]}/{incarnation}.sock"
    return f"tcp://{host}:0" if scheme == "tcp" else f"{scheme}://{incarnation}"


class Peers:
    """A worker's way to its peers and theirs to it; nothing is opened before the first introduction."""

    def __init__(self, server: CallServer, me: Me) -> None:
        self._server = server
        self._me = me
        self._allowed = AllowList()
        self._keys_of_peers: dict[str, str] = {}
        self._line: Line | None = None
        self._address = ""
        self._calls: _PeerCalls | None = None
        self._lock = threading.Lock()
        self._closed = False
        self._deferred = Deferred()

    # -- the router of handles: any thread ---------------------------------------------------------------------------

    @property
    def run_id(self) -> str:
        """Name of the run."""
        return self._me.run_id

    @property
    def imports(self) -> ImportPolicy:
        """Which modules' functions and classes may travel."""
        return self._server.imports

    def check_usable(self) -> None:
        """Raise ClosedError when this worker ends."""
        if self._closed:
            raise ClosedError(f"worker {self._me.identity} is ending; it calls nobody any more")

    def call(self, group: str, role: str, method: str, parts: Sequence[Part], pending: PendingReplies) -> None:
        """Send one call to workers of another group."""
        calls = self._outgoing()
        if calls is None:
            self.check_usable()
            return
        calls.post(lambda: calls.call(group, role, method, parts, pending))

    def place(self, payload: Encoded, receivers: Sequence[str]) -> Encoded:
        """Put large buffers into shared memory, for receivers that see it."""
        return place(self._server.exchange, payload, receivers)

    def cancel(self, pending: PendingReplies) -> None:
        """Give a call up."""
        calls = self._outgoing()
        if calls is not None:
            calls.post(lambda: calls.cancel(pending))

    def defer(self, work: Callable[[], None]) -> None:
        """Run ``work``, which waits for nothing, outside of the I/O thread soon."""
        self._deferred.run(work)

    def close(self) -> None:
        """Close what was opened; open calls fail with ClosedError."""
        with self._lock:
            self._closed = True
            calls, line = self._calls, self._line
        if calls is not None:
            calls.stop()
        if line is not None:
            line.close()
        self._deferred.close()

    # -- thread of the controller's line -----------------------------------------------------------------------------

    def take(self, message: Message) -> None:
        """Take a message of the controller about other workers."""
        if isinstance(message, ExpectPeer):
            self._expect(message)
        elif isinstance(message, ForgetPeer):
            self._forget(message.identity)
        elif isinstance(message, Introduction | GroupEnded):
            calls = self._outgoing()
            if calls is not None:
                calls.post(lambda: calls.hear(message))
        else:
            logger.error("a message of kind %s is not for a worker; it was dropped", type(message).__name__)

    def _forget(self, peer: str) -> None:
        if (key := self._keys_of_peers.pop(peer, None)) is not None:
            self._allowed.remove(key)
        with self._lock:
            line = self._line
        if line is not None:
            line.forget(peer)
        else:
            self._server.forget(peer)

    def _expect(self, message: ExpectPeer) -> None:
        keys = self._me.keys
        if keys is not None:
            self._allowed.add(message.public_key, message.identity)
            self._keys_of_peers[message.identity] = message.public_key
        with self._lock:
            if self._closed:
                return
            if self._line is None:
                end = listen(self._me.address, keys=keys, allowed=self._allowed if keys is not None else None)
                self._address = end.address
                shared = sharing(end, self._server.exchange)
                self._line = Line(
                    shared, self._server, incarnation=self._me.incarnation, name="rpcrl-peers", patient=False
                )
                self._line.start()
        self._server.post(PeerExpected(message.identity, self._address))

    def _outgoing(self) -> _PeerCalls | None:
        """Return the calling half, opened at its first use; None once this worker ends."""
        with self._lock:
            if self._closed:
                return None
            if self._calls is None:
                scheme = self._me.address.partition("://")[0]
                end = dialer(scheme, identity=self._me.identity, keys=self._me.keys)
                self._calls = _PeerCalls(end, self._me.identity, self._server.post, self._server.exchange)
            return self._calls


@dataclass
class _Acquaintance:
    """A group that this worker calls, or wants to."""

    introduced: bool = False
    ended: GroupEnded | None = None
    identities: tuple[str, ...] = ()
    asked_at: float = 0.0
    waiting: list[tuple[str, str, Sequence[Part], PendingReplies]] = field(default_factory=list)


class _PeerCalls:
    """Outgoing calls to peers; its thread owns the dialer."""

    def __init__(
        self,
        dialer: Dialer,
        identity: str,
        tell_controller: Callable[[Message], None],
        exchange: Exchange | None = None,
    ) -> None:
        self._dialer = dialer
        self._end = sharing(dialer, exchange)
        self._tell_controller = tell_controller
        self._caller = Caller(identity, self._send, self._seat_of)
        self._seats: dict[str, Seat] = {}
        self._groups: dict[str, _Acquaintance] = {}
        self._io = IoThread(self._end, self, name="rpcrl-peer-calls")
        self.post = self._io.post
        self._io.start()

    def stop(self) -> None:
        """End the thread; open calls fail with ClosedError."""
        self._io.stop(lambda: self._end_all(ClosedError("this worker ends")))

    # -- commands ----------------------------------------------------------------------------------------------------

    def call(self, group: str, role: str, method: str, parts: Sequence[Part], pending: PendingReplies) -> None:
        """Send a call, or keep it until the group's members are known."""
        if pending.settled.done():
            return  # cancelled on its way here
        if group not in self._groups:
            self._groups[group] = _Acquaintance()
            self._ask_for(group)
        known = self._groups[group]
        if known.ended is not None:
            pending.fail(_reason(known.ended, pending.description))
        elif known.introduced:
            self._caller.call(role, method, parts, pending)
        else:
            known.waiting.append((role, method, parts, pending))

    def cancel(self, pending: PendingReplies) -> None:
        """Give a call up."""
        for known in self._groups.values():
            known.waiting = [entry for entry in known.waiting if entry[3] is not pending]
        self._caller.cancel(pending)

    def hear(self, message: Introduction | GroupEnded) -> None:
        """Take what the controller says of a group."""
        known = self._groups.setdefault(message.group, _Acquaintance())
        if isinstance(message, GroupEnded):
            self._part_with(known, message)
            return
        if known.introduced or known.ended is not None:
            return
        known.introduced = True
        known.identities = tuple(member.identity for member in message.members)
        for member in message.members:
            self._seats[member.identity] = Seat(message.group, member.rank)
            self._caller.add_peer(member.identity, member.incarnation)
            self._dialer.dial(member.identity, member.address, server_public=member.public_key or None)
        waiting, known.waiting = known.waiting, []
        for role, method, parts, pending in waiting:
            self._caller.call(role, method, parts, pending)

    def _ask_for(self, group: str) -> None:
        self._groups[group].asked_at = time.monotonic()
        self._tell_controller(Introduce(group))

    def _part_with(self, known: _Acquaintance, ended: GroupEnded) -> None:
        if known.ended is not None:
            return
        known.ended = ended
        self._caller.drop(known.identities, lambda during: _reason(ended, during))
        for identity in known.identities:
            self._dialer.hang_up(identity)
            self._seats.pop(identity, None)
        waiting, known.waiting = known.waiting, []
        for _, _, _, pending in waiting:
            pending.fail(_reason(ended, pending.description))

    def _end_all(self, error: RpcrlError) -> None:
        for name, known in self._groups.items():
            known.ended = known.ended or GroupEnded(name, "closed", str(error))
            self._caller.drop(known.identities, lambda _: error)
            for _, _, _, pending in known.waiting:
                pending.fail(error)

    # -- the thread's calls ------------------------------------------------------------------------------------------

    def take(self, peer: str, frames: Sequence[Buffer]) -> None:
        """Take what a peer says about a call."""
        try:
            message = from_frames(frames)
        except RpcrlError as error:
            logger.error("a message of %s was dropped: %s", peer, error)
            return
        if isinstance(message, Result | Failure | Status):
            self._caller.take(peer, message)
        else:
            logger.error("a message of kind %s from %s is out of place", type(message).__name__, peer)

    def tick(self) -> None:
        """Ask about silent calls; and the controller again about groups that calls wait for, its word may be lost."""
        self._caller.ask()
        for group, known in self._groups.items():
            if self._is_waited_for(known) and known.asked_at + ASK_AGAIN_S <= time.monotonic():
                self._ask_for(group)

    def next_tick_at(self) -> float | None:
        """Return when ``tick`` has something to do next."""
        due = [known.asked_at + ASK_AGAIN_S for known in self._groups.values() if self._is_waited_for(known)]
        if (asks_at := self._caller.next_ask_at()) is not None:
            due.append(asks_at)
        return min(due, default=None)

    def _is_waited_for(self, known: _Acquaintance) -> bool:
        return known.ended is None and (bool(known.waiting) or self._caller.waits_for(known.identities))

    def failed(self, error: BaseException) -> None:
        """Fail everything that is open: this thread is gone."""
        self._end_all(ClosedError(f"this worker's thread for peer calls failed: {type(error).__name__}: {error}"))

    def _send(self, peer: str, message: Message) -> None:
        self._end.send(peer, to_frames(message))

    def _seat_of(self, identity: str) -> Seat | None:
        return self._seats.get(identity)


def _reason(ended: GroupEnded, during: str) -> RpcrlError:
    if ended.exits:
        return WorkerLostError(ended.exits, during=during)
    if ended.kind == "lost":
        return AgentLostError(f"{ended.reason}\n  during: {during}")
    return ClosedError(f"{ended.reason}\n  during: {during}")
