"""How does meta_info go from a batch to its parts, and from parts to a batch?

Parts get their own dicts and lists, so that writing into one never shows in another. ``metrics`` are gathered
from all parts; everything else describes the batch as a whole and must agree, unless a rule says otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rpcrl.batch.compare import first_difference, shortened
from rpcrl.batch.merging import MergeRule, merge_values
from rpcrl.errors import BatchError

__all__ = ["METRICS", "Meta", "joined", "own", "united"]

Meta = dict[str, Any]

METRICS = "metrics"
"""The one key of meta_info whose values are gathered instead of compared."""


def own(value: Any, _made: dict[int, Any] | None = None) -> Any:
    """Return a value whose plain dicts and lists are new at every depth, cycles included; leaves are shared."""
    kind = type(value)
    if kind is not dict and kind is not list:
        return value
    made = {} if _made is None else _made
    known = made.get(id(value))
    if known is None and kind is dict:
        known = made[id(value)] = {}
        for key, entry in value.items():
            known[key] = own(entry, made)
    elif known is None:
        known = made[id(value)] = []
        known.extend(own(entry, made) for entry in value)
    return known


def joined(
    metas: Sequence[Mapping[str, Any]],
    *,
    rules: Mapping[str, MergeRule] | None = None,
    weights: Sequence[float] | None = None,
) -> Meta:
    """Return the meta_info of parts put together.

    ``rules`` names how a field is merged: ``"loss_mask"`` for an entry of meta_info, ``"metrics.loss"`` for one of
    ``metrics``, ``"metrics"`` for all of these. Without a rule, metrics become lists in the order of the parts, and
    any other entry must be the same in all parts that have it. ``metrics`` of a part is a dict, a list of dicts, or
    None; a value that is a list already adds its entries. ``weights`` are those of the parts in a mean. Raises
    ``BatchError`` naming the field and the two parts when they should agree and do not.
    """
    rules = rules or {}
    found: dict[str, dict[int, list[Any]]] = {}
    metrics: dict[str, dict[int, list[Any]]] = {}
    for part, meta in enumerate(metas):
        for key, value in meta.items():
            if key == METRICS:
                _gather(metrics, value, part)
            else:
                found.setdefault(key, {})[part] = [value]
    counts = [1.0] * len(metas) if weights is None else weights
    merged: Meta = {
        key: own(merge_values(f"meta_info[{key!r}]", rules.get(key, "first_equal"), values, counts))
        for key, values in found.items()
    }
    if any(METRICS in meta for meta in metas):
        every = rules.get(METRICS, "list")
        merged[METRICS] = {
            name: merge_values(f"metric {name!r}", rules.get(f"{METRICS}.{name}", every), values, counts)
            for name, values in metrics.items()
        }
    return merged


def united(left: Mapping[str, Any], right: Mapping[str, Any], *, overwrite: bool) -> Meta:
    """Return both together; a key with two different values is refused, or taken from ``right`` on
    ``overwrite``.
    """
    if not overwrite:
        for key in right:
            if key in left:
                _check_equal(key, left[key], right[key], "this batch", "the other")
    merged: Meta = own({**left, **right})
    return merged


def _check_equal(key: str, left: Any, right: Any, here: str, there: str) -> None:
    difference = first_difference(left, right)
    if difference is not None:
        raise BatchError(
            f"meta_info[{key!r}] differs: {here} has {shortened(left)}, {there} has {shortened(right)} "
            f"({difference}); "
            f"drop the key first, or put numbers of single parts under meta_info[{METRICS!r}]"
        )


def _gather(metrics: dict[str, dict[int, list[Any]]], value: Any, part: int) -> None:
    for entry in value if isinstance(value, list) else [value]:
        if entry is None:
            continue
        if not isinstance(entry, Mapping):
            raise BatchError(
                f"meta_info[{METRICS!r}] of part {part} is of type {type(entry).__name__}; expected a dict of numbers"
            )
        for name, number in entry.items():
            kept = metrics.setdefault(name, {}).setdefault(part, [])
            if isinstance(number, list):
                kept.extend(number)
            else:
                kept.append(number)
