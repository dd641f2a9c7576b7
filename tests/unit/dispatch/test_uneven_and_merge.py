"""What happens to rows that do not divide, and to figures of several ranks?"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from rpcrl.batch.data_proto import DataProto
from rpcrl.dispatch.mode import Arguments, CallShape, Dispatch, DispatchMode, Mesh, mesh
from rpcrl.dispatch.register import register
from rpcrl.errors import CollectError, DispatchError


class Group:
    def __init__(self, world_size: int, shape: Mesh | None = None) -> None:
        self.world_size = world_size
        self._shape = shape

    def mesh(self, name: str) -> Mesh:
        assert self._shape is not None
        return self._shape


def rows_of(count: int) -> DataProto:
    return DataProto.from_dict({"x": torch.arange(count).double()}, {"row": list(range(count))})


def run(mode: DispatchMode, group: Group, call: CallShape, batch: DataProto, work: Any) -> Any:
    """Do what a group does with one call; ``work`` stands for the method."""
    sent = mode.dispatch(group, call, Arguments((batch,), {}))
    return mode.collect(group, call.sent(sent), [work(part.args[0]) for part in sent.per_rank])


def parts_of(mode: DispatchMode, call: CallShape, batch: DataProto, world_size: int) -> list[list[int]]:
    sent = mode.dispatch(Group(world_size), call, Arguments((batch,), {}))
    return [part.args[0].non_tensor_batch["row"].tolist() for part in sent.per_rank]


P43: dict[str, dict[int, list[list[int]] | str]] = {
    "pad": {
        0: [[], [], [], []],
        1: [[0], [0], [0], [0]],
        3: [[0], [1], [2], [0]],
        4: [[0], [1], [2], [3]],
        5: [[0, 1], [2, 3], [4, 0], [1, 2]],
        10: [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 0, 1]],
    },
    "uneven": {
        0: [[], [], [], []],
        1: [[0], [], [], []],
        3: [[0], [1], [2], []],
        4: [[0], [1], [2], [3]],
        5: [[0, 1], [2], [3], [4]],
        10: [[0, 1, 2], [3, 4, 5], [6, 7], [8, 9]],
    },
    "drop": {
        0: [[], [], [], []],
        1: "cannot split 1 rows into 4 equal parts for r.m .*'drop'.*all of them would be dropped",
        3: "cannot split 3 rows into 4 equal parts for r.m .*'drop'.*all of them would be dropped",
        4: [[0], [1], [2], [3]],
        5: [[0], [1], [2], [3]],
        10: [[0, 1], [2, 3], [4, 5], [6, 7]],
    },
    "error": {
        0: [[], [], [], []],
        1: "cannot split 1 rows into 4 equal parts for r.m .*'error'.*1 rows are left over",
        3: "cannot split 3 rows into 4 .*3 rows are left over",
        4: [[0], [1], [2], [3]],
        5: "cannot split 5 rows into 4 .*1 rows are left over.*Use a multiple of 4",
        10: "cannot split 10 rows into 4 .*2 rows are left over",
    },
}


@pytest.mark.parametrize("num_rows", [0, 1, 3, 4, 5, 10])
@pytest.mark.parametrize("policy", P43)
def test_p43_rows_that_do_not_divide_go_by_the_stated_policy(policy: Any, num_rows: int) -> None:
    expected, call = P43[policy][num_rows], CallShape("r.m", policy)
    if isinstance(expected, str):
        with pytest.raises(DispatchError, match=expected):
            parts_of(Dispatch.DP_COMPUTE_PROTO, call, rows_of(num_rows), 4)
    else:
        assert parts_of(Dispatch.DP_COMPUTE_PROTO, call, rows_of(num_rows), 4) == expected


MEAN: Any = {"metrics.loss": "mean", "metrics.rows": "sum"}
TP2_DP2 = Mesh("m", dp_ranks=(0, 0, 1, 1), collects=(True, False, True, False))


def figures(part: DataProto) -> DataProto:
    """Return no rows, only figures of them: a mean, and a count."""
    return DataProto(meta_info={"metrics": {"loss": float(part.batch["x"].mean()), "rows": len(part)}})


def with_figures(part: DataProto) -> DataProto:
    return DataProto(part.batch, part.non_tensor_batch, figures(part).meta_info)


@pytest.mark.parametrize("work", [figures, with_figures])
@pytest.mark.parametrize("num_rows", [1, 3, 5, 8, 10])
def test_p45_padding_reaches_no_figure_and_a_mean_is_that_of_one_rank(num_rows: int, work: Any) -> None:
    call = CallShape("r.m", "pad", merge=MEAN)
    whole = {"loss": (num_rows - 1) / 2, "rows": num_rows}
    for mode, group in ((Dispatch.DP_COMPUTE_PROTO, Group(4)), (mesh("m"), Group(4, TP2_DP2))):
        result = run(mode, group, call, rows_of(num_rows), work)
        assert result.meta_info["metrics"] == pytest.approx(whole, abs=1e-6)
        assert len(result) in (0, num_rows)


def test_p45_figures_of_padded_parts_are_refused_unless_their_rule_is_said() -> None:
    call = CallShape("r.m", "pad")
    with pytest.raises(
        CollectError, match=r"r\.m returned the metrics loss, rows, but 3 rows of padding count in them"
    ):
        run(Dispatch.DP_COMPUTE_PROTO, Group(4), call, rows_of(5), with_figures)
    with pytest.raises(CollectError, match="returned the metrics rows, but"):
        run(
            Dispatch.DP_COMPUTE_PROTO, Group(4), replace(call, merge={"metrics.loss": "list"}), rows_of(5), with_figures
        )
    taken = run(Dispatch.DP_COMPUTE_PROTO, Group(4), replace(call, merge="list"), rows_of(5), with_figures)
    assert taken.meta_info["metrics"]["rows"] == [2, 2, 2, 2]
    even = run(Dispatch.DP_COMPUTE_PROTO, Group(4), call, rows_of(8), with_figures)
    assert even.meta_info["metrics"]["rows"] == [2, 2, 2, 2]


@pytest.mark.parametrize("merge", ["mean", {"loss": "mean", "rows": "sum"}])
def test_p45_a_list_of_figures_becomes_one(merge: Any) -> None:
    def work(part: DataProto) -> dict[str, float]:
        return {"loss": float(part.batch["x"].mean()), "rows": len(part)}

    result = run(Dispatch.DP_COMPUTE_METRIC, Group(4), CallShape("r.m", merge=merge), rows_of(5), work)
    assert result["loss"] == pytest.approx(2.0)
    assert result["rows"] == (1.4 if merge == "mean" else 5)


def test_p46_figures_of_all_ranks_are_merged_or_refused() -> None:
    group, outputs = Group(3), [{"a": 1, "b": "x"}, {"a": 2, "b": "x"}, {"a": 6, "b": "x", "c": 1}]

    def collect(merge: Any, values: list[Any]) -> Any:
        return Dispatch.ONE_TO_ALL.collect(group, CallShape("r.m", merge=merge), values)

    assert collect({"a": "mean"}, outputs) == {"a": 3.0, "b": "x", "c": 1}
    assert collect({"a": "sum", "b": "list"}, outputs) == {"a": 9, "b": ["x"] * 3, "c": 1}
    assert collect("sum", [1, 2, 3]) == 6
    assert collect("first_equal", ["same"] * 3) == "same"
    assert collect(None, outputs) is outputs
    with pytest.raises(CollectError, match=r"r\.m: .*'a' differs: part 0 has 1, part 1 has 2"):
        collect({"b": "list"}, outputs)
    with pytest.raises(CollectError, match="the result differs: part 0 has 1, part 2 has 2"):
        collect("first_equal", [1, 1, 2])
    with pytest.raises(CollectError, match="every rank must return a dict, got int"):
        collect({"a": "mean"}, [1, 2, 3])


def test_p46_ranks_that_disagree_are_named_with_the_method() -> None:
    parts = [DataProto(meta_info={"step": step}) for step in (1, 1, 2)]
    with pytest.raises(CollectError, match=r"r\.m: the ranks' results do not go together: meta_info\['step'\] differs"):
        Dispatch.DP_COMPUTE_PROTO.collect(Group(3), CallShape("r.m"), parts)


def test_rules_are_checked_when_the_class_is_defined() -> None:
    with pytest.raises(DispatchError, match="loss is merged by one of first_equal, mean, sum, list, not by 'average'"):
        register(merge={"loss": "average"})  # type: ignore[dict-item]
    with pytest.raises(DispatchError, match="nothing to merge: the method's result is the result of rank 0"):
        register(Dispatch.RANK_ZERO, merge="mean")
    with pytest.raises(DispatchError, match="nothing to merge: the method's result is what its own collect_fn"):
        register({"dispatch_fn": print, "collect_fn": print}, merge="mean")
