"""How does a call get its replies? The calling half of an I/O thread, the same in the driver and in a worker.

It joins the table of open calls to a way of sending: calls go out, replies and failures settle what waits for them,
silence is asked about.
"""

from __future__ import annotations

import concurrent.futures
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rpcrl.errors import (
    ClosedError,
    PeerUnreachableError,
    ReplyDiscardedError,
    RpcrlError,
    UnknownMethodError,
    WorkerLostError,
)
from rpcrl.logs import get_logger
from rpcrl.runtime.calls import CallTable
from rpcrl.runtime.failed_calls import FailedCalls
from rpcrl.runtime.future import PendingReplies
from rpcrl.runtime.lease import Lease
from rpcrl.wire.failures import rebuild
from rpcrl.wire.messages import Call, CallId, Cancel, Encoded, Failure, Free, Message, Result, Status

__all__ = ["Caller", "Part", "Seat"]

logger = get_logger(__name__)


@dataclass(frozen=True)
class Part:
    """One rank's share of a call."""

    identity: str
    payload: Encoded
    wants_result: bool = True
    keep_from_bytes: int | None = None


class Seat(NamedTuple):
    """Where a worker sits, for error texts."""

    group: str
    rank: int
    log_path: str = ""
    """Empty where it is not known: workers that call others are not told."""


@dataclass(frozen=True)
class _Slot:
    """Where a reply goes."""

    pending: PendingReplies
    index: int


class Caller:
    """The open calls of one I/O thread, which alone uses it."""

    def __init__(self, name: str, send: Callable[[str, Message], None], seat_of: Callable[[str], Seat | None]) -> None:
        self._table: CallTable[_Slot] = CallTable(name)
        self._failed = FailedCalls()
        self._send = send
        self._seat_of = seat_of
        self._released: deque[tuple[str, int]] = deque()
        self._leases: weakref.WeakValueDictionary[tuple[str, int], Lease] = weakref.WeakValueDictionary()
        """Of kept results: a reply that comes twice must not make, and end, a second lease."""

    def add_peer(self, identity: str, incarnation: str) -> None:
        """Make room for a worker's calls."""
        self._table.add_peer(identity, incarnation)

    def call(self, role: str, method: str, parts: Sequence[Part], pending: PendingReplies) -> None:
        """Send one call to the workers that it is for."""
        if pending.settled.done():
            return  # cancelled on its way here
        gone = [part.identity for part in parts if not self._table.has_peer(part.identity)]
        if gone:
            pending.fail(ClosedError(f"{pending.description}: {', '.join(gone)} is no worker that can be called here"))
            return
        now = time.monotonic()
        for index, part in enumerate(parts):
            call = self._table.open(
                part.identity,
                role,
                method,
                part.payload,
                _Slot(pending, index),
                now=now,
                wants_result=part.wants_result,
                keep_from_bytes=part.keep_from_bytes,
            )
            self._offer(part.identity, call)

    @property
    def num_open(self) -> int:
        """Number of parts of calls that have no reply."""
        return self._table.num_open

    def open_calls(self) -> Iterator[tuple[str, int, PendingReplies, CallId, float]]:
        """Yield every part of a call that has no reply: worker, rank, call, id, and when it was opened."""
        for identity, entry in self._table.entries():
            seat = self._seat_of(identity)
            if seat is not None:
                yield identity, seat.rank, entry.token.pending, entry.call.call_id, entry.opened_at

    def waits_for(self, identities: Iterable[str]) -> bool:
        """Tell whether a call of one of these workers is open."""
        return any(self._table.num_open_of(identity) for identity in identities)

    def cancel(self, pending: PendingReplies) -> None:
        """Give a call up: its caller hears at once, its workers drop it unless it runs already."""
        pending.fail(concurrent.futures.CancelledError(f"{pending.description} was cancelled"))
        for identity, entry in self._table.withdraw(lambda slot: slot.pending is pending):
            self._offer(identity, Cancel(entry.call.call_id))

    def take(self, peer: str, message: Result | Failure | Status) -> None:
        """Take what a worker says about a call."""
        if isinstance(message, Result):
            lease = self._lease_of(peer, message.kept) if message.kept else None
            entry = self._table.close(peer, message.call_id)
            if entry is not None:
                entry.token.pending.deliver(entry.token.index, message.payload, lease, message.times)
                self._failed.answered(entry.token.pending)
        elif isinstance(message, Failure):
            self._take_failure(peer, message)
        else:
            for call in self._table.on_status(peer, message, now=time.monotonic()):
                self._offer(peer, call)

    def _lease_of(self, peer: str, kept: int) -> Lease:
        """Return the lease of a kept result; what nobody waits for any more is let go by it."""
        lease = self._leases.get((peer, kept))
        if lease is None:
            lease = self._leases[peer, kept] = Lease(peer, kept, self.release)
        return lease

    def release(self, identity: str, key: int) -> None:
        """Let go of a kept result; for any thread, at any time: a finalizer may interrupt whoever holds a lock."""
        self._released.append((identity, key))

    def ask(self) -> None:
        """Ask about calls that have been silent for long, end those that have failed, let go of what was released."""
        now = time.monotonic()
        self._send_released()
        self._failed.end_due(now=now)
        for identity, probe in self._table.probes(now=now):
            self._offer(identity, probe)

    def next_ask_at(self) -> float | None:
        """Return when ``ask`` has something to do next."""
        due = [at for at in (self._table.next_probe_at(), self._failed.next_due_at()) if at is not None]
        return min(due, default=None)

    def drop(self, identities: Iterable[str], reason: Callable[[str], RpcrlError]) -> None:
        """Forget workers; their open calls fail with ``reason(what the call was)``, oldest first."""
        failed: set[int] = set()
        for entry in self._table.drop_peers(identities):
            pending = entry.token.pending
            if id(pending) not in failed:
                failed.add(id(pending))
                error, raised = reason(pending.description), self._failed.withdraw(pending)
                pending.fail(error.with_raised(raised) if isinstance(error, WorkerLostError) else error)

    def _send_released(self) -> None:
        keys: dict[str, list[int]] = {}
        while self._released:
            identity, key = self._released.popleft()
            if self._table.has_peer(identity):
                keys.setdefault(identity, []).append(key)
        for identity, freed in keys.items():
            try:
                self._send(identity, Free(tuple(freed)))
            except PeerUnreachableError:
                self._released.extend((identity, key) for key in freed)

    def _offer(self, identity: str, message: Message) -> None:
        """Send what a probe will send again if it does not arrive."""
        try:
            self._send(identity, message)
        except PeerUnreachableError as error:
            logger.debug("%s to %s waits: %s", type(message).__name__, identity, error)
        except RpcrlError as error:
            if isinstance(message, Call) and (entry := self._table.close(identity, message.call_id)) is not None:
                entry.token.pending.fail(error)

    def _take_failure(self, peer: str, failure: Failure) -> None:
        entry, seat = self._table.close(peer, failure.call_id), self._seat_of(peer)
        if entry is None or seat is None:
            return
        call = entry.call
        pending = entry.token.pending
        if failure.kind == "discarded":
            pending.fail(ReplyDiscardedError(failure.info.message))
        elif failure.kind == "unknown_method":
            pending.fail(UnknownMethodError(failure.info.message))
        else:
            error = rebuild(
                failure.info,
                method=call.method,
                role=call.role,
                group=seat.group,
                rank=seat.rank,
                call_id=str(call.call_id),
                log_path=seat.log_path,
            )
            self._failed.add(pending, error, now=time.monotonic())
