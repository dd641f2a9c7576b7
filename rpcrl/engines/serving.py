"""Who steps an engine when requests come from many sides? One thread, which owns it.

Requests, aborts, and everything else that touches the engine (``run``) are commands of that thread, done between two
steps. It waits for an event while there is nothing to do, never for a time.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import TYPE_CHECKING, Any, TypeVar

from rpcrl.engines.requests import SampleOutput, SampleRequest
from rpcrl.errors import ClosedError, UsageError
from rpcrl.logs import get_logger

if TYPE_CHECKING:
    from rpcrl.engines.base import RolloutEngine

__all__ = ["EngineServer"]

log = get_logger(__name__)

T = TypeVar("T")

LOOK_S = 60.0
"""Longest single wait of a thread for an event; it looks around and waits again."""
CLOSE_S = 30.0
"""How long ``close`` waits for the step that runs."""


class _Waiter:
    """One request that somebody waits for."""

    def __init__(self, request: SampleRequest) -> None:
        self.request = request
        """As it is to be added (again): with the tokens that it has when the engine does not hold it."""
        self.future: Future[SampleOutput] = _uncancellable()


class EngineServer:
    """Serves requests from one engine; every method is for any thread, coroutines for any event loop.

    While paused the engine holds no request, so whoever paused it may put it to sleep or give it new weights. Requests
    keep their tokens meanwhile and go on with ``resume``.
    """

    def __init__(self, engine: RolloutEngine, *, name: str = "rpcrl-engine") -> None:
        self._engine = engine
        self._changed = threading.Condition()
        self._commands: deque[tuple[Callable[[], None], Future[Any] | None]] = deque()
        self._closing = False
        # from here on: of the engine's thread alone
        self._waiters: dict[str, _Waiter] = {}
        self._paused = False
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    async def generate(self, request: SampleRequest) -> SampleOutput:
        """Sample one response; returns it when it has ended, or was aborted with what it has.

        A request that is cancelled leaves the engine. Raises UsageError for one that cannot be sampled, the error of
        the engine that failed with it, and ClosedError.
        """
        waiter = _Waiter(request)
        self._post(lambda: self._add(waiter), waiter.future)
        try:
            return await asyncio.wrap_future(waiter.future)
        except asyncio.CancelledError:
            with contextlib.suppress(ClosedError):
                self._post(lambda: self._forget(waiter), None)
            raise

    async def abort(self, request_ids: Sequence[str] | None = None) -> int:
        """End requests (None: all) with ``finish_reason`` "abort"; unknown ids are ignored. Returns how many."""
        return await asyncio.wrap_future(self.submit(lambda: self._abort(request_ids)))

    async def pause(self) -> int:
        """Begin no further step until ``resume``; returns the requests that wait when the running step has ended."""
        return await asyncio.wrap_future(self.submit(self._pause))

    async def resume(self) -> int:
        """Go on with what waits; returns how many requests that are."""
        return await asyncio.wrap_future(self.submit(self._resume))

    def submit(self, function: Callable[[], T]) -> Future[T]:
        """Have the engine's thread call ``function`` between two steps."""
        future: Future[T] = _uncancellable()

        def call() -> None:
            try:
                future.set_result(function())
            except BaseException as error:  # whatever it is, it belongs to whoever asked
                future.set_exception(error)

        self._post(call, future)
        return future

    def run(self, function: Callable[[], T], *, alone: bool = False) -> T:
        """Call ``function`` in the engine's thread between two steps and return its result.

        ``alone``: the engine holds no request meanwhile. Not for an event loop's thread: it waits.
        """
        future = self.submit(lambda: self._alone(function) if alone else function())
        while True:
            try:
                return future.result(LOOK_S)
            except FutureTimeoutError:
                if future.done():  # the function's own TimeoutError
                    raise
                if not self._thread.is_alive():
                    raise ClosedError("the engine's thread has ended") from None

    def close(self) -> None:
        """End the thread after the step that runs; whoever waits gets ClosedError. Closing twice does nothing."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join(CLOSE_S)

    # ------------------------------------------------------------------------------------ the engine's thread

    def _serve(self) -> None:
        try:
            while self._next():
                if self._waiters and not self._paused:
                    self._step()
        finally:
            self._end()

    def _next(self) -> bool:
        """Do what was asked; wait when there is nothing to do. Returns False at the end."""
        with self._changed:
            while not self._commands and not self._closing and (self._paused or not self._waiters):
                self._changed.wait(LOOK_S)
            if self._closing:
                return False
            commands, self._commands = self._commands, deque()
        for command, _ in commands:
            command()
        return True

    def _step(self) -> None:
        try:
            outputs = self._engine.step()
        except Exception as error:
            log.warning("a step of the engine failed, with it %d requests: %s", len(self._waiters), error)
            self._fail(error)
            return
        for output in outputs:
            self._settle(output)

    def _fail(self, error: Exception) -> None:
        """Give every waiter the engine's error, and empty the engine."""
        waiters, self._waiters = self._waiters, {}
        for waiter in waiters.values():
            waiter.future.set_exception(error)
        try:
            self._engine.abort()
        except Exception as broken:
            log.warning("after a failed step the engine could not be emptied: %s", broken)

    def _settle(self, output: SampleOutput) -> None:
        waiter = self._waiters.pop(output.request_id, None)
        if waiter is not None:
            waiter.future.set_result(output)

    def _add(self, waiter: _Waiter) -> None:
        name = waiter.request.request_id
        try:
            if name in self._waiters:
                raise UsageError(f"request {name!r} is being sampled already; each needs an id of its own")
            if not self._paused:
                self._engine.add([waiter.request])
        except Exception as error:
            waiter.future.set_exception(error)
            return
        self._waiters[name] = waiter

    def _forget(self, waiter: _Waiter) -> None:
        name = waiter.request.request_id
        if self._waiters.get(name) is waiter:
            del self._waiters[name]
            self._engine.abort([name])

    def _abort(self, request_ids: Sequence[str] | None) -> int:
        outputs = {output.request_id: output for output in self._engine.abort(request_ids)}
        named = list(self._waiters) if request_ids is None else [name for name in request_ids if name in self._waiters]
        for name in named:
            request = self._waiters[name].request
            held = SampleOutput(
                name, request.prior_ids, request.prior_log_probs, request.prior_versions, finish_reason="abort"
            )
            self._settle(outputs.get(name, held))
        return len(named)

    def _pause(self) -> int:
        self._paused = True
        self._take_out()
        return len(self._waiters)

    def _resume(self) -> int:
        if self._paused:
            self._paused = False
            self._put_back()
        return len(self._waiters)

    def _alone(self, function: Callable[[], T]) -> T:
        if self._paused:
            return function()
        self._take_out()
        try:
            return function()
        finally:
            self._put_back()

    def _take_out(self) -> None:
        """Empty the engine; each waiter's request then has the tokens that it had got."""
        if not self._waiters:
            return
        for output in self._engine.abort():
            waiter = self._waiters[output.request_id]
            waiter.request = waiter.request.resumed(output)

    def _put_back(self) -> None:
        for name, waiter in list(self._waiters.items()):
            try:
                self._engine.add([waiter.request])
            except Exception as error:
                del self._waiters[name]
                waiter.future.set_exception(error)

    def _end(self) -> None:
        closed = ClosedError("the engine's server was closed")
        with self._changed:
            self._closing = True
            commands, self._commands = self._commands, deque()
        futures = [waiter.future for waiter in self._waiters.values()] + [future for _, future in commands if future]
        self._waiters = {}
        for future in futures:
            if not future.done():
                future.set_exception(closed)

    def _post(self, command: Callable[[], None], future: Future[Any] | None) -> None:
        with self._changed:
            if self._closing:
                raise ClosedError("the engine's server was closed")
            self._commands.append((command, future))
            self._changed.notify_all()


def _uncancellable() -> Future[T]:
    """Return a future that only its maker ends: a waiter that gives up does not cancel what others share."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()
    return future
