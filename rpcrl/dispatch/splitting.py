"""How is a batch split over ranks and put together again? By its own ``len``, ``chunk`` and ``concat``.

DataProto, TensorDict and any class with those three (and slicing, for padding) will do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rpcrl.batch.merging import MergeRule, merge_values
from rpcrl.batch.meta import METRICS
from rpcrl.batch.splittable import chunk, concat, cut, is_splittable, pad
from rpcrl.errors import BatchError, CollectError, DispatchError

__all__ = ["Merge", "Parts", "UnevenPolicy", "chunk_all", "concat_all", "merge_all", "unpad_result"]

UnevenPolicy = Literal["pad", "uneven", "drop", "error"]
"""What to do when rows do not divide.

``pad`` and take the padding off again, split unevenly (4, 3, 3), ``drop`` the rows that are left over, or refuse.
"""

Merge = MergeRule | Mapping[str, MergeRule]
"""One rule for all figures that a method returns, or one for each by its name."""


@dataclass(frozen=True)
class Parts:
    """The batches of one call in parts."""

    columns: Sequence[Sequence[Any]]
    """For each batch its parts."""
    rows: tuple[int, ...]
    """Rows of each part that are no padding."""
    num_padding: int = 0


def chunk_all(
    values: Sequence[Any], labels: Sequence[str], num_parts: int, *, policy: UnevenPolicy, call: str
) -> Parts:
    """Split every batch of one call into ``num_parts`` parts.

    Raises DispatchError if a value is not a batch, if lengths differ, or if the policy forbids the remainder.
    """
    for label, value in zip(labels, values, strict=True):
        if not is_splittable(value):
            raise DispatchError(
                f"{call} splits batches over ranks: {label} is a {type(value).__name__}, which has no len, chunk and "
                "concat. Put it into meta_info of the batch, or register the method with Dispatch.ONE_TO_ALL"
            )
    if not values:
        raise DispatchError(f"{call} splits batches over ranks, but it was called without one")
    lengths = [len(value) for value in values]
    if len(set(lengths)) > 1:
        listed = ", ".join(f"{label} has {length}" for label, length in zip(labels, lengths, strict=True))
        raise DispatchError(f"{call} needs batches of equal length: {listed} rows")
    try:
        parts = _parts(values, lengths[0], num_parts, policy=policy, call=call)
    except (TypeError, AttributeError) as error:
        kinds = ", ".join(sorted({type(value).__name__ for value in values}))
        raise DispatchError(
            f"{call} cannot split a {kinds} over {num_parts} ranks: {error}. A batch type of your own needs len, "
            "chunk(n) and concat; slices (batch[a:b]) for uneven='pad' or 'drop'; and chunk(n, uneven=True) for "
            "uneven='uneven', which Dispatch.DP_COMPUTE_METRIC always uses"
        ) from error
    for label, column in zip(labels, parts.columns, strict=True):
        if len(column) != num_parts:
            raise DispatchError(f"{call}: chunk({num_parts}) of {label} gave {len(column)} parts; nothing was sent")
    return parts


def _parts(values: Sequence[Any], num_rows: int, num_parts: int, *, policy: UnevenPolicy, call: str) -> Parts:
    rest = num_rows % num_parts
    if rest == 0:
        return Parts([chunk(value, num_parts) for value in values], (num_rows // num_parts,) * num_parts)
    if policy == "error":
        raise DispatchError(
            f"cannot split {num_rows} rows into {num_parts} equal parts for {call} (registered with uneven='error'): "
            f"{rest} rows are left over. Use a multiple of {num_parts} rows, or register the method with uneven='pad', "
            "uneven='uneven' or uneven='drop'"
        )
    if policy == "uneven":
        columns = [chunk(value, num_parts, uneven=True) for value in values]
        return Parts(columns, tuple(len(part) for part in columns[0]))
    if policy == "drop":
        size = num_rows // num_parts
        if size == 0:
            raise DispatchError(
                f"cannot split {num_rows} rows into {num_parts} equal parts for {call} (registered with "
                "uneven='drop'): all of them would be dropped. Pass more rows, or register the method with "
                "uneven='uneven'"
            )
        return Parts([chunk(cut(value, 0, size * num_parts), num_parts) for value in values], (size,) * num_parts)
    num_padding = num_parts - rest
    size = (num_rows + num_padding) // num_parts
    return Parts(
        [chunk(pad(value, num_rows + num_padding), num_parts) for value in values],
        tuple(min(size, max(0, num_rows - size * part)) for part in range(num_parts)),
        num_padding,
    )


def concat_all(
    outputs: list[Any],
    *,
    call: str,
    merge: Merge | None = None,
    rows: Sequence[int] | None = None,
    num_padding: int = 0,
) -> Any:
    """Put the results of all ranks together in rank order.

    ``merge`` says how facts and metrics are merged, a mean by ``rows`` of each rank. Raises CollectError naming the
    rank that does not fit; or the metrics, if ``num_padding`` rows of padding would count in them.
    """
    first = outputs[0]
    for rank, output in enumerate(outputs):
        if not is_splittable(output) or type(output) is not type(first):
            expected = type(first).__name__ if is_splittable(first) else "a batch"
            raise CollectError(
                f"{call} must return {expected} on every rank so that the results can be concatenated; rank {rank} "
                f"returned {type(output).__name__}. To get the list of all results, register the method with "
                "Dispatch.DP_COMPUTE_METRIC"
            )
    rules: Mapping[str, MergeRule] = {METRICS: merge} if isinstance(merge, str) else merge or {}
    if num_padding:
        _refuse_padded_metrics(outputs, rules, num_padding, call)
    try:
        return concat(outputs, merge=rules, weights=rows)
    except BatchError as error:
        raise CollectError(f"{call}: the ranks' results do not go together: {error}") from error


def _refuse_padded_metrics(outputs: list[Any], rules: Mapping[str, MergeRule], num_padding: int, call: str) -> None:
    names: set[str] = set()
    for output in outputs:
        metrics = getattr(output, "meta_info", {}).get(METRICS)
        for entry in metrics if isinstance(metrics, list) else [metrics]:
            names |= set(entry) if isinstance(entry, Mapping) else set()
    unruled = sorted(name for name in names if METRICS not in rules and f"{METRICS}.{name}" not in rules)
    if unruled:
        raise CollectError(
            f"{call} returned the metrics {', '.join(unruled)}, but {num_padding} rows of padding count in them. "
            "Register it with merge={'metrics': 'mean'} (rows are split unevenly then, and the mean is weighted "
            "by them) or with uneven='uneven'; merge={'metrics': 'list'} takes figures that do not depend on the rows"
        )


def merge_all(outputs: list[Any], merge: Merge, *, rows: Sequence[int] | None, call: str) -> Any:
    """Return one result for those of all ranks: a figure, or a dict of figures, each merged by its rule.

    Raises CollectError naming the field and the two ranks if they should agree and do not.
    """
    weights = [1.0] * len(outputs) if rows is None else rows
    try:
        if not all(isinstance(output, Mapping) for output in outputs):
            if not isinstance(merge, str):
                kinds = ", ".join(sorted({type(output).__name__ for output in outputs}))
                raise CollectError(f"{call} merges figures by name: every rank must return a dict, got {kinds}")
            return merge_values("the result", merge, {rank: [value] for rank, value in enumerate(outputs)}, weights)
        found: dict[str, dict[int, list[Any]]] = {}
        for rank, output in enumerate(outputs):
            for name, value in output.items():
                found.setdefault(name, {})[rank] = [value]
        rules = dict.fromkeys(found, merge) if isinstance(merge, str) else merge
        return {
            name: merge_values(f"{name!r}", rules.get(name, "first_equal"), values, weights)
            for name, values in found.items()
        }
    except BatchError as error:
        raise CollectError(f"{call}: the ranks' results cannot be merged: {error} (a part is a rank here)") from error


def unpad_result(result: Any, num_padding: int, num_rows: int, *, call: str) -> Any:
    """Take the padding off a concatenated result.

    ``num_rows`` is the padded length that went out. A result of another length is not row by row: then padding
    cannot be told from rows, which is an error and not a guess.
    """
    if num_padding == 0 or not is_splittable(result):
        return result
    if len(result) != num_rows:
        raise CollectError(
            f"{call} got {num_rows} rows ({num_padding} of them padding) and returned {len(result)}: padding cannot "
            "be taken off a result that is not row by row. Register the method with uneven='uneven', or pass a batch "
            "whose rows divide by the number of ranks"
        )
    return cut(result, 0, num_rows - num_padding)
