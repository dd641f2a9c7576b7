"""What does a caller hold while its call runs?

A ``Future`` gathers one reply per rank. The replies stay encoded until somebody asks for the value: decoding and
collecting happen in the asking thread, never in the controller's I/O thread.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from rpcrl.dispatch.register import check_timeout
from rpcrl.errors import CallTimeoutError
from rpcrl.runtime.lease import Lease, as_references, is_reference, materialize_stayed
from rpcrl.runtime.timing import Stopwatch
from rpcrl.wire.messages import Encoded

__all__ = ["Finish", "Future", "PendingReplies", "Reply", "as_completed", "wait_all", "when_settled"]

T = TypeVar("T")


@dataclass(frozen=True)
class Reply:
    """What one rank said."""

    payload: Encoded
    lease: Lease | None = None
    """Of a result that stays on the worker; the payload then says what it looks like."""


@dataclass(frozen=True)
class Finish(Generic[T]):
    """How the replies of a call become its value."""

    decode: Callable[[list[Reply]], list[Any]]
    """One output for each rank; a BatchRef for what stayed on the worker."""
    collect: Callable[[list[Any]], T]
    final: Callable[[Any], Any] = materialize_stayed
    """What the caller gets of one output: by default the rows of a reference, read then."""


class PendingReplies:
    """Gathers the replies of one call; filled by the controller's I/O thread, first failure wins."""

    def __init__(self, description: str, ranks: Sequence[int]) -> None:
        self.description = description
        self.settled: concurrent.futures.Future[list[Reply]] = concurrent.futures.Future()
        self.watch = Stopwatch()
        self.keeps: list[object] = []
        """What must live as long as the call is open, e.g. the leases of its arguments."""
        self._ranks = tuple(ranks)
        self._replies: list[Reply | None] = [None] * len(self._ranks)
        self._num_missing = len(self._ranks)
        self._lock = threading.Lock()
        self._claimed = False

    def deliver(self, index: int, payload: Encoded, lease: Lease | None = None, times: Sequence[float] = ()) -> None:
        """Take the reply of one rank; a lease keeps the result that stays on the worker, ``times`` are its marks."""
        with self._lock:
            if self._claimed or self._replies[index] is not None:
                return
            self.watch.received(index, times)
            self._replies[index] = Reply(payload, lease)
            self._num_missing -= 1
            self._claimed = complete = self._num_missing == 0
        if complete:
            self.keeps = []
            self.settled.set_result([reply for reply in self._replies if reply is not None])

    def fail(self, error: BaseException) -> None:
        """Settle with an error, unless it is settled."""
        with self._lock:
            if self._claimed:
                return
            self._claimed = True
            self._replies = [None] * len(self._replies)  # and with them the leases of what was kept
        # Outside of the lock: whoever waits for the end is called here.
        self.keeps = []
        self.settled.set_exception(error)

    @property
    def missing_ranks(self) -> list[int]:
        """Ranks that have not replied."""
        return [rank for rank, reply in zip(self._ranks, self._replies, strict=True) if reply is None]


class Future(Generic[T]):
    """The result of a call that runs: ``result(timeout_s)``, ``done()``, or ``await``."""

    def __init__(
        self,
        pending: PendingReplies,
        finish: Finish[T],
        *,
        timeout_s: float | None = None,
        cancel: Callable[[PendingReplies], None] | None = None,
    ) -> None:
        self._cancel = cancel
        self._pending = pending
        self._finish = finish
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._value: T | None = None
        self._error: BaseException | None = None
        self._finished = False
        self._outputs: list[Any] | None = None

    def __repr__(self) -> str:
        state = "done" if self.done() else f"waiting for ranks {self._pending.missing_ranks}"
        return f"<Future of {self._pending.description}: {state}>"

    def done(self) -> bool:
        """Tell whether ``result`` would return or raise at once."""
        return self._pending.settled.done()

    def result(self, timeout_s: float | None = None) -> T:
        """Wait for the value, at most ``timeout_s`` (else the method's own deadline, else without bound).

        Raises what the call raised: RemoteError, WorkerLostError, ReplyDiscardedError, ClosedError; or
        CallTimeoutError, after which the method may still run and a later ``result`` may succeed.
        """
        limit_s = self._timeout_s if timeout_s is None else check_timeout("result(timeout_s=…)", timeout_s)
        try:
            replies = self._pending.settled.result(limit_s)
        except concurrent.futures.TimeoutError:
            if self._pending.settled.done():
                raise  # the call itself failed with a timeout of its own
            raise CallTimeoutError(self._late(limit_s)) from None
        except BaseException:
            # The error is kept with the call, and its traceback would keep the call: a circle that holds results.
            del self
            raise
        return self._value_of(replies)

    def cancel(self) -> bool:
        """Give the call up; returns False if it is settled already.

        ``result`` then raises ``concurrent.futures.CancelledError``. Ranks that have not started the method never
        will; an ``async def`` that runs is cancelled; a synchronous one runs to its end, and its result is dropped.
        """
        if self._pending.settled.done() or self._cancel is None:
            return False
        # Settled here, not in the I/O thread: a callback that runs there may cancel other calls.
        self._pending.fail(concurrent.futures.CancelledError(f"{self._pending.description} was cancelled"))
        self._cancel(self._pending)
        return isinstance(self._pending.settled.exception(), concurrent.futures.CancelledError)

    def exception(self, timeout_s: float | None = None) -> BaseException | None:
        """Wait as ``result`` does and return the error instead of raising it; None if there is none."""
        try:
            self.result(timeout_s)
        except CallTimeoutError:
            if not self.done():
                raise
            return self._pending.settled.exception() or self._error
        except Exception as error:
            return error
        return None

    def add_done_callback(self, callback: Callable[[Future[T]], Any]) -> None:
        """Call ``callback(self)`` when the call is settled, in the controller's I/O thread: keep it short.

        It may ``cancel`` and ``submit``; waiting for another call there would wait for itself.
        """
        self._pending.settled.add_done_callback(lambda _: callback(self))

    def __await__(self) -> Generator[Any, None, T]:
        return (yield from self._awaited().__await__())

    async def _awaited(self) -> T:
        replies = await self._replies()
        if any(reply.lease is not None for reply in replies):
            return await asyncio.to_thread(self._value_of, replies)  # its rows have to be read first
        return self._value_of(replies)

    async def _replies(self) -> list[Reply]:
        try:
            async with asyncio.timeout(self._timeout_s):
                return await asyncio.wrap_future(self._shielded())
        except TimeoutError:
            if self._pending.settled.done():
                raise  # the call itself failed with a timeout of its own
            raise CallTimeoutError(self._late(self._timeout_s)) from None

    def _shielded(self) -> concurrent.futures.Future[list[Reply]]:
        """Follow the replies without letting a cancelled awaiter cancel them for everybody else."""
        follower: concurrent.futures.Future[list[Reply]] = concurrent.futures.Future()

        def settle(settled: concurrent.futures.Future[list[Reply]]) -> None:
            if not follower.set_running_or_notify_cancel():
                return
            error = settled.exception()
            if error is None:
                follower.set_result(settled.result())
            else:
                follower.set_exception(error)

        self._pending.settled.add_done_callback(settle)
        return follower

    def reference(self) -> Any:
        """Return the value of a call that is settled; if that is one batch that stayed on the workers, its BatchRef.

        Raises what ``result`` raises. Once ``result`` has been asked for, this is its value.
        """
        replies = self._pending.settled.result(0)
        with self._lock:
            if not self._finished:
                try:
                    outputs = self._decoded(replies)
                    collected = (
                        self._finish.collect(as_references(outputs)) if any(map(is_reference, outputs)) else None
                    )
                except Exception as error:
                    self._error, self._finished, self._outputs = error, True, None
                else:
                    if is_reference(collected):
                        return collected
        return self.result()

    def _decoded(self, replies: list[Reply]) -> list[Any]:
        if self._outputs is None:
            self._outputs = self._finish.decode(replies)
            replies.clear()  # the outputs are kept, their encoded form is not
        return self._outputs

    def _value_of(self, replies: list[Reply]) -> T:
        with self._lock:
            if not self._finished:
                watch = self._pending.watch
                watch.collecting()
                try:
                    self._value = self._finish.collect([self._finish.final(out) for out in self._decoded(replies)])
                    watch.collected()
                except Exception as error:  # not an interrupt: then the value can be asked for again
                    self._error = error
                self._finished = True
                self._outputs = None
        if self._error is not None:
            raise self._error
        return self._value  # type: ignore[return-value]  # T may include None

    def _late(self, limit_s: float | None) -> str:
        missing = self._pending.missing_ranks
        return (
            f"{self._pending.description}: no reply from ranks {missing} within {limit_s} s; the method may still run "
            "or have run. The deadline is result(timeout_s=…) or @register(timeout_s=…); what a rank prints is shown "
            f"by `rpcrl logs --rank {missing[0] if missing else 0}`"
        )


def as_completed(futures: Iterable[Future[T]], timeout_s: float | None = None) -> Iterator[Future[T]]:
    """Yield futures as they settle. Raises CallTimeoutError if some have not within ``timeout_s``."""
    by_settled = {future._pending.settled: future for future in futures}
    try:
        for settled in concurrent.futures.as_completed(by_settled, timeout_s):
            yield by_settled[settled]
    except concurrent.futures.TimeoutError:
        late = [future for settled, future in by_settled.items() if not settled.done()]
        raise CallTimeoutError(f"{len(late)} of {len(by_settled)} calls have no reply within {timeout_s} s") from None


def wait_all(futures: Iterable[Future[Any]], timeout_s: float | None = None) -> list[Any]:
    """Wait for calls of any groups together; returns their values in the order of the futures.

    The first failure is raised at once, not when the others have ended. Raises CallTimeoutError if some have not
    settled within ``timeout_s`` (a method's own deadline counts as well).
    """
    listed = list(futures)
    for future in as_completed(listed, timeout_s):
        error = future._pending.settled.exception()
        if error is not None:
            raise error
    return [future.result() for future in listed]


def when_settled(futures: Sequence[Future[Any]], then: Callable[[], None]) -> None:
    """Call ``then`` once all have settled, in the thread that settles the last of them (or here and now)."""
    lock, left, once = threading.Lock(), len(futures), [then]
    del then  # what it holds may hold the futures, whose callbacks are never dropped

    def one_more(_: object) -> None:
        nonlocal left
        with lock:
            left -= 1
            last = left == 0
        if last:
            once.pop()()

    for future in futures:
        future._pending.settled.add_done_callback(one_more)
