"""What happens to both sides when a weight sync fails on one of them? It ends in time, says why, and the next works."""

import time
from pathlib import Path

import pytest

from rpcrl import Controller, ResourcePool, WorkerGroup
from rpcrl.errors import WeightSyncError, WorkerLostError
from rpcrl.roles.pool_sync import WeightSync
from rpcrl.testing.sync_kit import SyncHarness
from rpcrl.testing.sync_workers import KitRollout, KitTrainer

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(180)]
FILES = f"{Path(__file__).parents[1] / 'conformance' / 'file_channel.py'}:FileChannel"
LAYERS, BUCKET_BYTES, TIMEOUT_S = 24, 2 << 20, 30.0
"""24 MiB in some thirteen buckets; nobody waits for the timeout where it is not what is tested."""


@pytest.fixture(scope="module")
def controller(tmp_path_factory):
    with Controller(log_dir=tmp_path_factory.mktemp("logs"), start_timeout_s=60) as opened:
        yield opened


@pytest.fixture(scope="module")
def harness(controller):
    with SyncHarness(controller, "broadcast", layers=LAYERS, bucket_bytes=BUCKET_BYTES, timeout_s=TIMEOUT_S) as opened:
        opened.sync.update_weights(1)
        yield opened


def works(harness, version):
    harness.trainer.train(version)
    harness.sync.update_weights(version)
    harness.has(version, version=version)


@pytest.mark.parametrize("after_buckets", [0, 1, 6])
def test_p84_a_rollout_rank_that_raises_ends_the_trainers_broadcast_and_the_next_sync_works(harness, after_buckets):
    works(harness, 100 + after_buckets)
    name = harness.sync.group_name
    harness.rollout.fail_once(1, after_buckets)
    began = time.monotonic()
    with pytest.raises(WeightSyncError, match=f"rollout rank 1 raised ValueError: no more after {after_buckets}"):
        harness.sync.update_weights(99)
    assert time.monotonic() - began < TIMEOUT_S / 2, "the timeout was not what ended it"
    assert harness.sync.group_name is None
    works(harness, 200 + after_buckets)
    assert harness.sync.group_name not in (None, name), "a new group has a new name"


def test_p84_a_rollout_that_cannot_take_these_weights_says_so_before_a_byte_is_sent(controller, harness):
    works(harness, 3)
    other = WorkerGroup(ResourcePool([1]), KitRollout, "broadcast", TIMEOUT_S, layers=1, controller=controller)
    try:
        sync = WeightSync(harness.trainer, other, bucket_bytes=BUCKET_BYTES, timeout_s=TIMEOUT_S)
        with pytest.raises(
            WeightSyncError,
            match=r"could not get ready: rollout rank 0 raised rpcrl.errors.UsageError: these weights do not fit",
        ):
            sync.update_weights(4)
        assert sync.group_name is None
        assert other.weight_version() == [0]
    finally:
        other.close()
    works(harness, 5)


def test_p80_sides_that_would_use_other_backends_are_told_apart_at_once(harness):
    works(harness, 6)
    harness.rollout.use_backend(FILES)
    began = time.monotonic()
    with pytest.raises(WeightSyncError, match=r"'broadcast' over gloo, rollout rank 0 by backend .* over files"):
        harness.sync.update_weights(7)
    assert time.monotonic() - began < 2
    harness.rollout.use_backend("broadcast")
    works(harness, 8)


def test_p86_a_rank_that_is_not_ready_is_named_before_anybody_waits_in_a_collective(harness):
    works(harness, 9)
    impatient = WeightSync(harness.trainer, harness.rollout, bucket_bytes=BUCKET_BYTES, timeout_s=2.0)
    busy = harness.rollout.be_busy.submit(1)
    began = time.monotonic()
    with pytest.raises(WeightSyncError, match=r"within 2 s: rollout: .*waiting for ranks \[1\]"):
        impatient.update_weights(10)
    assert time.monotonic() - began < 5
    assert not busy.done(), "the rank was late indeed"
    harness.trainer.train_together()
    harness.rollout.be_free(1)
    busy.result(20)
    works(harness, 11)
    impatient.close()


def test_p85_two_trainer_ranks_with_other_orders_are_named(controller, harness):
    swapped = WorkerGroup(
        ResourcePool([2]), KitTrainer, "broadcast", TIMEOUT_S, layers=LAYERS, swapped=1, controller=controller
    )
    try:
        sync = WeightSync(swapped, harness.rollout, bucket_bytes=BUCKET_BYTES, timeout_s=TIMEOUT_S)
        with pytest.raises(WeightSyncError, match=r"tensor 1 is 'norm' on rank 0 and 'up.weight' on rank 1"):
            sync.update_weights(12)
        assert swapped.train_together() == [2.0, 2.0], "the trainer's ranks wait for nothing"
    finally:
        swapped.close()


def test_groups_are_rebuilt_without_leaks(harness):
    def rebuilt(version):
        sync = WeightSync(harness.trainer, harness.rollout, bucket_bytes=BUCKET_BYTES, timeout_s=TIMEOUT_S)
        sync.update_weights(version)
        sync.close()

    def handles():
        return [*harness.trainer.open_handles(), *harness.rollout.open_handles()]

    for version in (13, 14):
        rebuilt(version)
    before = handles()
    for version in range(15, 25):
        rebuilt(version)
    deadline = time.monotonic() + 20

    def grown():
        return [
            (now, then)
            for now, then in zip(handles(), before, strict=True)
            if any(n > t for n, t in zip(now, then, strict=True))
        ]

    while grown() and time.monotonic() < deadline:
        pass
    assert grown() == []


def test_no_rank_holds_more_than_two_buckets_and_a_tensor(harness):
    works(harness, 30)
    for group in harness.groups:
        group.peak_begin()
    harness.trainer.train_together()
    harness.sync.update_weights(31)
    peaks = [*harness.trainer.peak_end(), *harness.rollout.peak_end()]
    assert max(peaks) < 2 * BUCKET_BYTES + (5 << 20), peaks
    assert max(peaks) < LAYERS * (1 << 20) / 2, "the weights are much larger than what is allowed"


def test_a_rollout_rank_that_is_killed_frees_the_trainer_which_goes_on_with_another_rollout(controller, harness):
    works(harness, 40)
    other = WorkerGroup(ResourcePool([2]), KitRollout, "broadcast", TIMEOUT_S, layers=LAYERS, controller=controller)
    sync = WeightSync(harness.trainer, other, bucket_bytes=BUCKET_BYTES, timeout_s=TIMEOUT_S)
    sync.update_weights(41)
    other.die_at(1, 2)
    began = time.monotonic()
    with pytest.raises(WorkerLostError, match="killed by SIGKILL"):
        sync.update_weights(42)
    assert time.monotonic() - began < TIMEOUT_S / 2
    sync.close()
    works(harness, 43)
