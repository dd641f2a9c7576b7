"""How do the figures of several parts become one figure?

By the rule that somebody wrote down for the field, and by no other: ``first_equal`` (all parts must agree),
``mean`` (weighted by the rows of each part), ``sum``, or ``list`` (every part's, in order).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import numpy as np

from rpcrl.batch.compare import first_difference, shortened
from rpcrl.batch.rows import is_tensor
from rpcrl.errors import BatchError

__all__ = ["MergeRule", "check_rule", "merge_values"]

MergeRule = Literal["first_equal", "mean", "sum", "list"]
"""How a field of several parts is put together."""


def check_rule(label: str, rule: object) -> MergeRule:
    """Return a rule as it is; raises ``BatchError`` when it is none."""
    if rule not in get_args(MergeRule):
        raise BatchError(f"{label} is merged by one of {', '.join(get_args(MergeRule))}, not by {rule!r}")
    return rule  # type: ignore[return-value]  # it is one of the literals


def merge_values(label: str, rule: MergeRule, values: Mapping[int, Sequence[Any]], weights: Sequence[float]) -> Any:
    """Return one value for a field.

    ``values`` maps the number of a part to its values (as a rule one); ``weights`` has an entry for every part, as a
    rule its rows. A part of weight 0 does not count in a mean, unless all are 0: then all count alike. Raises
    ``BatchError`` naming the field and the two parts when they should agree and do not, and for a value that is no
    number where a number is needed.
    """
    if rule == "list":
        return [value for entries in values.values() for value in entries]
    if rule == "first_equal":
        return _agreed(label, [(part, value) for part, entries in values.items() for value in entries])
    for part, entries in values.items():
        for value in entries:
            if not (isinstance(value, int | float | np.number | np.ndarray | np.bool_) or is_tensor(value)):
                raise BatchError(
                    f"{label}: the {rule} needs numbers, but part {part} has {shortened(value)} of type "
                    f"{type(value).__name__}; use first_equal or list for it"
                )
    if rule == "sum":
        return _total([value for entries in values.values() for value in entries])
    return _mean({part: entries for part, entries in values.items() if len(entries)}, weights)


def _agreed(label: str, values: Sequence[tuple[int, Any]]) -> Any:
    if not values:
        return None
    first_part, first = values[0]
    for part, value in values[1:]:
        difference = first_difference(first, value)
        if difference is not None:
            raise BatchError(
                f"{label} differs: part {first_part} has {shortened(first)}, part {part} has {shortened(value)} "
                f"({difference}); drop it first, or say how it is merged: merge={{…: 'mean' | 'sum' | 'list'}}"
            )
    return first


def _mean(values: Mapping[int, Sequence[Any]], weights: Sequence[float]) -> Any:
    counted = {part: weights[part] for part in values if weights[part] > 0} or dict.fromkeys(values, 1.0)
    if not counted:
        return math.nan
    shares = [_total(values[part]) * (weight / len(values[part])) for part, weight in counted.items()]
    return _total(shares) / math.fsum(counted.values())


def _total(values: Sequence[Any]) -> Any:
    if all(isinstance(value, float) for value in values):
        return math.fsum(values)
    total = values[0] if values else 0
    for value in values[1:]:
        total = total + value
    return total
