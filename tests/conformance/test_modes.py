"""Does every dispatch mode do the same on every fabric: threads of this process, Unix sockets, TCP with CURVE?"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest
import torch
from tensordict import NonTensorData, TensorDict

from rpcrl import Controller, DataProto, ResourcePool, WorkerGroup
from rpcrl.batch.compare import first_difference
from rpcrl.errors import CollectError, DispatchError, RemoteError
from tests.batch_samples import assert_same, jagged
from tests.conformance.mode_workers import Counted, Modes, Pipeline, reverse

pytestmark = pytest.mark.cluster

FABRICS = ["inproc", "ipc", "tcp"]
SIZES = [0, 1, 3, 4, 5, 10]


@pytest.fixture(scope="module", params=FABRICS)
def fabric(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Controller]:
    logs = tmp_path_factory.mktemp("logs")
    with Controller(transport=request.param, log_dir=logs, start_timeout_s=60) as opened:
        assert opened.address.startswith(request.param)
        yield opened


@pytest.fixture(scope="module")
def group(fabric: Controller) -> WorkerGroup[Modes]:
    made = WorkerGroup(ResourcePool([2, 2]), Modes, controller=fabric)
    made.one_to_all_async(0)  # starts the threads that a worker starts when they are first needed
    return made


@pytest.fixture(scope="module")
def pipeline(fabric: Controller) -> WorkerGroup[Pipeline]:
    return WorkerGroup(ResourcePool([4, 4]), Pipeline, controller=fabric)


def rows_of(count: int, **facts: Any) -> DataProto:
    return DataProto.from_dict(
        non_tensors={"row": list(range(count)), "value": [float(row * row) for row in range(count)]},
        meta_info=facts,
    )


def blocking(method: Any, *args: Any, **kwargs: Any) -> Any:
    return method(*args, **kwargs)


def submitted(method: Any, *args: Any, **kwargs: Any) -> Any:
    return method.submit(*args, **kwargs).result(100)


def awaited(method: Any, *args: Any, **kwargs: Any) -> Any:
    async def run() -> Any:
        return await method.submit(*args, **kwargs)

    return asyncio.run(run())


How = Callable[..., Any]


@pytest.fixture(params=[blocking, submitted, awaited])
def how(request: pytest.FixtureRequest) -> How:
    chosen: How = request.param
    return chosen


def column(batch: DataProto, name: str) -> list[Any]:
    return list(batch.non_tensor_batch[name])


# -- one value for all, one value for each -----------------------------------------------------------------------------


def test_one_to_all_gives_every_rank_the_same_and_lists_the_results(group: WorkerGroup[Any], how: How) -> None:
    for value in (7, [1, 2, 3, 4], (1, 2, 3, 4), None, {"a": [1]}):
        assert how(group.one_to_all, value, y="why") == [(rank, value, "why") for rank in range(4)]
    assert how(group.one_to_all_async, [1, 2, 3, 4]) == [(rank, [1, 2, 3, 4]) for rank in range(4)]


def test_rank_zero_runs_alone_by_its_mode_or_by_execution(group: WorkerGroup[Any], how: How) -> None:
    before = group.calls_so_far()
    assert how(group.rank_zero, [1, 2, 3, 4]) == (0, [1, 2, 3, 4])
    assert how(group.rank_zero_by_execution, [5, 6, 7, 8]) == (0, [5, 6, 7, 8])
    assert [after - was for after, was in zip(group.calls_so_far(), before, strict=True)] == [2, 0, 0, 0]


@pytest.mark.parametrize("name", ["all_to_all", "dp_compute"])
def test_one_value_for_each_rank(group: WorkerGroup[Any], how: How, name: str) -> None:
    method = getattr(group, name)
    expected = [(0, "a", 5), (1, "b", 6), (2, "c", 7), (3, "d", 8)]
    assert how(method, list("abcd"), y=[5, 6, 7, 8]) == expected
    assert how(method, tuple("abcd"), y=(5, 6, 7, 8)) == expected
    assert how(method, x=[[1], [2, 2], [], None]) == [(0, [1], 0), (1, [2, 2], 0), (2, [], 0), (3, None, 0)]
    for wrong, text in (("abcd", "got str"), ([1, 2, 3], "3 values for 4 ranks"), (7, "got int")):
        with pytest.raises(DispatchError, match=text):
            how(method, wrong)


def test_arguments_are_bound_before_anything_is_sent(group: WorkerGroup[Any], how: How) -> None:
    before = group.calls_so_far()
    for args, kwargs in (((), {}), ((1, 2), {}), ((1,), {"z": 2})):
        with pytest.raises(DispatchError, match="nothing was sent"):
            how(group.rank_zero, *args, **kwargs)
    assert group.calls_so_far() == before


# -- batches -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_rows", SIZES)
def test_p43_padding_is_taken_off_again_blocking_or_not(group: WorkerGroup[Any], how: How, num_rows: int) -> None:
    batch = rows_of(num_rows, step=3)
    for method in (group.padded, group.padded_async):
        back = how(method, batch)
        assert_same(back.select(None, ["row", "value"]), batch)
        size = -(-num_rows // 4)
        assert column(back, "rank") == [row // size for row in range(num_rows)]
        assert set(column(back, "part")) <= {size}
    assert column(batch, "row") == list(range(num_rows)), "the caller's batch is as it was"


@pytest.mark.parametrize("num_rows", SIZES)
def test_p43_the_other_policies(group: WorkerGroup[Any], how: How, num_rows: int) -> None:
    batch = rows_of(num_rows)
    back = how(group.uneven, batch)
    sizes = [num_rows // 4 + (rank < num_rows % 4) for rank in range(4)]
    assert_same(back.select(None, ["row", "value"]), batch)
    assert column(back, "rank") == [rank for rank in range(4) for _ in range(sizes[rank])]
    assert column(back, "part") == [size for size in sizes for _ in range(size)]

    if num_rows % 4:
        with pytest.raises(DispatchError, match=f"cannot split {num_rows} rows into 4 equal parts for Modes.refused"):
            how(group.refused, batch)
    else:
        assert_same(how(group.refused, batch).select(None, ["row", "value"]), batch)

    if 0 < num_rows < 4:
        with pytest.raises(DispatchError, match="all of them would be dropped"):
            how(group.dropped, batch)
    else:
        assert column(how(group.dropped, batch), "row") == list(range(num_rows // 4 * 4))


@pytest.mark.parametrize("num_rows", [1, 10])
def test_p44_ten_rows_come_back_in_their_order(group: WorkerGroup[Any], how: How, num_rows: int) -> None:
    two = how(
        group.two, rows_of(num_rows), other=DataProto.from_dict(non_tensors={"name": list("abcdefghij")[:num_rows]})
    )
    assert column(two, "row") == list(range(num_rows))
    assert column(two, "name") == list("abcdefghij")[:num_rows]
    with pytest.raises(DispatchError, match="needs batches of equal length"):
        how(group.two, rows_of(3), other=rows_of(4))


def test_a_function_goes_to_every_rank_by_its_path(group: WorkerGroup[Any], how: How) -> None:
    back = how(group.apply, reverse, rows_of(8))
    assert column(back, "row") == [1, 0, 3, 2, 5, 4, 7, 6]


@pytest.mark.parametrize("num_rows", SIZES)
def test_a_metric_mode_lists_what_each_rank_found_in_its_own_rows(
    group: WorkerGroup[Any], how: How, num_rows: int
) -> None:
    found = how(group.metric, rows_of(num_rows))
    assert [rank for rank, _ in found] == [0, 1, 2, 3]
    assert [row for _, rows in found for row in rows] == list(range(num_rows))


def test_a_direct_rollout_method_is_refused(group: WorkerGroup[Any], how: How) -> None:
    with pytest.raises(DispatchError, match="called directly"):
        how(group.generate, "prompt")


@pytest.mark.parametrize("name", ["dealt", "dealt_by_name"])
def test_a_mode_of_your_own_deals_and_gathers(group: WorkerGroup[Any], how: How, name: str) -> None:
    cards = list("abcdefghij")
    assert how(getattr(group, name), cards) == [(card, number % 4) for number, card in enumerate(cards)]


def test_a_method_that_does_not_block_gives_a_future(group: WorkerGroup[Any]) -> None:
    futures = [group.not_blocking(10), group.not_blocking.submit(20)]
    assert [future.result(100) for future in futures] == [[10, 11, 12, 13], [20, 21, 22, 23]]


def test_an_error_names_its_rank_and_the_group_goes_on(group: WorkerGroup[Any], how: How) -> None:
    with pytest.raises(ValueError, match="rank 2 fails on purpose") as caught:
        how(group.boom, 2)
    assert isinstance(caught.value, RemoteError)
    assert caught.value.rank == 2
    assert how(group.boom, 9) == [0, 1, 2, 3]


# -- figures -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_rows", [1, 3, 5, 8])
def test_p45_figures_are_those_of_one_rank(group: WorkerGroup[Any], how: How, num_rows: int) -> None:
    whole = sum(row * row for row in range(num_rows)) / num_rows
    batch = rows_of(num_rows)
    back = how(group.figures, batch)
    assert column(back, "row") == list(range(num_rows))
    assert back.meta_info["metrics"]["loss"] == pytest.approx(whole, abs=1e-6)
    assert back.meta_info["metrics"]["rows"] == num_rows
    assert how(group.mean_loss, batch) == pytest.approx(whole, abs=1e-6)
    assert how(group.tp_figures, batch).meta_info["metrics"]["loss"] == pytest.approx(whole, abs=1e-6)
    if num_rows % 4:
        with pytest.raises(CollectError, match=r"returned the metrics loss, but \d rows of padding count in them"):
            how(group.figures_without_rule, batch)


def test_p46_every_ranks_figures_are_merged_by_their_rule_or_refused(group: WorkerGroup[Any], how: How) -> None:
    facts = how(group.figures, rows_of(6)).meta_info
    assert facts["metrics"]["rank"] == [0, 1, 2, 3], "no rule: a list, and none is lost"
    assert facts["count"] == [2, 2, 1, 1]
    assert facts["step"] == 3
    assert how(group.merged) == {"rank": [0, 1, 2, 3], "total": 6, "world": 4}
    with pytest.raises(CollectError, match="'rank' differs: part 0 has 0, part 2 has 1"):
        how(group.disagreeing)
    with pytest.raises(CollectError, match=r"meta_info\['step'\] differs: part 0 has 0, part 3 has 1"):
        how(group.step_of_rank, rows_of(4))


# -- meshes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_rows", SIZES)
def test_ranks_of_one_dp_rank_share_a_part_and_one_of_them_answers(
    group: WorkerGroup[Any], how: How, num_rows: int
) -> None:
    half = -(-num_rows // 2)
    back = how(group.over_tp, rows_of(num_rows))
    assert column(back, "row") == list(range(num_rows))
    assert column(back, "rank") == [0 if row < half else 2 for row in range(num_rows)]
    back = how(group.over_back, batch=rows_of(num_rows))
    assert column(back, "row") == list(range(num_rows)), "dp order, whatever the order of the ranks"
    assert column(back, "rank") == [2 if row < half else 0 for row in range(num_rows)]
    assert column(how(group.over_tp_uneven, rows_of(num_rows)), "part") == [half] * half + [num_rows - half] * (
        num_rows - half
    )


@pytest.mark.parametrize("num_rows", [1, 2, 7])
def test_a_mesh_of_stages_tensor_and_data_parallel_ranks(pipeline: WorkerGroup[Any], how: How, num_rows: int) -> None:
    half = -(-num_rows // 2)
    ranks = [4 if row < half else 6 for row in range(num_rows)]
    back = how(pipeline.over_pp, rows_of(num_rows))
    assert (column(back, "row"), column(back, "rank")) == (list(range(num_rows)), ranks)
    other = DataProto.from_dict(non_tensors={"name": list("abcdefg")[:num_rows]})
    back = how(pipeline.over_pp_by_name, other=other, batch=rows_of(num_rows))
    assert column(back, "name") == list("abcdefg")[:num_rows]
    assert column(back, "rank") == ranks
    assert column(how(pipeline.only_the_collecting_send, rows_of(num_rows)), "row") == list(range(num_rows))


@pytest.mark.parametrize(
    ("name", "expected"), [("rows_of", 1), ("metric", 4), ("tp_without_facts", 2)], ids=["one", "each rank", "dp ranks"]
)
def test_p53_a_part_is_encoded_once_however_many_ranks_get_it(
    group: WorkerGroup[Any], how: How, name: str, expected: int
) -> None:
    batch = rows_of(8, counted=Counted())
    group.over_tp(rows_of(2))  # the mesh has been asked for
    before = Counted.encoded
    how(getattr(group, name), batch)
    assert Counted.encoded - before == expected


# -- tensors -----------------------------------------------------------------------------------------------------------


def tensors_of(rows: int) -> dict[str, torch.Tensor]:
    return {
        "x": torch.arange(rows * 3).reshape(rows, 3).bfloat16(),
        "mask": torch.arange(rows) % 2 == 0,
        "text": jagged([row % 4 for row in range(rows)]),
        "positions": jagged([row % 3 + 1 for row in range(rows)], width=3),
    }


@pytest.mark.parametrize("rows", [1, 5, 8])
def test_jagged_columns_keep_their_ragged_dimension_through_a_group(group: WorkerGroup[Any], rows: int) -> None:
    batch = DataProto.from_dict(tensors_of(rows), {"row": list(range(rows))})
    for method in (group.echo, group.echo_uneven):
        back = method.submit(batch).result(100)
        assert_same(back, batch)
        assert back.batch["positions"]._ragged_idx == 2
    if rows % 4 == 0:
        assert group.ragged(batch) == [{"text": 1, "positions": 2}] * 4


@pytest.mark.parametrize("rows", [1, 5, 8])
def test_a_tensordict_goes_in_and_a_tensordict_comes_out(group: WorkerGroup[Any], rows: int) -> None:
    contents = {**tensors_of(rows), "fact": NonTensorData({"step": 3}, batch_size=[rows])}
    whole = TensorDict({**contents, "name": [f"row {row}" for row in range(rows)]}, batch_size=[rows])
    for method in (group.echo, group.echo_uneven):
        back = method(whole)
        assert type(back) is TensorDict
        assert back.batch_size == torch.Size([rows])
        assert first_difference(_plain(back), _plain(whole)) is None
        assert back["positions"]._ragged_idx == 2
    if rows % 4 == 0:
        assert group.ragged(whole) == [{"text": 1, "positions": 2}] * 4


def _plain(value: TensorDict) -> dict[str, Any]:
    plain: dict[str, Any] = {key: value[key] for key in ("x", "mask", "text", "positions", "fact")}
    plain["name"] = value.get("name").tolist()
    return plain


# -- memory ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mebibyte", "mebibyte_of_all"])
def test_p52_ranks_whose_result_nobody_collects_keep_none(group: WorkerGroup[Any], name: str) -> None:
    pids = group.pid()
    if len(set(pids)) == 1:
        pytest.skip("ranks that are threads of one process have no memory of their own")
    args = [rows_of(1)] if name == "mebibyte" else []
    used: list[list[int]] = []
    for call in range(200):
        result = getattr(group, name)(*args)
        if call in (9, 199):  # early: what a worker keeps of its replies is bounded, at 64 MiB
            used.append([psutil.Process(pid).memory_info().rss for pid in pids[1:]])
    values = result.non_tensor_batch["x"] if name == "mebibyte" else result
    assert values.nbytes == 1 << 20
    assert values.max() == 0.0
    growth = [(after - before) / 2**20 for before, after in zip(*used, strict=True)]
    assert max(growth) < 20, f"MiB by rank: {growth}; 190 results of 1 MiB were made meanwhile"
