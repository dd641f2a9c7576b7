"""How do calls reach a worker, and replies their callers? One I/O thread for each end of a transport.

A line admits each call once, remembers replies, and answers probes whatever the worker's other threads are doing. The
line to the controller offers a reply until it is taken; a line of peers does not wait for one that is away: the reply
is kept, and that peer asks for it when it is back.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from rpcrl.errors import EncodeError, MessageTooLargeError, PeerUnreachableError, RpcrlError
from rpcrl.logs import get_logger
from rpcrl.runtime.io_thread import IoThread
from rpcrl.runtime.replies import Discarded, ReplyCache
from rpcrl.shm.buffers import Buffer
from rpcrl.transport.base import Connection, Frame, ManyPeers
from rpcrl.wire.failures import describe
from rpcrl.wire.frames import from_frames, to_frames
from rpcrl.wire.messages import Call, CallId, Cancel, Failure, FailureInfo, Message, Probe, Result, Status

__all__ = ["CONTROLLER", "Job", "Line", "OnePeer", "Work"]

CONTROLLER = "controller"
RETRY_SEND_S = 0.05
"""Pace at which a message is offered again to a queue that is full."""

logger = get_logger(__name__)


class OnePeer:
    """A connection, seen as an end with one peer: the controller."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.wake = connection.wake
        self.close = connection.close

    def send(self, peer: str, frames: Sequence[Buffer]) -> None:
        """Queue one message for the controller."""
        self._connection.send(frames)

    def receive(self, timeout_s: float | None) -> tuple[str, list[Frame]] | None:
        """Return the controller's next message."""
        frames = self._connection.receive(timeout_s)
        return None if frames is None else (CONTROLLER, frames)


@dataclass(eq=False, slots=True)
class Job:
    """A call and the line that it came by."""

    call: Call
    line: Line
    arrived_at: float
    begun_at: float = 0.0

    @property
    def caller(self) -> str:
        """Who called."""
        return self.call.call_id.caller

    @property
    def cancelled(self) -> bool:
        """Whether its caller has given it up."""
        return self.call.call_id in self.line.cancelled

    def answer(self, reply: Result | Failure) -> None:
        """Send the reply; for any thread."""
        self.line.answer(self.call.call_id, reply)


class Work(Protocol):
    """What a line brings calls to; everything is called in the line's thread."""

    def begin(self, job: Job) -> None:
        """Take a call that has not been seen before."""
        ...

    def cancel(self, call_id: CallId) -> None:
        """Stop a call that runs, if it can be stopped."""
        ...

    def take(self, peer: str, message: Message) -> None:
        """Take a message that is not about calls."""
        ...

    def lost(self, error: BaseException) -> None:
        """Take the error that has ended the line."""
        ...

    def forget(self, peer: str) -> None:
        """Let go of what is kept for a caller that is gone."""
        ...


@dataclass(frozen=True)
class _Outgoing:
    peer: str
    message: Message
    answers: CallId | None = None


class Line:
    """The calls of one transport end; its thread alone uses the end."""

    def __init__(self, end: ManyPeers, work: Work, *, incarnation: str, name: str, patient: bool) -> None:
        self._end = end
        self._work = work
        self._incarnation = incarnation
        self._patient = patient
        self._cache = ReplyCache()
        self._arrived: dict[CallId, tuple[float, str, str]] = {}
        """Calls without a reply: (when they came, from whom, what they call)."""
        self.cancelled: set[CallId] = set()
        self._forgotten: set[str] = set()
        """Peers that are gone: what they have asked for is of no use, and must not be kept again."""
        self._outbox: deque[_Outgoing] = deque()
        self._offer_at: float | None = None
        self._io = IoThread(end, self, name=name)

    # -- any thread --------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the line's thread."""
        self._io.start()

    def post(self, message: Message, peer: str = CONTROLLER) -> None:
        """Send a message."""
        self._outbox.append(_Outgoing(peer, message))
        self._end.wake()

    def answer(self, call_id: CallId, reply: Result | Failure) -> None:
        """Send the reply of a call."""
        arrived = self._arrived.get(call_id)
        peer = arrived[1] if arrived is not None else CONTROLLER
        self._outbox.append(_Outgoing(peer, reply, call_id))
        self._end.wake()

    def forget(self, peer: str) -> None:
        """Drop what is kept for a peer that is gone, and give up its calls."""
        self._io.post(lambda: self._forget(peer))

    def close(self) -> None:
        """Send what is queued, as far as it is taken at once, and close the end; waits for the thread."""
        self._io.stop(lambda: None)  # the turn's tick sends what is queued

    # -- the line's thread -------------------------------------------------------------------------------------------

    def tick(self) -> None:
        """Send what is queued."""
        self._offer_at = None if self._send_outbox() else time.monotonic() + RETRY_SEND_S

    def next_tick_at(self) -> float | None:
        """Return when the queue is offered again, if it was full."""
        return self._offer_at

    def failed(self, error: BaseException) -> None:
        """Tell the worker: without this thread nobody would hear from it by this line."""
        self._work.lost(error)

    def take(self, peer: str, frames: Sequence[Buffer]) -> None:
        """Take a message."""
        try:
            message = from_frames(frames)
        except RpcrlError as error:
            logger.error("a message of %s was dropped: %s", peer, error)
            return
        if isinstance(message, Call):
            self._take_call(peer, message)
        elif isinstance(message, Probe):
            self._answer_probe(peer, message)
        elif isinstance(message, Cancel):
            if message.call_id in self._arrived:
                self.cancelled.add(message.call_id)
                self._work.cancel(message.call_id)
        else:
            self._work.take(peer, message)

    def _take_call(self, peer: str, call: Call) -> None:
        caller, sequence = call.call_id.caller, call.call_id.sequence
        if call.call_id.incarnation != self._incarnation or caller != peer:
            logger.error("call %s of %s is not for this life of this worker; it was dropped", call.call_id, peer)
            return
        self._cache.forget_below(caller, call.answered_below)
        if peer in self._forgotten:
            return
        if not self._cache.admit(caller, sequence):
            self._answer_again(peer, call.call_id)
            return
        now = time.monotonic()
        self._arrived[call.call_id] = (now, peer, f"{call.role}.{call.method}")
        self._work.begin(Job(call, self, now))

    def _answer_again(self, peer: str, call_id: CallId) -> None:
        _, known = self._cache.lookup(call_id.caller, call_id.sequence)
        if isinstance(known, Discarded):
            text = f"call {call_id} has run, but its reply is no longer kept; it was not run again"
            info = FailureInfo("ReplyDiscardedError", text, "")
            self._send_or_skip(peer, to_frames(Failure(call_id, "discarded", info)))
        elif known is not None:
            self._send_or_skip(peer, known)

    def _send_or_skip(self, peer: str, frames: Sequence[Buffer]) -> None:
        """Send an answer to a probe; a full queue loses it, and the caller asks again."""
        try:
            self._end.send(peer, frames)
        except PeerUnreachableError:
            logger.debug("an answer to a probe was skipped: the queue is full")

    def _answer_probe(self, peer: str, probe: Probe) -> None:
        self._cache.forget_below(probe.caller, probe.answered_below)
        now = time.monotonic()
        running: dict[int, float] = {}
        unknown: list[int] = []
        methods: list[str] = []
        for sequence in probe.sequences:
            call_id = CallId(probe.caller, probe.incarnation, sequence)
            seen, known = self._cache.lookup(probe.caller, sequence)
            if not seen:
                unknown.append(sequence)
            elif known is None:
                since, _, method = self._arrived.get(call_id, (now, peer, ""))
                running[sequence] = now - since
                methods.append(method)
            else:
                self._answer_again(peer, call_id)
        if running or unknown:
            method = methods[0] if methods else ""
            self._send_or_skip(peer, to_frames(Status(probe.caller, running, tuple(unknown), method)))

    def _send_outbox(self) -> bool:
        """Send what is queued; False if the end's queue is full."""
        while self._outbox:
            going = self._outbox[0]
            if going.peer in self._forgotten:
                if going.answers is not None:
                    self._arrived.pop(going.answers, None)
                    self.cancelled.discard(going.answers)
                self._outbox.popleft()
                continue
            try:
                frames = to_frames(going.message)
                self._end.send(going.peer, frames)
            except PeerUnreachableError:
                if self._patient:
                    return False
            except (EncodeError, MessageTooLargeError) as error:
                if going.answers is None or isinstance(going.message, Failure):
                    raise
                refusal = Failure(going.answers, "unencodable", describe(error))
                self._outbox[0] = _Outgoing(going.peer, refusal, going.answers)
                continue
            if going.answers is not None:
                self._cache.store(going.answers.caller, going.answers.sequence, frames)
                self._arrived.pop(going.answers, None)
                self.cancelled.discard(going.answers)
            self._outbox.popleft()
        return True

    def _forget(self, peer: str) -> None:
        self._forgotten.add(peer)
        self._cache.forget(peer)
        for call_id in [call_id for call_id, entry in self._arrived.items() if entry[1] == peer]:
            self.cancelled.add(call_id)
            self._work.cancel(call_id)
        self._work.forget(peer)  # last: a call that is cancelled keeps nothing any more
