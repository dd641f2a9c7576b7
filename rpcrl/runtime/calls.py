"""Which calls are open, and what has to be sent about them? A plain table: events in, messages out, time passed in.

At most once: a call keeps its id for ever. When a worker is silent about a call for a while, the table asks with a
``Probe``: the worker answers "still running", sends a lost reply again, or says that it never saw the call; only then
is the call sent again, under the same id, and the worker's reply cache makes sure that it runs once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from rpcrl.wire.messages import Call, CallId, Encoded, Probe, Status

__all__ = ["CallTable", "OpenCall"]

Token = TypeVar("Token")

FIRST_PROBE_S = 1.0
"""A worker that is silent about a call for this long is asked."""
SLOWEST_PROBE_S = 10.0
"""Probes slow down to this pace while the worker says that the call still runs."""


@dataclass
class OpenCall(Generic[Token]):
    """One call that has no reply yet."""

    call: Call
    token: Token
    opened_at: float
    probe_at: float
    pace_s: float = FIRST_PROBE_S


@dataclass
class _Peer(Generic[Token]):
    incarnation: str
    next_sequence: int = 1
    open: dict[int, OpenCall[Token]] = field(default_factory=dict)

    @property
    def answered_below(self) -> int:
        return next(iter(self.open), self.next_sequence)  # entered in rising order


class CallTable(Generic[Token]):
    """The open calls of one caller, by worker."""

    def __init__(self, caller: str) -> None:
        self._caller = caller
        self._peers: dict[str, _Peer[Token]] = {}
        self._look_at: float | None = math.inf
        """No call is due before this (None: to be found out). With thousands of open calls they cannot all be looked
        at for each message."""

    def add_peer(self, identity: str, incarnation: str) -> None:
        """Make room for a worker's calls."""
        self._peers[identity] = _Peer(incarnation)

    def has_peer(self, identity: str) -> bool:
        """Tell whether a worker can be called."""
        return identity in self._peers

    def open(
        self,
        identity: str,
        role: str,
        method: str,
        payload: Encoded,
        token: Token,
        *,
        now: float,
        wants_result: bool = True,
        keep_from_bytes: int | None = None,
    ) -> Call:
        """Enter a new call and return the message to send."""
        peer = self._peers[identity]
        call_id = CallId(self._caller, peer.incarnation, peer.next_sequence)
        call = Call(call_id, role, method, payload, peer.answered_below, wants_result, keep_from_bytes)
        peer.open[peer.next_sequence] = OpenCall(call, token, now, now + FIRST_PROBE_S)
        if self._look_at is not None:
            self._look_at = min(self._look_at, now + FIRST_PROBE_S)
        peer.next_sequence += 1
        return call

    def close(self, identity: str, call_id: CallId) -> OpenCall[Token] | None:
        """Take out the call that a reply belongs to; None for a second reply or one of another incarnation."""
        peer = self._peers.get(identity)
        if peer is None or call_id.caller != self._caller or call_id.incarnation != peer.incarnation:
            return None
        return peer.open.pop(call_id.sequence, None)

    def withdraw(self, wanted: Callable[[Token], bool]) -> list[tuple[str, OpenCall[Token]]]:
        """Take out the calls whose token is wanted; returns them with their workers."""
        withdrawn: list[tuple[str, OpenCall[Token]]] = []
        for identity, peer in self._peers.items():
            sequences = [sequence for sequence, entry in peer.open.items() if wanted(entry.token)]
            withdrawn += [(identity, peer.open.pop(sequence)) for sequence in sequences]
        return withdrawn

    def on_status(self, identity: str, status: Status, *, now: float) -> list[Call]:
        """Take a worker's answer to a probe; returns the calls that it never saw, to be sent again."""
        peer = self._peers.get(identity)
        if peer is None or status.caller != self._caller:
            return []
        for sequence in status.running:
            if (entry := peer.open.get(sequence)) is not None:
                entry.pace_s = min(entry.pace_s * 2, SLOWEST_PROBE_S)
                entry.probe_at = now + entry.pace_s
        self._look_at = None
        return [peer.open[sequence].call for sequence in status.unknown if sequence in peer.open]

    def probes(self, *, now: float) -> list[tuple[str, Probe]]:
        """Return the questions that are due, one message a worker."""
        due: list[tuple[str, Probe]] = []
        if self._look_at is not None and now < self._look_at:
            return due
        for identity, peer in self._peers.items():
            late = [sequence for sequence, entry in peer.open.items() if entry.probe_at <= now]
            for sequence in late:
                peer.open[sequence].probe_at = now + peer.open[sequence].pace_s
            if late:
                due.append((identity, Probe(self._caller, peer.incarnation, tuple(late), peer.answered_below)))
        self._look_at = None
        return due

    def next_probe_at(self) -> float | None:
        """Return when to ask ``probes`` next: it has nothing before that. None when no call is waited for."""
        if self._look_at is None:
            every = (entry.probe_at for peer in self._peers.values() for entry in peer.open.values())
            self._look_at = min(every, default=math.inf)
        return None if self._look_at == math.inf else self._look_at

    def drop_peers(self, identities: Iterable[str]) -> list[OpenCall[Token]]:
        """Forget workers; returns their open calls in the order in which they were made."""
        dropped: list[OpenCall[Token]] = []
        for identity in identities:
            if (peer := self._peers.pop(identity, None)) is not None:
                dropped += peer.open.values()
        return sorted(dropped, key=lambda entry: entry.opened_at)

    def entries(self) -> Iterator[tuple[str, OpenCall[Token]]]:
        """Yield the calls without a reply, with their workers."""
        for identity, peer in self._peers.items():
            for entry in peer.open.values():
                yield identity, entry

    def num_open_of(self, identity: str) -> int:
        """Return how many calls of one worker have no reply."""
        peer = self._peers.get(identity)
        return 0 if peer is None else len(peer.open)

    @property
    def num_open(self) -> int:
        """Number of calls without a reply."""
        return sum(len(peer.open) for peer in self._peers.values())
