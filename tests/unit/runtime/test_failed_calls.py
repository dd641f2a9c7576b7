"""A call has failed on a rank: when does it end, and with which story?"""

from __future__ import annotations

import pytest

from rpcrl.errors import RemoteError, WorkerExit, WorkerLostError, name_ranks
from rpcrl.runtime.failed_calls import GRACE_S, FailedCalls
from rpcrl.runtime.future import PendingReplies
from rpcrl.wire.messages import Encoded

REPLY = Encoded(b"")


def raised(rank: int, message: str = "bad", type_name: str = "ValueError") -> RemoteError:
    return RemoteError(
        type_name=type_name, message=message, traceback_text="", method="m", role="actor", group="g", rank=rank
    )


def error_of(pending: PendingReplies) -> RemoteError:
    error = pending.settled.exception(0)
    assert isinstance(error, RemoteError)
    return error


def test_a_call_whose_other_ranks_have_answered_ends_at_once():
    table, pending = FailedCalls(), PendingReplies("actor.m", range(2))
    pending.deliver(0, REPLY)
    table.add(pending, raised(1), now=0.0)
    assert error_of(pending).ranks == (1,)
    assert "later" not in str(error_of(pending))
    assert "had not ended" not in str(error_of(pending))
    assert table.next_due_at() is None


def test_it_waits_a_moment_for_the_ranks_that_have_not():
    table, pending = FailedCalls(), PendingReplies("actor.m", range(4))
    table.add(pending, raised(3), now=10.0)
    table.end_due(now=10.0 + GRACE_S - 0.01)
    assert not pending.settled.done()
    assert table.next_due_at() == 10.0 + GRACE_S
    pending.deliver(1, REPLY)
    table.answered(pending)
    table.end_due(now=10.0 + GRACE_S)
    assert error_of(pending).still_running == (0, 2)
    assert "\n  ranks 0, 2 had not ended" in str(error_of(pending))


def test_p35_identical_errors_are_one_with_their_ranks():
    table, pending = FailedCalls(), PendingReplies("actor.m", range(5))
    for rank in (2, 1, 3):
        table.add(pending, raised(rank), now=0.0)
    table.add(pending, raised(4, "peer lost", "RuntimeError"), now=0.1)
    pending.deliver(0, REPLY)
    table.answered(pending)
    error = error_of(pending)
    assert (error.rank, set(error.ranks)) == (2, {1, 2, 3})
    assert str(error).startswith("actor.m raised ValueError on ranks 1–3 of group 'g' (first: rank 2, ")
    assert str(error).count("ValueError") == 1
    assert "\n  later: rank 4 raised RuntimeError: peer lost" in str(error)
    assert [other.rank for other in error.others] == [4]


def test_a_death_takes_over_and_lists_what_was_raised():
    table, pending = FailedCalls(), PendingReplies("actor.m", range(3))
    table.add(pending, raised(0, "peer lost", "RuntimeError"), now=0.0)
    table.add(pending, raised(2, "peer lost", "RuntimeError"), now=0.0)
    left = table.withdraw(pending)
    table.end_due(now=100.0)
    assert not pending.settled.done()
    end = WorkerExit("w", "g", 1, ("actor",), "host", 7, None, "SIGKILL", 0, False, (), "log")
    text = str(WorkerLostError([end], raised=left))
    assert text.index("killed by SIGKILL") < text.index("consequences:\n    ranks 0, 2 raised RuntimeError: peer lost")
    assert table.withdraw(pending) == []


@pytest.mark.parametrize(
    ("ranks", "words"), [([3], "rank 3"), ([1, 2, 3], "ranks 1–3"), ([7, 0, 1, 4], "ranks 0–1, 4, 7")]
)
def test_ranks_in_words(ranks: list[int], words: str):
    assert name_ranks(ranks) == words
