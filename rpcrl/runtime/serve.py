"""How does a worker run calls?

The **main** thread builds the roles and runs synchronous methods in the order of their calls; an **asyncio** loop
(started when first needed) runs ``async def`` methods side by side. Calls come by lines (``line.py``), each with an
I/O thread of its own: one from the controller, one from peers.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import queue
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any

from rpcrl.dispatch.register import MethodSpec, callable_method, registered_methods
from rpcrl.errors import UnknownMethodError, UsageError
from rpcrl.logs import get_logger
from rpcrl.runtime.gate import RoleGate
from rpcrl.runtime.io_thread import leave_signals_to_main
from rpcrl.runtime.lease import is_reference, materialize, references_in
from rpcrl.runtime.line import Job, Line, OnePeer
from rpcrl.runtime.progress import Running, running_here, step_of
from rpcrl.runtime.sharing import place, sharing
from rpcrl.runtime.store import STORE, Store, is_keepable, num_bytes
from rpcrl.runtime.threads import new_thread
from rpcrl.shm.exchange import Exchange
from rpcrl.transport.base import Connection
from rpcrl.wire.codec import decode, encode
from rpcrl.wire.failures import describe
from rpcrl.wire.imports import ImportPolicy
from rpcrl.wire.messages import (
    AllowImports,
    AskProgress,
    CallId,
    Failure,
    Free,
    Message,
    Progress,
    Result,
    Shutdown,
    Welcome,
)

__all__ = ["CallServer", "Terminated"]

JOIN_S = 2.0
"""How long the end of a worker waits for what its threads are at."""
LOOP_END_S = 1.0
"""How long cancelled asynchronous methods may take to end with their worker."""

logger = get_logger(__name__)

LOOK_AT_SIGNALS_S = 0.25
"""A SIGTERM that comes in the instant before a wait does not interrupt it: the wait is a short one, over and over."""


class Terminated(SystemExit):
    """This process has been told to end; raised by its signal handler wherever the main thread is."""


class CallServer:
    """Serves the calls that arrive at one worker."""

    def __init__(
        self,
        connection: Connection,
        imports: ImportPolicy,
        *,
        incarnation: str,
        store: Store | None = None,
        exchange: Exchange | None = None,
    ) -> None:
        self.exchange = exchange
        self.imports = imports
        self._store = store if store is not None else Store()
        self._reads: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._reading: threading.Thread | None = None
        self._running: Running | None = None
        self._starting = threading.Lock()
        self._tasks: dict[CallId, asyncio.Task[Any]] = {}
        """Asynchronous methods that run; belongs to the loop's thread."""
        self._inbox: queue.SimpleQueue[Welcome | Job | Shutdown] = queue.SimpleQueue()
        self._roles: dict[str, Any] = {}
        self._gates: dict[str, RoleGate] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._looping: threading.Thread | None = None
        self._quitting = False
        self.failure: BaseException | None = None
        """Why a line has ended; None while all work, and after an orderly end."""
        self.on_peers: Callable[[Message], None] = _refuse
        """Takes the controller's messages about other workers."""
        end = sharing(OnePeer(connection), exchange)
        self._line = Line(end, self, incarnation=incarnation, name="rpcrl-io", patient=True)

    # -- main thread -------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the I/O thread of the controller's line."""
        self._line.start()

    def post(self, message: Message) -> None:
        """Send a message to the controller; for any thread."""
        self._line.post(message)

    def next_message(self) -> Welcome | Job | Shutdown:
        """Wait for something to do in the main thread."""
        while True:
            try:
                return self._inbox.get(timeout=LOOK_AT_SIGNALS_S)
            except queue.Empty:
                continue

    def add_roles(self, roles: dict[str, Any]) -> None:
        """Make built roles callable."""
        for role, instance in roles.items():
            self._gates[role] = RoleGate()
            self._roles[role] = instance

    def run(self) -> None:
        """Run synchronous methods, one after the other, until the controller says goodbye."""
        while True:
            message = self.next_message()
            if isinstance(message, Shutdown) or self._quitting:
                return
            if isinstance(message, Job):
                gate = self._gates[message.call.role]
                gate.enter_alone()
                try:
                    if message.cancelled:
                        _fail(message, "cancelled", asyncio.CancelledError("cancelled before it ran"))
                    else:
                        call = message.call
                        message.begun_at = time.monotonic()
                        self._running = running_here(call.call_id, f"{call.role}.{call.method}")
                        self._finish(message, *self._invoke(message))
                finally:
                    self._running = None
                    gate.leave(alone=True)

    def quit(self, reason: str) -> None:
        """Have ``run`` return after the method that runs, whatever is queued; asynchronous ones are cancelled.

        For any thread: what a signal is to a process.
        """
        self._quitting = True
        self._inbox.put(Shutdown(reason))
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # it has ended by itself meanwhile
                self._loop.call_soon_threadsafe(self._cancel_all)

    def close(self) -> None:
        """Send what is queued and close the connection; waits for the I/O thread."""
        self._line.close()
        self._reads.put(None)
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
        for thread in (self._looping, self._reading):
            if thread is not None:
                thread.join(JOIN_S)

    def _invoke(self, job: Job) -> tuple[Any, BaseException | None]:
        try:
            args, kwargs = self._materialized(job, *self._arguments(job))
            return getattr(self._roles[job.call.role], job.call.method)(*args, **kwargs), None
        except Terminated:
            raise
        except BaseException as error:  # sys.exit() too: a method's end is not the worker's
            return None, error

    def _arguments(self, job: Job) -> tuple[tuple[Any, ...], dict[str, Any]]:
        args, kwargs = decode(job.call.payload, imports=self.imports)
        return args, kwargs

    def _materialized(
        self, job: Job, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Read the rows of references, unless the method wants the references themselves."""
        spec = callable_method(type(self._roles[job.call.role]), job.call.method)
        if spec is not None and not spec.materialize_futures:
            return args, kwargs
        return tuple(map(materialize, args)), {name: materialize(value) for name, value in kwargs.items()}

    # -- any thread --------------------------------------------------------------------------------------------------

    def _finish(self, job: Job, value: Any, error: BaseException | None) -> None:
        """Send the reply of a call."""
        times = (job.arrived_at, job.begun_at, time.monotonic())
        if error is not None:
            _fail(job, "raised", error)
            return
        try:
            if any(ref.holds_leases for ref in references_in(value)):
                raise UsageError(
                    "a method returned a BatchRef of results that are kept for this worker: they would be let go of "
                    "with the method's end. Return ref.fetch(), or have the driver make the call"
                )
            number, shown = self._keep(job, value)
            payload = encode(shown, path="return value", imports=self.imports)
            # A copy, made before the next method runs: that one may change the tensors which this one returned.
            payload = place(self.exchange, payload, [job.caller])
            reply = Result(job.call.call_id, payload if number else payload.own_copy(), number, times)
        except Exception as refused:
            _fail(job, "unencodable", refused)
            return
        job.answer(reply)

    def _keep(self, job: Job, value: Any) -> tuple[int, Any]:
        """Keep a result that is to stay here; returns (its number, or 0; what the reply shows)."""
        call = job.call
        if not call.wants_result:
            return 0, None
        if call.keep_from_bytes is None or is_reference(value) or job.cancelled:
            return 0, value
        if call.keep_from_bytes > 0 and not (is_keepable(value) and num_bytes(value) >= call.keep_from_bytes):
            return 0, value
        return self._store.keep(value, job.caller)

    # -- threads of the lines ----------------------------------------------------------------------------------------

    def begin(self, job: Job) -> None:
        """Have a call run, by the thread that its method is for."""
        call = job.call
        if call.role == STORE:
            self._read(job)
            return
        spec = callable_method(type(self._roles[call.role]), call.method) if call.role in self._roles else None
        if spec is None:
            _fail(job, "unknown_method", self._unknown(job))
        elif inspect.iscoroutinefunction(getattr(type(self._roles[call.role]), call.method)):
            self._start_async(job, spec)
        else:
            self._inbox.put(job)

    def cancel(self, call_id: CallId) -> None:
        """Cancel an asynchronous method if it runs."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._cancel_task, call_id)

    def take(self, peer: str, message: Message) -> None:
        """Take a message that is not about calls."""
        if isinstance(message, Welcome | Shutdown):
            self._inbox.put(message)
        elif isinstance(message, Free):
            self._store.free(message.keys)
        elif isinstance(message, AskProgress):
            steps = tuple(step_of(call_id, self._running, self._tasks) for call_id in message.call_ids)
            self._line.post(Progress(steps), peer)
        elif isinstance(message, AllowImports):
            self.imports = ImportPolicy((*self.imports.prefixes, *message.prefixes))
        else:
            self.on_peers(message)

    def lost(self, error: BaseException) -> None:
        """End the worker: a line has failed, and whoever calls by it would not hear from this worker again."""
        self.failure = error
        self._inbox.put(Shutdown(f"{type(error).__name__}: {error}"))

    def forget(self, peer: str) -> None:
        """Let go of what is kept for a caller that is gone."""
        self._store.forget(peer)

    def _read(self, job: Job) -> None:
        """Have the store answer, in a thread of its own: it encodes rows, and a line has other work."""
        with self._starting:  # calls come by two lines
            if self._reading is None:
                self._reading = new_thread(self._serve_reads, name="rpcrl-store")
                self._reading.start()
        self._reads.put(job)

    def _serve_reads(self) -> None:
        leave_signals_to_main()
        while (job := self._reads.get()) is not None:
            self._answer_read(job)

    def _answer_read(self, job: Job) -> None:
        try:
            if callable_method(Store, job.call.method) is None:
                raise UnknownMethodError(f"a store has no method {job.call.method!r}")
            args, kwargs = self._arguments(job)
            # No copy of what stays outside of shared memory: what is kept is never changed.
            rows = encode(getattr(self._store, job.call.method)(*args, **kwargs), imports=self.imports)
            job.answer(Result(job.call.call_id, place(self.exchange, rows, [job.caller])))
        except Exception as error:
            _fail(job, "raised", error)

    def _cancel_all(self) -> None:
        for task in self._tasks.values():
            task.cancel()

    def _cancel_task(self, call_id: CallId) -> None:
        if (task := self._tasks.get(call_id)) is not None:
            task.cancel()

    def _unknown(self, job: Job) -> UnknownMethodError:
        call = job.call
        methods = ", ".join(registered_methods(type(self._roles.get(call.role)))) or "none"
        return UnknownMethodError(f"{call.role} has no registered method {call.method!r}; registered: {methods}")

    # -- asyncio -----------------------------------------------------------------------------------------------------

    def _start_async(self, job: Job, spec: MethodSpec) -> None:
        loop = self._running_loop()

        def enter() -> None:
            asyncio.run_coroutine_threadsafe(self._run_async(job, gated=not spec.concurrent), loop)

        if spec.concurrent:
            enter()
        else:
            self._gates[job.call.role].request(alone=False, enter=enter)

    async def _run_async(self, job: Job, *, gated: bool) -> None:
        call = job.call
        task = asyncio.current_task()
        if task is not None:
            self._tasks[call.call_id] = task
        try:
            if job.cancelled:
                raise asyncio.CancelledError("cancelled before it ran")
            job.begun_at = time.monotonic()
            args, kwargs = self._arguments(job)
            if any(map(is_reference, (*args, *kwargs.values()))):
                args, kwargs = await asyncio.to_thread(self._materialized, job, args, kwargs)
            running: Coroutine[Any, Any, Any] = getattr(self._roles[call.role], call.method)(*args, **kwargs)
            self._finish(job, await running, None)
        except BaseException as error:
            self._finish(job, None, error)
        finally:
            self._tasks.pop(call.call_id, None)
            if gated:
                self._gates[call.role].leave(alone=False)

    def _run_loop(self, loop: asyncio.AbstractEventLoop) -> None:
        leave_signals_to_main()
        try:
            loop.run_forever()
            tasks = asyncio.all_tasks(loop)
            for task in tasks:
                task.cancel()
            if tasks:
                loop.run_until_complete(asyncio.wait(tasks, timeout=LOOP_END_S))
        finally:
            loop.close()

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        with self._starting:  # calls come by two lines
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._looping = new_thread(self._run_loop, self._loop, name="rpcrl-asyncio")
                self._looping.start()
            return self._loop


def _fail(job: Job, kind: str, error: BaseException) -> None:
    job.answer(Failure(job.call.call_id, kind, describe(error)))


def _refuse(message: Message) -> None:
    logger.error("a message of kind %s is not for a worker; it was dropped", type(message).__name__)
