"""How are facts and figures of several parts put together, field by field?"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import NonTensorData, TensorDict

from rpcrl.batch import splittable
from rpcrl.batch.data_proto import DataProto
from rpcrl.batch.merging import check_rule
from rpcrl.errors import BatchError


def part(rows: int, metrics: Any = None, **facts: Any) -> DataProto:
    return DataProto.from_dict({"x": torch.zeros(rows)}, None, {"metrics": metrics, **facts})


def test_p46_every_field_is_merged_by_its_rule_and_none_is_lost() -> None:
    parts = [part(3, {"loss": 1.0, "tokens": 5, "seconds": 0.5, "lr": 0.1}, seed=7, count=2)]
    parts += [part(1, {"loss": 2.0, "tokens": 6, "seconds": 0.7, "lr": 0.1, "late": 1}, seed=7, count=3)]
    rules: Any = {
        "metrics.loss": "mean",
        "metrics.tokens": "sum",
        "metrics.seconds": "list",
        "metrics.lr": "first_equal",
        "count": "sum",
    }
    facts = DataProto.concat(parts, merge=rules).meta_info
    assert facts["metrics"] == {"loss": 1.25, "tokens": 11, "seconds": [0.5, 0.7], "lr": 0.1, "late": [1]}
    assert (facts["seed"], facts["count"]) == (7, 5)
    assert DataProto.concat(parts, merge={"metrics": "mean", "count": "list"}).meta_info["count"] == [2, 3]
    weighted = DataProto.concat(parts, merge=rules, weights=[0, 4]).meta_info["metrics"]
    assert weighted["loss"] == 2.0


def test_p46_disagreement_without_a_rule_is_an_error_with_both_values() -> None:
    parts = [part(1, count=2), part(1, count=2), part(1, count=3)]
    with pytest.raises(
        BatchError, match=r"meta_info\['count'\] differs: part 0 has 2, part 2 has 3.*say how it is merg"
    ):
        DataProto.concat(parts)
    with pytest.raises(BatchError, match=r"metric 'lr' differs: part 0 has 0.1, part 1 has 0.2"):
        DataProto.concat([part(1, {"lr": 0.1}), part(1, {"lr": 0.2})], merge={"metrics.lr": "first_equal"})


def test_p46_a_tensordicts_facts_are_not_those_of_the_first_rank_alone() -> None:
    def said(value: Any) -> TensorDict:
        return TensorDict({"x": torch.zeros(2), "loss": NonTensorData(value, batch_size=[2])}, batch_size=[2])

    with pytest.raises(BatchError, match=r"entry 'loss' differs: part 0 has 1.0, part 1 has 2.0"):
        splittable.concat([said(1.0), said(2.0)])
    assert splittable.concat([said(1.0), said(2.0)], merge={"loss": "mean"})["loss"] == 1.5
    assert splittable.concat([said(1.0), said(1.0)])["loss"] == 1.0


@given(st.lists(st.tuples(st.integers(0, 5), st.lists(st.floats(-1e6, 1e6), min_size=5, max_size=5)), min_size=1))
def test_p45_a_mean_of_means_is_the_mean_of_all_rows(ranks: list[tuple[int, list[float]]]) -> None:
    rows = [values[:count] for count, values in ranks]
    means = [math.fsum(values) / len(values) if values else float("nan") for values in rows]
    parts = [part(len(values), {"loss": mean}) for values, mean in zip(rows, means, strict=True)]
    merged = DataProto.concat(parts, merge={"metrics": "mean"}).meta_info["metrics"]["loss"]
    every = [value for values in rows for value in values]
    assert math.isnan(merged) if not every else math.isclose(merged, math.fsum(every) / len(every), abs_tol=1e-6)


def test_parts_without_any_rows_count_alike() -> None:
    parts = [DataProto(meta_info={"metrics": {"loss": value}}) for value in (1.0, 3.0)]
    assert DataProto.concat(parts, merge={"metrics": "mean"}).meta_info["metrics"]["loss"] == 2.0


def test_tensors_arrays_and_lists_of_figures_are_merged_too() -> None:
    def merged(left: Any, right: Any, rule: Any) -> Any:
        return DataProto.concat([part(1, {"m": left}), part(3, {"m": right})], merge={"metrics.m": rule}).meta_info[
            "metrics"
        ]["m"]

    assert merged([1.0, 3.0], [4.0], "mean") == (2.0 + 3 * 4.0) / 4
    assert merged([1, 3], [4], "sum") == 8
    assert merged([], [4.0], "mean") == 4.0
    assert merged(np.array([0.0, 4.0]), np.array([4.0, 0.0]), "mean").tolist() == [3.0, 1.0]
    assert merged(torch.tensor([0.0, 4.0]), torch.tensor([4.0, 0.0]), "sum").tolist() == [4.0, 4.0]
    assert merged(True, False, "sum") == 1


def test_what_cannot_be_merged_is_named() -> None:
    with pytest.raises(BatchError, match="metric 'm': the mean needs numbers, but part 1 has 'fast' of type str"):
        DataProto.concat([part(1, {"m": 1.0}), part(1, {"m": "fast"})], merge={"metrics": "mean"})
    with pytest.raises(BatchError, match="'loss' is merged by one of first_equal, mean, sum, list, not by 'average'"):
        check_rule("'loss'", "average")


def test_the_inputs_keep_their_facts() -> None:
    parts = [part(1, {"loss": [1.0]}, notes={"a": []}), part(1, {"loss": [2.0]}, notes={"a": []})]
    made = DataProto.concat(parts)
    made.meta_info["metrics"]["loss"].append(3.0)
    made.meta_info["notes"]["a"].append(1)
    assert [entry.meta_info for entry in parts] == [
        {"metrics": {"loss": [1.0]}, "notes": {"a": []}},
        {"metrics": {"loss": [2.0]}, "notes": {"a": []}},
    ]
