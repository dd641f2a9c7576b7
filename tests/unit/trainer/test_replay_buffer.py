"""Which groups are taken when, and does the bound on their age hold?"""

import random

import pytest

from rpcrl.errors import UsageError
from rpcrl.trainer.replay_buffer import Drop, ReplayBuffer


def filled(buffer, *uids, version=0, finished=True):
    for uid in uids:
        buffer.submit(uid, data_source="task", version=version)
        if finished:
            buffer.finish(uid, f"rows of {uid}", version=version)


def taken(buffer, count, **asked):
    return [group.uid for group in buffer.take(count, **asked)]


def test_the_oldest_version_goes_first_then_the_order_of_submission():
    buffer = ReplayBuffer(max_staleness=2)
    filled(buffer, "a", "b", "c", finished=False, version=0)
    buffer.finish("c", "rows", version=1)
    buffer.finish("b", "rows", version=0)
    buffer.finish("a", "rows", version=1)
    assert taken(buffer, 2, version=1) == ["b", "a"]
    assert buffer.uids() == ["c"]
    assert buffer.take(1, version=1)[0].rows == "rows"
    assert len(buffer) == 0


def test_nothing_is_taken_before_enough_groups_are_there():
    buffer = ReplayBuffer(max_staleness=1)
    filled(buffer, "a")
    filled(buffer, "b", finished=False)
    assert buffer.missing(2, version=0) == 1
    with pytest.raises(UsageError, match="1 groups have to end"):
        buffer.take(2, version=0)
    assert taken(buffer, 1, version=0) == ["a"]


def test_wait_takes_nothing_while_a_group_that_is_due_is_pending():
    buffer = ReplayBuffer(max_staleness=1, strategy="wait")
    filled(buffer, "slow", finished=False, version=0)
    filled(buffer, "a", "b", "c", version=1)
    assert buffer.missing(2, version=0) == 0, "at its own version it is not due"
    assert buffer.missing(2, version=1) == 1
    assert buffer.missing(2, version=1, later=1) == 0, "it can still be taken in this version's last part"
    buffer.finish("slow", "rows", version=0)
    assert taken(buffer, 2, version=1) == ["slow", "a"]
    assert buffer.evict(9) == 0


def test_drop_goes_on_without_slow_groups_and_drops_them_when_they_come_too_late():
    buffer = ReplayBuffer(max_staleness=1, strategy="drop")
    filled(buffer, "slow", finished=False, version=0)
    filled(buffer, "a", "b", version=2)
    assert taken(buffer, 1, version=2) == ["a"]
    buffer.finish("slow", "rows", version=0)
    assert buffer.evict(2) == 1
    assert buffer.news() == [Drop("slow", "task", "stale")]
    assert buffer.news() == []
    assert taken(buffer, 1, version=2) == ["b"]
    assert buffer.dropped == {("stale", "task"): 1}


def test_drops_are_counted_by_reason_and_source_and_never_come_back():
    buffer = ReplayBuffer(max_staleness=1)
    for uid, source in (("a", "x"), ("b", "x"), ("c", "y")):
        buffer.submit(uid, data_source=source, version=0)
    buffer.fail("a", "failed")
    buffer.fail("b", "failed")
    buffer.fail("c", "filtered")
    assert buffer.dropped == {("failed", "x"): 2, ("filtered", "y"): 1}
    assert len(buffer) == 0
    with pytest.raises(UsageError, match="not being sampled"):
        buffer.finish("a", "rows", version=0)


def test_a_prompt_is_in_the_buffer_once():
    buffer = ReplayBuffer(max_staleness=1)
    filled(buffer, "a")
    with pytest.raises(UsageError, match="already"):
        buffer.submit("a", data_source="task", version=0)


def test_too_old_a_group_is_never_returned():
    buffer = ReplayBuffer(max_staleness=1)
    filled(buffer, "a", version=0)
    with pytest.raises(UsageError, match="2 versions old"):
        buffer.take(1, version=2)


@pytest.mark.parametrize("wrong", [{"max_staleness": -1}, {"max_staleness": 1, "strategy": "recycle"}])
def test_wrong_settings_are_refused(wrong):
    with pytest.raises(UsageError, match=r"max_staleness|strategy"):
        ReplayBuffer(**wrong)


@pytest.mark.parametrize("strategy", ["wait", "drop"])
@pytest.mark.parametrize("max_staleness", [0, 1, 3])
@pytest.mark.parametrize("speed", [1, 5, 40], ids=["slow producer", "even", "fast producer"])
def test_p92_the_bound_holds_over_200_steps_and_every_prompt_has_one_end(strategy, max_staleness, speed):
    chance, batch, parts = random.Random(f"{strategy} {max_staleness} {speed}"), 8, 2
    buffer = ReplayBuffer(max_staleness=max_staleness, strategy=strategy)
    submitted, consumed, dropped, ages = 0, [], [], set()

    def fill(version):
        nonlocal submitted
        while len(consumed) + len(buffer) < (version + 1 + max_staleness) * batch:
            buffer.submit(str(submitted), data_source="task", version=version)
            submitted += 1

    for version in range(200):
        for part in range(parts):
            fill(version)
            count, later = batch // parts, batch // parts * (parts - 1 - part)
            rounds = 0
            while buffer.missing(count, version=version, later=later) or rounds < speed // 10:
                rounds += 1
                pending = buffer.pending
                for group in chance.sample(pending, min(len(pending), chance.randint(1, speed))):
                    if chance.random() < 0.02:
                        buffer.fail(group.uid, "failed")
                    else:
                        buffer.finish(group.uid, "rows", version=chance.randint(group.version, version))
                buffer.evict(version)
                dropped += [drop.uid for drop in buffer.news()]
                fill(version)
            groups = buffer.take(count, version=version, later=later)
            ages.update(group.staleness(version) for group in groups)
            consumed += [group.uid for group in groups]
    assert max(ages) <= max_staleness
    assert max_staleness == 0 or max(ages) > 0, "the bound was never used"
    assert sorted(map(int, [*consumed, *dropped, *buffer.uids()])) == list(range(submitted))
    if strategy == "wait":
        assert all(reason == "failed" for reason, _ in buffer.dropped)
