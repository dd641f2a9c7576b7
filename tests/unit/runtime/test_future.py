"""Futures: gathering, deadlines, errors, awaiting."""

import asyncio

import pytest

from rpcrl.errors import CallTimeoutError
from rpcrl.runtime.future import Finish, Future, PendingReplies, as_completed
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
