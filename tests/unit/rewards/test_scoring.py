"""What a reward function may return, and what is said when it does not."""

from __future__ import annotations

import fractions
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from rpcrl.errors import BatchError
from rpcrl.rewards import RewardFunction, batch_reward, is_batch_reward, load_reward
from rpcrl.rewards.controls import shuffled
from rpcrl.rewards.scoring import score_rows


def run(function: Callable[..., Any], rows: int = 3, *, where: str = "reward rank 1", **kwargs: Any) -> dict[str, Any]:
    return score_rows(
        RewardFunction("mine.py:fn", function, is_batch_reward(function), kwargs),
        data_sources=["digits"] * rows,
        solution_strs=[str(number) for number in range(rows)],
        ground_truths=["1"] * rows,
        extra_infos=[{"index": number} for number in range(rows)],
        where=where,
    )


def results(*values: Any) -> Callable[..., Any]:
    """A reward that returns these values, row by row."""
    return lambda *, solution_str, **_: values[int(solution_str)]


def per_batch(value: Any) -> Callable[..., Any]:
    @batch_reward
    def function(**_: Any) -> Any:
        return value

    return function


def test_numbers_of_every_kind_become_floats() -> None:
    columns = run(results(1, True, np.float32(0.5)))
    assert columns == {"score": [1.0, 1.0, 0.5]}
    assert [type(value) for value in columns["score"]] == [float] * 3
    assert run(results(np.int64(2), np.bool_(True), fractions.Fraction(1, 4))) == {"score": [2.0, 1.0, 0.25]}


def test_fields_of_a_dict_become_columns() -> None:
    rows = [{"score": 1.0, "format": True, "note": "fine"}, {"score": 0, "format": 0.5, "note": "bad"}]
    assert run(results(*rows), 2) == {"score": [1.0, 0.0], "format": [True, 0.5], "note": ["fine", "bad"]}


def test_arguments_are_those_of_verl_by_name() -> None:
    seen: list[tuple[Any, ...]] = []

    def function(data_source: str, solution_str: str, ground_truth: str, extra_info: Any, *, scale: int) -> float:
        seen.append((data_source, solution_str, ground_truth, extra_info))
        return scale * 1.0

    assert run(function, 1, scale=3) == {"score": [3.0]}
    assert seen == [("digits", "0", "1", {"index": 0})]


@pytest.mark.parametrize("bad", [None, "1.0", [1.0], float("nan"), float("inf"), 1j, object()])
def test_p38_a_score_that_is_no_number_names_row_rank_field_and_type(bad: Any) -> None:
    with pytest.raises(BatchError) as caught:
        run(results(1.0, bad, 1.0))
    text = str(caught.value)
    assert "mine.py:fn on reward rank 1, row 1 of 3 (data_source 'digits')" in text
    assert "field 'score' must be a finite number, got " in text
    assert ("None" if bad is None else str(bad) if isinstance(bad, float) else f"({type(bad).__name__})") in text


@pytest.mark.parametrize(
    ("bad", "got"),
    [(None, "None"), ("high", "'high' (str)"), ({"a": 1}, "{'a': 1} (dict)")],
    ids=["none", "str", "dict"],
)
def test_p38_one_field_on_one_rank_that_does_not_fit_is_named(bad: Any, got: str) -> None:
    rows = [{"score": 1.0, "format": 1.0}, {"score": 1.0, "format": 1.0}, {"score": 1.0, "format": bad}]
    with pytest.raises(BatchError) as caught:
        run(results(*rows), where="reward rank 3")
    assert "on reward rank 3, row 2 of 3" in str(caught.value)
    assert f"field 'format' must be a number, as in row 0, got {got}" in str(caught.value)


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        ([{"acc": 1.0}], "has no field 'score', only 'acc'"),
        ([{"score": 1.0, 3: 1.0}], "names of fields are strings, got 3"),
        ([{"score": 1.0, "acc": [1]}], r"field 'acc' must be a number or a string, got \[1\] \(list\)"),
        ([1.0, {"score": 1.0, "acc": 1.0}], r"row 1 of 2.*same fields as row 0; missing none, new \['acc'\]"),
        ([{"score": 1.0, "acc": 1.0}, 1.0], r"missing \['acc'\], new none"),
    ],
)
def test_dicts_of_another_form_are_refused(rows: list[Any], problem: str) -> None:
    with pytest.raises(BatchError, match=problem):
        run(results(*rows), len(rows))


def test_an_exception_keeps_its_type_and_gets_a_note_of_the_row() -> None:
    def function(*, solution_str: str, **_: Any) -> float:
        return 1.0 / (2 - int(solution_str))

    with pytest.raises(ZeroDivisionError) as caught:
        run(function)
    (note,) = caught.value.__notes__
    assert "mine.py:fn on reward rank 1, row 2" in note
    assert "solution_str '2'" in note


def test_a_batch_reward_gets_lists_and_returns_one_result_per_row() -> None:
    seen: dict[str, Any] = {}

    @batch_reward
    def function(**arguments: Any) -> Any:
        seen.update(arguments)
        return np.array([0.0, 1.0, 2.0])

    assert run(function, k=1) == {"score": [0.0, 1.0, 2.0]}
    assert seen.keys() == {"data_sources", "solution_strs", "ground_truths", "extra_infos", "k"}
    assert seen["solution_strs"] == ["0", "1", "2"]
    assert run(per_batch([{"score": 1, "n": 2}]), 1) == {"score": [1.0], "n": [2]}


@pytest.mark.parametrize(
    ("returned", "problem"),
    [
        ([1.0, 2.0], "returned 2 results for 3 rows"),
        (1.0, "must return a list with one number or dict per row, got float"),
        ({"score": [1.0] * 3}, "got dict"),
        ("123", "got str"),
        ([1.0, None, 1.0], "row 1 of 3.*field 'score' must be a finite number, got None"),
    ],
)
def test_a_batch_reward_of_another_form_is_refused(returned: Any, problem: str) -> None:
    with pytest.raises(BatchError, match=problem):
        run(per_batch(returned))


def test_the_shuffled_control_keeps_the_mean_and_loses_the_credit() -> None:
    count = 200
    arguments: dict[str, Any] = {
        "data_sources": ["sort_digits"] * count,
        "solution_strs": ["1 2" if number % 2 else "2 1" for number in range(count)],
        "ground_truths": ["1 2"] * count,
        "extra_infos": [{}] * count,
    }
    of = "rpcrl.tasks.sort_digits:score"
    true = [float(number % 2) for number in range(count)]
    scores = shuffled(**arguments, of=of)
    assert sum(scores) == sum(true)
    assert 60 < sum(one == other for one, other in zip(scores, true, strict=True)) < 140
    assert scores == shuffled(**arguments, of=of)
    assert scores != shuffled(**arguments, of=of, seed=1)
    assert load_reward("rpcrl.rewards.controls:shuffled", {"of": of}).per_batch
