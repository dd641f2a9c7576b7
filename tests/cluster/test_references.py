"""Rows that stay where they are made: references, and futures as arguments of other groups' calls."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from rpcrl import BatchRef, Controller, DataProto, ResourcePool, WorkerGroup, wait_all
from rpcrl.errors import BatchError, EncodeError, RemoteError, UsageError, WorkerLostError
from tests.cluster.reference_workers import Consumer, Producer

pytestmark = pytest.mark.cluster

ROWS = 7


def rows(count: int = ROWS) -> DataProto:
    return DataProto.from_dict({"x": torch.arange(float(count))})


@pytest.fixture(scope="module", params=["ipc", "tcp"])
def groups(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[WorkerGroup[Producer], WorkerGroup[Consumer], Controller]]:
    logs = tmp_path_factory.mktemp("logs")
    with Controller(transport=request.param, log_dir=logs, start_timeout_s=100) as opened:
        pool = ResourcePool([2], device=None)
        producers, consumers = WorkerGroup(pool, Producer), WorkerGroup(pool, Consumer)
        consumers.type_of.submit(producers.kept.submit()).result(60)  # starts the thread that chains, once
        yield producers, consumers, opened


Groups = tuple[WorkerGroup[Any], WorkerGroup[Any], Controller]


def received_bytes(controller: Controller, work: Callable[[], Any]) -> tuple[Any, int]:
    """Return what ``work`` gives, and the bytes that came to the driver meanwhile."""
    counted = 0
    take = controller._hub.take

    def count(peer: str, frames: Any) -> None:
        nonlocal counted
        counted += sum(memoryview(getattr(frame, "view", frame)).nbytes for frame in frames)
        take(peer, frames)

    controller._hub.take = count  # type: ignore[method-assign]
    try:
        return work(), counted
    finally:
        controller._hub.take = take  # type: ignore[method-assign]


def wait_until(condition: Callable[[], bool], what: str, within_s: float = 20.0) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {within_s} s: {what}"


def test_a_result_stays_and_is_read_by_columns(groups: Groups):
    producers, _, controller = groups
    ref, came = received_bytes(controller, lambda: producers.make(rows()))
    assert isinstance(ref, BatchRef)
    assert came < 20_000, "the rows did not come along"
    assert len(ref) == ROWS, "and padding is taken off"
    assert ref.meta_info == {"step": 7}
    assert ref.columns["wide"].row_shape == (8_192,)
    y, came = received_bytes(controller, lambda: ref["y"])
    assert y.tolist() == [2.0 * row for row in range(ROWS)]
    assert came < 20_000, "one narrow column was read, not the wide one"
    batch = ref.fetch()
    assert torch.equal(batch.batch["wide"][:, 0], torch.arange(float(ROWS)))
    assert list(batch.non_tensor_batch["name"])[-1] == "row 6 of rank 1"
    assert batch.meta_info == {"step": 7}


def test_a_reference_is_reordered_cut_joined_and_united_without_reading(groups: Groups):
    producers, _, controller = groups
    ref = producers.make(rows())

    def play() -> BatchRef:
        turned = ref.reorder(list(reversed(range(ROWS))))
        parts = turned.chunk(3, uneven=True)
        joined = BatchRef.concat([parts[2], parts[0], parts[1]])
        tagged = joined.union(DataProto.from_dict(non_tensors={"tag": [f"t{row}" for row in range(ROWS)]}))
        return tagged.select_idxs([6, 0, 3]).repeat(2)

    played, came = received_bytes(controller, play)
    assert came == 0
    batch = played.fetch()
    order = [6, 5, 4, 3, 2, 1, 0]
    expected = [([order[5:], order[:3], order[3:5]][0] + order[:3] + order[3:5])[row] for row in (6, 0, 3)]
    assert batch.batch["y"].tolist() == [2.0 * row for row in expected for _ in range(2)]
    assert list(batch.non_tensor_batch["tag"]) == ["t6", "t6", "t0", "t0", "t3", "t3"]
    with pytest.raises(BatchError, match="both have the columns"):
        ref.union(ref)
    with pytest.raises(BatchError, match="no column 'nope'"):
        ref.fetch(["nope"])


def test_what_is_kept_is_what_was_returned(groups: Groups):
    producers, _, _ = groups
    ref = producers.make(rows())
    producers.overwrite()
    assert torch.equal(ref["wide"][:, 0], torch.arange(float(ROWS)))


def test_a_consumer_gets_exactly_its_rows_from_their_keepers(groups: Groups):
    producers, consumers, controller = groups
    ref = producers.make(rows())
    result, came = received_bytes(controller, lambda: consumers.add_one(ref.reorder(list(reversed(range(ROWS))))))
    assert came < 20_000
    assert result.batch["z"].tolist() == [float(row) + 1 for row in reversed(range(ROWS))]
    assert result.batch["rank"].tolist() == [0] * 4 + [1] * 3
    seen = consumers.seen(ref.select(["y"], ["name"]))
    assert set(seen.non_tensor_batch["seen"]) == {"name,y:4"}, "7 rows, padded to 8: and only these columns"
    assert torch.equal(consumers.by_mesh(ref).batch["z"], torch.arange(float(ROWS)) + 1)
    assert torch.equal(consumers.asynchronously(ref).batch["z"], torch.arange(float(ROWS)) + 1)
    assert consumers.look(ref[2:4]) == [("BatchRef", 2, [4.0, 6.0])] * 2
    assert consumers.type_of(ref) == ["DataProto"] * 2


def test_ranks_of_one_group_read_from_each_other(groups: Groups):
    producers, _, controller = groups
    ref = producers.make(rows())
    back, came = received_bytes(controller, lambda: producers.take_back(ref.reorder(list(reversed(range(ROWS))))))
    assert back.batch["first"].tolist() == [float(row) for row in reversed(range(ROWS))]
    assert came < 20_000


def test_a_future_is_an_argument_and_its_rows_never_come_to_the_driver(groups: Groups):
    producers, consumers, controller = groups

    def chain() -> Any:
        made = producers.plain.submit(rows(50))
        return consumers.add_one.submit(batch=made).result(60), made

    (result, made), came = received_bytes(controller, chain)
    assert torch.equal(result.batch["z"], torch.arange(50.0) + 1)
    assert came < 50_000, f"{came} bytes came to the driver; the rows are {50 * 32_768}"
    whole, came = received_bytes(controller, made.result)
    assert torch.equal(whole.batch["wide"][:, 0], torch.arange(50.0)), "and the future still has its value"
    assert came > 50 * 32_768 or came > 0
    assert made.result() is whole


def test_a_chain_fails_with_what_failed_and_can_be_cancelled(groups: Groups):
    producers, consumers, _ = groups
    with pytest.raises(RemoteError, match="KeyError"):
        consumers.add_one.submit(consumers.fail.submit(rows())).result(60)
    with pytest.raises(RemoteError, match=r"got .*DataProto"):
        consumers.add_one.submit(consumers.seen.submit(rows())).result(60)
    slow = producers.wait.submit(0.5)
    later = consumers.type_of.submit(slow)
    assert later.cancel()
    assert slow.result(60) == [None, None]
    assert consumers.type_of(slow) == ["list"] * 2, "a settled future may be an argument as well"


def test_tensordicts_stay_and_come_back_as_such(groups: Groups):
    producers, consumers, _ = groups
    made = producers.widen.submit(TensorDict({"x": torch.arange(6.0)}, [6]))
    assert consumers.type_of(made) == ["TensorDict"] * 2
    assert isinstance(made.result(), TensorDict)


def test_only_batches_stay(groups: Groups):
    producers, _, _ = groups
    with pytest.raises(RemoteError, match=r"returns='ref'.*not a int"):
        producers.not_a_batch()


def test_what_nobody_can_ask_for_is_freed(groups: Groups):
    producers, consumers, _ = groups
    gc.collect()
    wait_until(lambda: producers.kept() == [0, 0], "everything of earlier tests is freed")
    ref = producers.make(rows())
    part = ref.chunk(ROWS)[0]
    assert producers.kept() == [1, 1]
    del ref
    gc.collect()
    wait_until(lambda: producers.kept() == [1, 0], "a row keeps the result that it is in, and no other")
    assert part["y"].tolist() == [0.0]
    del part
    gc.collect()
    wait_until(lambda: producers.kept() == [0, 0], "the last reference is gone")
    producers.plain.submit(rows(50))  # nobody keeps the future
    running = producers.wait.submit(0.0)
    running.result(60)
    gc.collect()
    wait_until(lambda: producers.kept() == [0, 0], "the future is gone")
    consumers.add_one.submit(producers.plain.submit(rows(50))).result(60)
    gc.collect()
    wait_until(lambda: producers.kept() == [0, 0], "the chain is done")


def test_rows_are_read_while_a_method_runs(groups: Groups):
    producers, _, _ = groups
    ref = producers.make(rows())
    running = producers.wait.submit(20.0)
    assert ref["y"].tolist() == [2.0 * row for row in range(ROWS)]
    assert not running.done()
    running.cancel()


def test_futures_of_several_groups_are_waited_for_together(groups: Groups):
    producers, consumers, _ = groups
    both = wait_all([producers.kept.submit(), consumers.type_of.submit(1)], 60)
    assert both[1] == ["int", "int"]
    with pytest.raises(RemoteError, match="KeyError"):
        wait_all([producers.kept.submit(), consumers.fail.submit(rows())], 60)


def test_a_chained_list_is_the_same_whatever_its_size(groups: Groups):
    producers, consumers, _ = groups
    for num_rows in (1, 10):  # 32 KiB and 320 KiB
        assert consumers.types_in(producers.each.submit(num_rows)) == [["DataProto"] * 2] * 2


def test_a_worker_cannot_return_a_reference_that_ends_with_its_method(groups: Groups):
    producers, consumers, _ = groups
    with pytest.raises(RemoteError, match=r"Return ref\.fetch\(\)"):
        consumers.relay(producers, rows())


def test_references_belong_to_their_run(ipc: Controller, tmp_path: Path):
    pool = ResourcePool([1], device=None)
    producers, consumers = WorkerGroup(pool, Producer, name="same"), WorkerGroup(pool, Consumer)
    ref = producers.make(rows())
    with Controller(log_dir=tmp_path / "other", start_timeout_s=60) as other:
        others = WorkerGroup(pool, Producer, name="same", controller=other)
        back = consumers.given_back(ref)
        assert isinstance(back, BatchRef), "what a method returns as a reference comes as one"
        assert back["y"].tolist() == [2.0 * row for row in range(ROWS)], "read by its own controller"
        with pytest.raises(UsageError, match=f"belongs to run {ipc.run_id}"):
            others.take_back(ref)
        assert len(others.make(rows())) == ROWS, "and the other run goes on"


def test_a_future_inside_of_an_argument_is_refused_with_advice(groups: Groups):
    producers, consumers, _ = groups
    with pytest.raises(EncodeError, match=r"pass the future itself"):
        consumers.types_in([producers.kept.submit()])


def test_a_store_that_dies_is_an_error_for_its_rows_only(ipc: Controller):
    pool = ResourcePool([1], device=None)
    first, second = WorkerGroup(pool, Producer), WorkerGroup(pool, Producer)
    consumers = WorkerGroup(pool, Consumer)
    ref = BatchRef.concat([first.make(rows()), second.make(rows())])
    assert len(consumers.add_one(ref)) == 2 * ROWS
    with pytest.raises(WorkerLostError):
        second.die(0)
    assert ref[:ROWS]["y"].tolist() == [2.0 * row for row in range(ROWS)]
    with pytest.raises(WorkerLostError, match=r"rank 0 .*SIGKILL(.|\n)*reading 7 rows of y"):
        ref["y"]
    with pytest.raises(RemoteError, match=r"WorkerLostError(.|\n)*SIGKILL"):
        consumers.add_one(ref)
    assert len(consumers.add_one(ref[:ROWS])) == ROWS
