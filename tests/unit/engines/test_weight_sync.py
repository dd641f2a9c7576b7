"""Do the bytes of weights cross a channel as they are, and what is seen of those that do not?"""

import contextlib
import socket
import threading
import time

import pytest
import torch

from rpcrl.engines.weight_channel import TorchChannel, new_channel
from rpcrl.engines.weight_plan import HEADER_BYTES, WeightPlan, WeightSpec, checksum, read_header, write_header
from rpcrl.engines.weight_sync import SyncGroup, received_weights, send_weights
from rpcrl.errors import ConfigError, UsageError, WeightSyncError
from rpcrl.testing.transport_harness import wait_until

TIMEOUT_S = 2.0
pytestmark = pytest.mark.timeout(60)


def weights(seed=0):
    made = torch.Generator().manual_seed(seed)
    return {
        "embed": torch.randn(40, 8, generator=made),
        "scale": torch.randn((), generator=made, dtype=torch.float64),
        "half": torch.randn(7, 3, generator=made).to(torch.bfloat16),
        "none": torch.empty(0, 4),
        "flags": torch.randint(0, 2, (5,), generator=made).bool(),
        "transposed": torch.randn(6, 9, generator=made).T,
        "last": torch.randint(-9, 9, (33,), generator=made),
    }


def plan_of(tensors, bucket_bytes):
    return WeightPlan(tuple(WeightSpec.of(name, tensor) for name, tensor in tensors.items()), bucket_bytes)


class Together:
    """Ranks of one sync group, each a thread of this process."""

    def __init__(self, world_size, *, name="g1", channel=TorchChannel, timeout_s=TIMEOUT_S):
        self.groups = [
            SyncGroup(name, channel(device="cpu", timeout_s=timeout_s), timeout_s=timeout_s) for _ in range(world_size)
        ]
        self.world_size = world_size

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for group in self.groups:
            group.close()

    def join(self):
        address = self.groups[0].listen("127.0.0.1")
        self.run(lambda rank: self.groups[rank].join(address, rank, self.world_size))

    def run(self, what, ranks=None):
        """Run ``what(rank)`` on all ranks at once; raises the first rank's error, returns the results."""
        outcome = self.outcomes(what, ranks)
        for value in outcome.values():
            if isinstance(value, BaseException):
                raise value
        return outcome

    def outcomes(self, what, ranks=None):
        outcome = {}

        def one(rank):
            try:
                outcome[rank] = what(rank)
            except Exception as error:
                outcome[rank] = error

        threads = [threading.Thread(target=one, args=(rank,)) for rank in ranks or range(self.world_size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        return outcome

    def sync(self, tensors, plan, *, number=1):
        def one(rank):
            if rank == 0:
                send_weights(self.groups[0], plan, iter(tensors.items()), number=number)
                return None
            buckets = received_weights(self.groups[rank], plan, number=number)
            return {name: tensor.clone() for bucket in buckets for name, tensor in bucket}

        return self.run(one)


@pytest.fixture(autouse=True, scope="module")
def _torch_opens_what_it_keeps_for_ever():
    with Together(2, name="first") as ranks:
        ranks.join()


@pytest.mark.parametrize("bucket_bytes", [64, 192, 1_000, 1 << 20])
def test_every_tensor_arrives_bit_for_bit_on_every_rank(bucket_bytes):
    tensors = weights()
    plan = plan_of(tensors, bucket_bytes)
    with Together(3) as ranks:
        ranks.join()
        for number in (1, 2):
            tensors = weights(seed=number)
            got = ranks.sync(tensors, plan, number=number)
            for rank in (1, 2):
                assert list(got[rank]) == list(tensors)
                for name, tensor in tensors.items():
                    assert got[rank][name].dtype == tensor.dtype
                    assert torch.equal(got[rank][name], tensor), (rank, name)


@pytest.mark.parametrize("bucket_bytes", [1, 64, 200, 1_000, 1 << 20])
def test_a_plan_cuts_only_what_is_larger_than_a_bucket(bucket_bytes):
    tensors = weights()
    plan = plan_of(tensors, bucket_bytes)
    room = max(bucket_bytes // 64 * 64, 64)
    covered = dict.fromkeys(range(len(tensors)), 0)
    for bucket, pieces in enumerate(plan.buckets):
        assert plan.payload_bytes(bucket) <= room
        for piece in pieces:
            assert piece.offset_bytes % 64 == 0
            assert piece.start_bytes == covered[piece.index], "parts come in their order"
            covered[piece.index] += piece.num_bytes
            if plan.specs[piece.index].num_bytes <= room:
                assert piece.num_bytes == plan.specs[piece.index].num_bytes
    assert covered == {index: spec.num_bytes for index, spec in enumerate(plan.specs)}
    assert plan.buffer_bytes <= room + HEADER_BYTES
    assert (len(plan.buckets) == 1) == (bucket_bytes > 10_000)


def test_a_checksum_sees_what_changes_and_what_moves():
    payload = torch.randint(0, 256, (64 * 300,), dtype=torch.uint8)
    seen = {checksum(payload)}
    changed = payload.clone()
    changed[17_000] ^= 1
    swapped_words = payload.clone()
    swapped_words[0:8], swapped_words[4096:4104] = payload[4096:4104], payload[0:8]
    shifted = payload.roll(8)
    swapped_rows = payload.clone()
    swapped_rows[0:4096], swapped_rows[4096:8192] = payload[4096:8192], payload[0:4096]
    for other in (changed, swapped_words, swapped_rows, shifted, torch.zeros_like(payload)):
        seen.add(checksum(other))
    assert len(seen) == 6
    assert checksum(payload.clone()) in seen


def test_a_header_tells_what_is_wrong_with_a_bucket():
    plan = plan_of(weights(), 256)
    buffer = torch.zeros(plan.buffer_bytes, dtype=torch.uint8)
    write_header(buffer, plan, 7, 0)
    read_header(buffer, plan, 7, 0)
    for wrong, message in (
        ((plan, 8, 0), "number of the sync is 7, not 8"),
        ((plan, 7, 1), "bucket is 0, not 1"),
        ((plan_of(weights(), 512), 7, 0), "plan is"),
    ):
        with pytest.raises(WeightSyncError, match=message):
            read_header(buffer, *wrong)
    buffer[HEADER_BYTES] ^= 4
    with pytest.raises(WeightSyncError, match=r"bucket 0 \(from embed on\): its bytes have the checksum"):
        read_header(buffer, plan, 7, 0)


def test_damage_on_the_way_reaches_no_engine():
    tensors = weights()
    plan = plan_of(tensors, 256)

    class Damaging(TorchChannel):
        def broadcast(self, buffer):
            super().broadcast(buffer)
            if buffer[16] == 2:  # bucket 2
                buffer[HEADER_BYTES + 3] ^= 1

    with Together(2) as ranks:
        ranks.groups[1].channel = Damaging(device="cpu", timeout_s=TIMEOUT_S)
        ranks.join()
        got = []

        def one(rank):
            if rank == 0:
                send_weights(ranks.groups[0], plan, iter(tensors.items()), number=1)
            else:
                got.extend(received_weights(ranks.groups[1], plan, number=1))

        outcome = ranks.outcomes(one)
    assert isinstance(outcome[1], WeightSyncError)
    assert "bucket 2" in str(outcome[1])
    assert len(got) == 0 or sum(len(bucket) for bucket in got) < len(tensors)


def test_p85_another_order_of_the_tensors_is_named_and_the_source_is_read_to_its_end():
    tensors = weights()
    plan = plan_of(tensors, 1_000)
    swapped = list(tensors.items())
    swapped[1], swapped[2] = swapped[2], swapped[1]
    source = iter(swapped)
    with Together(2) as ranks:
        ranks.join()
        with pytest.raises(WeightSyncError, match=r"tensor 1 is .*half.*, the plan says .*scale"):
            send_weights(ranks.groups[0], plan, source, number=1)
    assert next(source, None) is None, "the ranks that gather with this one are not left behind"


def test_p85_plans_tell_where_they_differ():
    one, names = plan_of(weights(), 256), list(weights())
    other = plan_of({name: weights()[name] for name in reversed(names)}, 256)
    assert one.difference(one) == ""
    assert one.digest == plan_of(weights(seed=1), 256).digest
    assert "tensor 0 is" in one.difference(other)
    assert one.digest != other.digest
    assert "buckets of 256 and of 512 bytes" in one.difference(plan_of(weights(), 512))


def test_p86_who_did_not_come_is_named_within_the_timeout():
    began = time.monotonic()
    with Together(3, timeout_s=1.0) as ranks:
        address = ranks.groups[0].listen("127.0.0.1")
        outcome = ranks.outcomes(lambda rank: ranks.groups[rank].join(address, rank, 3), ranks=[0, 2])
    assert time.monotonic() - began < 5
    for rank in (0, 2):
        assert isinstance(outcome[rank], WeightSyncError)
        assert "ranks [1] of 3" in str(outcome[rank])


def test_p84_a_receiver_that_fails_ends_the_sender_at_once_and_a_new_group_works():
    tensors = weights()
    plan = plan_of(tensors, 64)
    with Together(2, timeout_s=20.0) as ranks:
        ranks.join()
        began = time.monotonic()

        def one(rank):
            if rank == 0:
                send_weights(ranks.groups[0], plan, iter(tensors.items()), number=1)
            else:
                next(received_weights(ranks.groups[1], plan, number=1))
                ranks.groups[1].close()

        outcome = ranks.outcomes(one)
        assert isinstance(outcome[0], WeightSyncError)
        assert time.monotonic() - began < 10, "the timeout of 20 s was not waited for"
        assert ranks.groups[0].broken
    with Together(2, name="g2") as again:
        again.join()
        assert torch.equal(again.sync(tensors, plan)[1]["embed"], tensors["embed"])


def test_a_sender_that_waits_can_be_told_to_stop():
    tensors = weights()
    plan = plan_of(tensors, 64)
    with Together(2, timeout_s=4.0) as ranks:
        ranks.join()
        sender = ranks.groups[0]
        stop = threading.Timer(0.2, sender.cancel, ["rank 1 of the rollout raised ValueError"])
        stop.start()
        began = time.monotonic()
        with pytest.raises(WeightSyncError, match="cancelled: rank 1 of the rollout raised ValueError"):
            send_weights(sender, plan, iter(tensors.items()), number=1)
        assert time.monotonic() - began < 3
        stop.join()


def test_a_silent_receiver_is_given_up_after_the_timeout():
    plan = plan_of(weights(), 64)
    with Together(2, timeout_s=1.0) as ranks:
        ranks.join()
        began = time.monotonic()
        with pytest.raises(WeightSyncError, match=r"broadcast failed|did not end"):
            send_weights(ranks.groups[0], plan, iter(weights().items()), number=1)
        assert time.monotonic() - began < 5


def test_groups_come_and_go_without_leaks_and_leave_no_default_group():
    tensors = weights()
    plan = plan_of(tensors, 256)

    def open_now():
        import os

        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    def once(number):
        with Together(2, name=f"g{number}") as ranks:
            ranks.join()
            ranks.sync(tensors, plan)
        for group in ranks.groups:
            group._thread.join(10)
            assert not group._thread.is_alive()

    once(0)
    before = open_now()
    for number in range(1, 9):
        once(number)

    def gone():
        files, threads = open_now()
        return files <= before[0] + 1 and threads <= before[1] + 1

    # gloo ends the threads of a group that was dropped a moment later; eight groups that leaked would stay
    wait_until(gone, f"files and threads are as before: {before}")
    assert not torch.distributed.is_initialized()


def test_backends_are_named_or_refused():
    assert new_channel("broadcast", device="cpu", timeout_s=1).transport == "gloo"
    with pytest.raises(UsageError, match="nccl between ranks with device='cpu'"):
        new_channel("nccl", device="cpu", timeout_s=1)
    with pytest.raises(UsageError, match="'naive'"):
        new_channel("naive", device="cpu", timeout_s=1)
    with pytest.raises(ConfigError, match="no module"):
        new_channel("nowhere_at_all:Channel", device="cpu", timeout_s=1)
    assert isinstance(new_channel("rpcrl.engines.weight_channel:TorchChannel", device="cpu", timeout_s=1), TorchChannel)


@pytest.mark.parametrize("rows", [1, 7, 40])
def test_a_tensor_that_is_sent_in_parts_of_its_rows_arrives_whole(rows):
    tensors = weights()
    plan = plan_of(tensors, 192)
    parts = [("embed", part) for part in tensors["embed"].split(rows)]
    parts += [(name, tensor) for name, tensor in tensors.items() if name != "embed"]

    def one(rank):
        if rank == 0:
            return send_weights(ranks.groups[0], plan, iter(parts), number=1)
        buckets = received_weights(ranks.groups[rank], plan, number=1)
        return {name: tensor.clone() for bucket in buckets for name, tensor in bucket}

    with Together(2) as ranks:
        ranks.join()
        got = ranks.run(one)[1]
    assert all(torch.equal(got[name], tensor) for name, tensor in tensors.items())


def test_parts_that_are_not_the_next_rows_are_refused():
    tensors = weights()
    plan = plan_of(tensors, 192)
    some = [("embed", tensors["embed"][:30]), ("embed", tensors["embed"][:20])]
    with pytest.raises(WeightSyncError, match=r"tensor 0 is .*, the plan says .*'embed'.*, behind 30 of its rows"):
        list(plan.with_names(some))
    with pytest.raises(WeightSyncError, match="the weights ended after 0 of 7 tensors"):
        list(plan.with_names(some[:1]))


def test_a_large_tensor_is_gathered_where_the_receiver_says():
    tensors = weights()
    plan = plan_of(tensors, 192)
    own, asked = torch.zeros(40, 8), []

    def place(name):
        asked.append(name)
        return own if name == "embed" else None

    def one(rank):
        if rank == 0:
            return send_weights(ranks.groups[0], plan, iter(tensors.items()), number=1)
        for bucket in received_weights(ranks.groups[rank], plan, number=1, place=place):
            for name, tensor in bucket:
                assert name != "embed" or tensor.data_ptr() == own.data_ptr()
        return None

    with Together(2) as ranks:
        ranks.join()
        ranks.run(one)
    assert asked[0] == "embed"
    assert torch.equal(own, tensors["embed"])


def test_p77_sync_groups_need_no_port_that_somebody_else_may_have():
    tensors = weights()
    plan = plan_of(tensors, 192)
    with contextlib.ExitStack() as held:
        for port in (29400, 29500, 29600):  # torch's usual ones, and TRL's for weights; taken, whoever has them
            with contextlib.suppress(OSError):
                held.enter_context(socket.create_server(("127.0.0.1", port)))
        first, second = held.enter_context(Together(2, name="one")), held.enter_context(Together(2, name="two"))
        first.join()
        second.join()  # while the first one has its own
        for ranks in (first, second):
            assert torch.equal(ranks.sync(tensors, plan)[1]["embed"], tensors["embed"])
