"""How does a worker answer calls?

Three threads: the **main** thread builds the roles and runs synchronous methods in the order of their calls; an
**asyncio** loop (started when first needed) runs ``async def`` methods side by side; the **I/O** thread owns the
connection, remembers replies, and answers probes whatever the others are doing.
"""

from __future__ import annotations

import asyncio
import inspect
import queue
import signal
import threading
import time
from collections import deque
from collections.abc import Coroutine, Sequence
from typing import Any

from rpcrl.dispatch.register import MethodSpec, callable_method, registered_methods
from rpcrl.errors import EncodeError, MessageTooLargeError, PeerUnreachableError, RpcrlError, UnknownMethodError
from rpcrl.logs import get_logger
from rpcrl.runtime.gate import RoleGate
from rpcrl.runtime.replies import Discarded, ReplyCache
from rpcrl.shm.buffers import Buffer
from rpcrl.transport.base import Connection, Frame
from rpcrl.wire.codec import decode, encode
from rpcrl.wire.failures import describe
from rpcrl.wire.frames import from_frames, to_frames
from rpcrl.wire.imports import ImportPolicy
from rpcrl.wire.messages import (
    Call,
    CallId,
    Cancel,
    Failure,
    FailureInfo,
    Message,
    Probe,
    Result,
    Shutdown,
    Status,
    Welcome,
)

__all__ = ["CallServer", "Terminated"]

logger = get_logger(__name__)

RETRY_SEND_S = 0.05
"""Pace at which a message is offered again to a queue that is full."""


class Terminated(SystemExit):
    """This process has been told to end; raised by its signal handler wherever the main thread is."""


class CallServer:
    """Serves the calls that arrive on one connection."""

    def __init__(self, connection: Connection, imports: ImportPolicy, *, incarnation: str) -> None:
        self._connection = connection
        self._incarnation = incarnation
        self._imports = imports
        self._cache = ReplyCache()
        self._arrived: dict[CallId, tuple[float, str]] = {}
        self._cancelled: set[CallId] = set()
        self._tasks: dict[CallId, asyncio.Task[Any]] = {}
        """Asynchronous methods that run; belongs to the loop's thread."""
        self._outbox: deque[tuple[Message, CallId | None]] = deque()
        self._inbox: queue.SimpleQueue[Welcome | Call | Shutdown] = queue.SimpleQueue()
        self._roles: dict[str, Any] = {}
        self._gates: dict[str, RoleGate] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closing = threading.Event()
        self.failure: BaseException | None = None
        """Why the I/O thread has ended; None while it works, and after an orderly end."""
        self._io = threading.Thread(target=self._run_io, name="rpcrl-io", daemon=True)

    # -- main thread -------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the I/O thread."""
        self._io.start()

    def post(self, message: Message) -> None:
        """Send a message; for any thread."""
        self._post(message, None)

    def next_message(self) -> Welcome | Call | Shutdown:
        """Wait for something to do in the main thread."""
        return self._inbox.get()

    def add_roles(self, roles: dict[str, Any]) -> None:
        """Make built roles callable."""
        for role, instance in roles.items():
            self._gates[role] = RoleGate()
            self._roles[role] = instance

    def run(self) -> None:
        """Run synchronous methods, one after the other, until the controller says goodbye."""
        while True:
            message = self.next_message()
            if isinstance(message, Shutdown):
                return
            if isinstance(message, Call):
                gate = self._gates[message.role]
                gate.enter_alone()
                try:
                    if message.call_id in self._cancelled:
                        self._fail(message, "cancelled", asyncio.CancelledError("cancelled before it ran"))
                    else:
                        self._finish(message, *self._invoke(message))
                finally:
                    gate.leave(alone=True)

    def close(self) -> None:
        """Send what is queued and close the connection; waits for the I/O thread."""
        self._closing.set()
        self._connection.wake()
        self._io.join(timeout=10.0)
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)

    def _invoke(self, call: Call) -> tuple[Any, BaseException | None]:
        try:
            args, kwargs = self._arguments(call)
            return getattr(self._roles[call.role], call.method)(*args, **kwargs), None
        except Terminated:
            raise
        except BaseException as error:  # sys.exit() too: a method's end is not the worker's
            return None, error

    def _arguments(self, call: Call) -> tuple[tuple[Any, ...], dict[str, Any]]:
        args, kwargs = decode(call.payload, imports=self._imports)
        return args, kwargs

    # -- any thread --------------------------------------------------------------------------------------------------

    def _finish(self, call: Call, value: Any, error: BaseException | None) -> None:
        """Post the reply of a call."""
        if error is not None:
            self._fail(call, "raised", error)
            return
        try:
            # A copy, made before the next method runs: that one may change the tensors which this one returned.
            payload = encode(
                value if call.wants_result else None, path="return value", imports=self._imports
            ).own_copy()
        except Exception as refused:
            self._fail(call, "unencodable", refused)
            return
        self._post(Result(call.call_id, payload), call.call_id)

    def _fail(self, call: Call, kind: str, error: BaseException) -> None:
        self._post(Failure(call.call_id, kind, describe(error)), call.call_id)

    def _post(self, message: Message, answers: CallId | None) -> None:
        self._outbox.append((message, answers))
        self._connection.wake()

    # -- I/O thread --------------------------------------------------------------------------------------------------

    def _run_io(self) -> None:
        _leave_signals_to_main()
        try:
            while not (self._closing.is_set() and not self._outbox):
                delivered = self._send_outbox()
                if self._closing.is_set() and not delivered:
                    break
                frames = self._connection.receive(None if delivered else RETRY_SEND_S)
                if frames is not None:
                    self._take(frames)
        except BaseException as error:
            # Without this thread nobody would ever hear from this worker: it ends, and its agent says so.
            logger.exception("the connection to the controller is lost")
            self.failure = error
            self._inbox.put(Shutdown(f"{type(error).__name__}: {error}"))
        finally:
            self._connection.close()

    def _send_outbox(self) -> bool:
        """Send what is queued; False if the connection's queue is full."""
        while self._outbox:
            message, answers = self._outbox[0]
            try:
                frames = to_frames(message)
                self._connection.send(frames)
            except PeerUnreachableError:
                return False
            except (EncodeError, MessageTooLargeError) as error:
                if answers is None or isinstance(message, Failure):
                    raise
                self._outbox[0] = (Failure(answers, "unencodable", describe(error)), answers)
                continue
            if answers is not None:
                self._cache.store(answers.caller, answers.sequence, frames)
                self._arrived.pop(answers, None)
                self._cancelled.discard(answers)
            self._outbox.popleft()
        return True

    def _take(self, frames: Sequence[Frame]) -> None:
        try:
            message = from_frames(frames)
        except RpcrlError as error:
            logger.error("a message was dropped: %s", error)
            return
        if isinstance(message, Call):
            self._take_call(message)
        elif isinstance(message, Probe):
            self._answer_probe(message)
        elif isinstance(message, Cancel):
            self._cancel(message.call_id)
        elif isinstance(message, Welcome | Shutdown):
            self._inbox.put(message)
        else:
            logger.error("a message of kind %s is not for a worker; it was dropped", type(message).__name__)

    def _take_call(self, call: Call) -> None:
        caller, sequence = call.call_id.caller, call.call_id.sequence
        if call.call_id.incarnation != self._incarnation:
            logger.error("call %s is for another incarnation of this worker; it was dropped", call.call_id)
            return
        self._cache.forget_below(caller, call.answered_below)
        if not self._cache.admit(caller, sequence):
            self._answer_again(call.call_id)
            return
        self._arrived[call.call_id] = (time.monotonic(), f"{call.role}.{call.method}")
        spec = callable_method(type(self._roles[call.role]), call.method) if call.role in self._roles else None
        if spec is None:
            self._fail(call, "unknown_method", self._unknown(call))
        elif inspect.iscoroutinefunction(getattr(type(self._roles[call.role]), call.method)):
            self._start_async(call, spec)
        else:
            self._inbox.put(call)

    def _cancel(self, call_id: CallId) -> None:
        if call_id not in self._arrived:
            return
        self._cancelled.add(call_id)
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._cancel_task, call_id)

    def _cancel_task(self, call_id: CallId) -> None:
        if (task := self._tasks.get(call_id)) is not None:
            task.cancel()

    def _unknown(self, call: Call) -> UnknownMethodError:
        instance = self._roles.get(call.role)
        methods = ", ".join(registered_methods(type(instance))) or "none"
        return UnknownMethodError(f"{call.role} has no registered method {call.method!r}; registered: {methods}")

    def _answer_again(self, call_id: CallId) -> None:
        _, known = self._cache.lookup(call_id.caller, call_id.sequence)
        if isinstance(known, Discarded):
            text = f"call {call_id} has run, but its reply is no longer kept; it was not run again"
            info = FailureInfo("ReplyDiscardedError", text, "")
            self._send_or_skip(to_frames(Failure(call_id, "discarded", info)))
        elif known is not None:
            self._send_or_skip(known)

    def _send_or_skip(self, frames: Sequence[Buffer]) -> None:
        """Send an answer to a probe; a full queue loses it, and the caller asks again."""
        try:
            self._connection.send(frames)
        except PeerUnreachableError:
            logger.debug("an answer to a probe was skipped: the queue is full")

    def _answer_probe(self, probe: Probe) -> None:
        self._cache.forget_below(probe.caller, probe.answered_below)
        now = time.monotonic()
        running: dict[int, float] = {}
        unknown: list[int] = []
        methods: list[str] = []
        arrived = {
            call_id.sequence: entry for call_id, entry in self._arrived.items() if call_id.caller == probe.caller
        }
        for sequence in probe.sequences:
            seen, known = self._cache.lookup(probe.caller, sequence)
            if not seen:
                unknown.append(sequence)
            elif known is None:
                since, method = arrived.get(sequence, (now, ""))
                running[sequence] = now - since
                methods.append(method)
            else:
                self._answer_again(CallId(probe.caller, probe.incarnation, sequence))
        if running or unknown:
            method = methods[0] if methods else ""
            self._send_or_skip(to_frames(Status(probe.caller, running, tuple(unknown), method)))

    # -- asyncio -----------------------------------------------------------------------------------------------------

    def _start_async(self, call: Call, spec: MethodSpec) -> None:
        loop = self._running_loop()

        def enter() -> None:
            asyncio.run_coroutine_threadsafe(self._run_async(call, gated=not spec.concurrent), loop)

        if spec.concurrent:
            enter()
        else:
            self._gates[call.role].request(alone=False, enter=enter)

    async def _run_async(self, call: Call, *, gated: bool) -> None:
        task = asyncio.current_task()
        if task is not None:
            self._tasks[call.call_id] = task
        try:
            if call.call_id in self._cancelled:
                raise asyncio.CancelledError("cancelled before it ran")
            args, kwargs = self._arguments(call)
            running: Coroutine[Any, Any, Any] = getattr(self._roles[call.role], call.method)(*args, **kwargs)
            self._finish(call, await running, None)
        except BaseException as error:
            self._finish(call, None, error)
        finally:
            self._tasks.pop(call.call_id, None)
            if gated:
                self._gates[call.role].leave(alone=False)

    def _run_loop(self, loop: asyncio.AbstractEventLoop) -> None:
        _leave_signals_to_main()
        loop.run_forever()

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=self._run_loop, args=(self._loop,), name="rpcrl-asyncio", daemon=True).start()
        return self._loop


def _leave_signals_to_main() -> None:
    """A signal that another thread takes does not interrupt the main thread's wait, and would be seen too late."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
