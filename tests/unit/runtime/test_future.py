"""Futures: gathering, deadlines, errors, awaiting."""

import asyncio
import concurrent.futures
import gc
import weakref

import pytest

from rpcrl.errors import CallTimeoutError, UsageError
from rpcrl.runtime.future import Finish, Future, PendingReplies, as_completed, when_settled
from rpcrl.wire.messages import Encoded


def reply(text: str) -> Encoded:
    return Encoded(text.encode())


def future_of(pending: PendingReplies, **options: float) -> Future[list[str]]:
    finish = Finish(lambda replies: [item.payload.tree.decode() for item in replies], list)
    return Future(pending, finish, **options)


def test_replies_come_back_in_rank_order_whatever_their_arrival():
    pending = PendingReplies("role.m", range(3))
    future = future_of(pending)
    for index in (2, 0):
        pending.deliver(index, reply(f"r{index}"))
    assert not future.done()
    assert pending.missing_ranks == [1]
    assert repr(future) == "<Future of role.m: waiting for ranks [1]>"
    pending.deliver(1, reply("r1"))
    assert future.result() == ["r0", "r1", "r2"]
    assert future.result() == ["r0", "r1", "r2"], "a second look gives the same value"


def test_the_first_failure_settles_and_later_replies_change_nothing():
    pending = PendingReplies("role.m", range(2))
    future = future_of(pending)
    pending.fail(ValueError("first"))
    pending.fail(ValueError("second"))
    pending.deliver(0, reply("x"))
    pending.deliver(1, reply("y"))
    with pytest.raises(ValueError, match="first"):
        future.result()
    assert isinstance(future.exception(), ValueError)


def test_a_deadline_leaves_the_call_open():
    pending = PendingReplies("role.m", range(1))
    future = future_of(pending, timeout_s=0.01)
    with pytest.raises(CallTimeoutError, match=r"ranks \[0\] within 0.01 s"):
        future.result()
    with pytest.raises(CallTimeoutError):
        future.exception(timeout_s=0.01)
    pending.deliver(0, reply("late"))
    assert future.result() == ["late"]
    assert future.exception() is None


def test_an_error_while_collecting_is_kept():
    pending = PendingReplies("role.m", range(1))
    future: Future[float] = Future(pending, Finish(list, lambda outputs: 1 / 0))
    pending.deliver(0, reply("x"))
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            future.result()


def test_await_and_a_cancelled_awaiter_does_not_cancel_the_call():
    pending = PendingReplies("role.m", range(1))
    future = future_of(pending)

    async def impatient() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(_await(future), 0.01)

    asyncio.run(impatient())
    pending.deliver(0, reply("still"))
    assert asyncio.run(_await(future)) == ["still"]


async def _await(future: Future[list[str]]) -> list[str]:
    return await future


def test_await_keeps_the_methods_deadline():
    pending = PendingReplies("role.m", range(2))
    future = future_of(pending, timeout_s=0.01)
    with pytest.raises(CallTimeoutError, match=r"ranks \[0, 1\] within 0.01 s"):
        asyncio.run(_await(future))
    pending.deliver(0, reply("a"))
    pending.deliver(1, reply("b"))
    assert asyncio.run(_await(future)) == ["a", "b"]


def test_as_completed_yields_in_the_order_of_settling_and_names_a_lack():
    pendings = [PendingReplies(f"m{index}", range(1)) for index in range(3)]
    futures = [future_of(pending) for pending in pendings]
    pendings[2].deliver(0, reply("two"))
    pendings[0].fail(KeyError("zero"))
    settling = as_completed(futures, timeout_s=0.01)
    assert {next(settling), next(settling)} == {futures[0], futures[2]}
    with pytest.raises(CallTimeoutError, match="1 of 3 calls have no reply"):
        next(settling)


def test_callbacks_run_when_settled():
    pending = PendingReplies("m", range(1))
    future = future_of(pending)
    called: list[Future[list[str]]] = []
    future.add_done_callback(called.append)
    pending.deliver(0, reply("x"))
    assert called == [future]


def test_a_callback_may_cancel_other_calls():
    withdrawn: list[PendingReplies] = []
    first, second = PendingReplies("a", range(1)), PendingReplies("b", range(1))
    finish = Finish(list, list)
    winner, loser = Future(first, finish), Future(second, finish, cancel=withdrawn.append)
    winner.add_done_callback(lambda _: loser.cancel())
    first.deliver(0, reply("x"))
    assert withdrawn == [second]
    with pytest.raises(concurrent.futures.CancelledError):
        loser.result(0.01)
    second.deliver(0, reply("late"))  # and changes nothing


def test_an_interrupt_while_collecting_leaves_the_value_to_be_asked_for_again():
    pending = PendingReplies("m", range(1))
    tries = iter([KeyboardInterrupt, None])

    def collect(outputs: list[str]) -> list[str]:
        if (error := next(tries)) is not None:
            raise error
        return outputs

    future = Future(pending, Finish(lambda replies: [item.payload.tree.decode() for item in replies], collect))
    pending.deliver(0, reply("rows"))
    with pytest.raises(KeyboardInterrupt):
        future.result()
    assert future.result() == ["rows"]


def test_what_has_failed_or_was_chained_is_let_go_of_without_the_garbage_collector():
    gc.disable()
    try:
        pending = PendingReplies("m", range(1))
        future = future_of(pending)
        gone = weakref.ref(future)
        when_settled([future], lambda waited=[future]: None)
        pending.fail(ValueError("no"))
        with pytest.raises(ValueError, match="no"):
            future.result()
        del future, pending
        assert gone() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("limit", ["3", 0, -1.0])
def test_a_limit_that_is_none_is_refused(limit: float):
    with pytest.raises(UsageError, match="timeout_s"):
        future_of(PendingReplies("m", range(1))).result(limit)
