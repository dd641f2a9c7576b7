"""What comes out of a reward function, and is it what it must be?

Pure Python: a reward process needs no torch. Each row's result is a number or a dict with ``score`` and further
fields. Every field must be a number or a string, present in every row; anything else is an error that names the row,
the field, what was expected, and the function. Nothing is filled in.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

from rpcrl.errors import BatchError
from rpcrl.rewards.loading import RewardFunction

__all__ = ["SCORE", "score_rows"]

SCORE = "score"
"""The column that every reward yields, and the field that a returned dict must have."""

Value = float | int | bool | str


def score_rows(
    reward: RewardFunction,
    *,
    data_sources: Sequence[str],
    solution_strs: Sequence[str],
    ground_truths: Sequence[Any],
    extra_infos: Sequence[Mapping[str, Any]],
    where: str,
) -> dict[str, list[Value]]:
    """Return ``score`` (finite floats) and the function's further fields, each a list with one value per row.

    ``where`` names the process in error texts, e.g. ``reward rank 1``. Raises BatchError for a result of the wrong
    form; an exception of the function itself passes through with a note of the row.
    """
    if reward.per_batch:
        results = _call_with_batch(reward, data_sources, solution_strs, ground_truths, extra_infos, where)
    else:
        results = [
            _call_with_row(reward, index, arguments, where)
            for index, arguments in enumerate(zip(data_sources, solution_strs, ground_truths, extra_infos, strict=True))
        ]
    columns: dict[str, list[Value]] = {SCORE: []}
    for index, result in enumerate(results):
        about = f"{reward.path} on {where}, row {index} of {len(results)} (data_source {data_sources[index]!r})"
        _add_row(columns, _as_fields(result, about), about, first=index == 0)
    return columns


def _call_with_row(reward: RewardFunction, index: int, arguments: tuple[Any, ...], where: str) -> Any:
    data_source, solution_str, ground_truth, extra_info = arguments
    try:
        return reward.function(
            data_source=data_source,
            solution_str=solution_str,
            ground_truth=ground_truth,
            extra_info=extra_info,
            **reward.kwargs,
        )
    except Exception as error:
        error.add_note(
            f"in the reward function {reward.path} on {where}, row {index}: data_source {data_source!r}, "
            f"ground_truth {_shortened(ground_truth)}, solution_str {_shortened(solution_str)}"
        )
        raise


def _call_with_batch(
    reward: RewardFunction,
    data_sources: Sequence[str],
    solution_strs: Sequence[str],
    ground_truths: Sequence[Any],
    extra_infos: Sequence[Mapping[str, Any]],
    where: str,
) -> list[Any]:
    try:
        results = reward.function(
            data_sources=list(data_sources),
            solution_strs=list(solution_strs),
            ground_truths=list(ground_truths),
            extra_infos=list(extra_infos),
            **reward.kwargs,
        )
    except Exception as error:
        error.add_note(f"in the batch reward function {reward.path} on {where}, {len(solution_strs)} rows")
        raise
    if (
        isinstance(results, str | bytes | Mapping)
        or not hasattr(results, "__len__")
        or not hasattr(results, "__iter__")
    ):
        raise BatchError(
            f"{reward.path} on {where} must return a list with one number or dict per row, got {type(results).__name__}"
        )
    if len(results) != len(solution_strs):
        raise BatchError(f"{reward.path} on {where} returned {len(results)} results for {len(solution_strs)} rows")
    return list(results)


def _as_fields(result: Any, about: str) -> dict[str, Any]:
    if not isinstance(result, Mapping):
        return {SCORE: result}
    if SCORE not in result:
        raise BatchError(
            f"{about}: the returned dict has no field {SCORE!r}, only {', '.join(map(repr, result)) or 'nothing'}"
        )
    for name in result:
        if not isinstance(name, str):
            raise BatchError(f"{about}: names of fields are strings, got {name!r} ({type(name).__name__})")
    return dict(result)


def _add_row(columns: dict[str, list[Value]], fields: dict[str, Any], about: str, *, first: bool) -> None:
    if first:
        columns.update({name: [] for name in fields})
    elif fields.keys() != columns.keys():
        missing, more = sorted(columns.keys() - fields.keys()), sorted(fields.keys() - columns.keys())
        raise BatchError(
            f"{about}: every row must have the same fields as row 0; missing {missing or 'none'}, new {more or 'none'}"
        )
    for name, values in columns.items():
        values.append(_checked(name, fields[name], about, like=values[0] if values else None))


def _checked(name: str, value: Any, about: str, *, like: Value | None) -> Value:
    plain = _plain(value)
    expected = "a finite number" if name == SCORE else "a number or a string"
    if name != SCORE and like is not None:
        expected = "a string, as in row 0" if isinstance(like, str) else "a number, as in row 0"
    is_text = isinstance(plain, str)
    fits = plain is not None and not (name == SCORE and is_text)
    if fits and name != SCORE and like is not None:
        fits = is_text == isinstance(like, str)
    if plain is None or not fits:
        shown = "None" if value is None else f"{_shortened(value)} ({type(value).__name__})"
        raise BatchError(f"{about}: field {name!r} must be {expected}, got {shown}")
    if name != SCORE:
        return plain
    number = float(plain)
    if not math.isfinite(number):
        raise BatchError(f"{about}: field {name!r} must be {expected}, got {number}")
    return number


def _plain(value: Any) -> Value | None:
    """Return Python's own number or string for ``value``, None when it is neither."""
    if isinstance(value, bool | int | float | str):
        return value if type(value) in (bool, int, float, str) else _demoted(value)
    if isinstance(value, Real):  # numpy's scalars, fractions
        return float(value)
    if type(value).__module__ == "numpy" and type(value).__name__ in ("bool", "bool_"):
        return bool(value)
    return None


def _demoted(value: Any) -> Value:
    for kind in (str, int, float):
        if isinstance(value, kind):
            return kind(value)
    raise AssertionError("only subclasses of str, int and float come here")


def _shortened(value: object, limit: int = 80) -> str:
    text = repr(value)
    return text if len(text) <= limit else f"{text[: limit - 1]}…"
