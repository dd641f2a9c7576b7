"""Do the columns of one or several batches fit together, and what do they make together?

Works on plain dicts of columns. Every refusal names the column, the part, the numbers and what to do.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rpcrl.batch import objects
from rpcrl.batch.compare import first_difference
from rpcrl.batch.objects import ObjectColumn
from rpcrl.batch.rows import is_tensor
from rpcrl.errors import BatchError

__all__ = [
    "check_same_keys",
    "check_same_rows",
    "concat",
    "count_rows",
    "picked",
    "renamed",
    "united",
    "unknown",
]

Columns = Mapping[str, Any]


def count_rows(tensors: Columns | None, non_tensors: Mapping[str, ObjectColumn], declared: int) -> int:
    """Return the number of rows of all columns; raises ``BatchError`` naming pivot and offender.

    ``declared`` counts when there is no column at all.
    """
    rows, pivot = (declared, "") if tensors is None or tensors else (declared, "the batch size")
    if tensors:
        from rpcrl.batch.tensors import check

        for key, column in tensors.items():
            count = check(key, column)
            if not pivot:
                rows, pivot = count, f"tensor column {key!r}"
            elif count != rows:
                raise _mismatch(pivot, rows, f"tensor column {key!r}", count)
    for key, value in non_tensors.items():
        if not hasattr(value, "dtype") or is_tensor(value):  # put in by hand
            raise BatchError(
                f"non-tensor column {key!r} is of type {type(value).__name__}; assign a numpy array with "
                "one entry "
                "per row (rpcrl.batch.objects.object_column(values) makes one)"
            )
        count = len(objects.as_column(key, value))
        if not pivot:
            rows, pivot = count, f"non-tensor column {key!r}"
        elif count != rows:
            raise _mismatch(pivot, rows, f"non-tensor column {key!r}", count)
    return rows


def _mismatch(pivot: str, rows: int, offender: str, count: int) -> BatchError:
    return BatchError(
        f"{offender} has {count} rows but {pivot} has {rows}; all columns of a batch have one entry per row "
        "(put what belongs to the whole batch in meta_info)"
    )


def check_same_rows(left: Any, right: Any) -> None:
    """Raise ``BatchError`` unless two batches have equally many rows, or one has no columns."""
    if not hasattr(right, "non_tensor_batch"):
        raise BatchError(f"union: the other batch is of type {type(right).__name__}; expected a DataProto")
    rows, others = left.check_consistency(), right.check_consistency()
    empty = [part for part in (left, right) if part._columns() is None and not part.non_tensor_batch]
    if rows != others and not empty:
        raise BatchError(
            f"union joins columns of the same rows, but this batch has {rows} rows and the other {others}; "
            "select the common rows first, or use concat to put rows one after the other"
        )


def picked(kind: str, columns: Columns, keys: Sequence[str] | None) -> dict[str, Any]:
    """Return the named entries in the order of ``keys``, or all for None; raises ``BatchError`` for an
    unknown name.
    """
    if keys is None:
        return dict(columns)
    if isinstance(keys, str):
        raise BatchError(f"expected a list of names, got the text {keys!r}; write [{keys!r}]")
    try:
        return {key: columns[key] for key in keys}
    except KeyError:
        raise unknown(kind, next(key for key in keys if key not in columns), columns) from None


def unknown(kind: str, key: str, known: Iterable[str]) -> BatchError:
    """Return the error for a name that does not exist, with the nearest that does."""
    names = [name for name in known if isinstance(name, str)]
    near = difflib.get_close_matches(str(key), names, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return BatchError(f"there is no {kind} {key!r}{hint} There are: {', '.join(sorted(names)) or 'none'}")


def renamed(
    tensors: Columns | None, non_tensors: Columns, old: Sequence[str], new: Sequence[str]
) -> tuple[dict[str, Any] | None, dict[str, Any]]:
    """Return both dicts of columns with ``old`` names replaced by ``new`` ones, all at once and in place of
    order.
    """
    if len(old) != len(new) or len(set(old)) != len(old):
        raise BatchError(f"rename needs as many new names as old ones, each once; got {list(old)} and {list(new)}")
    present = [*(tensors or {}), *non_tensors]
    names = dict(zip(old, new, strict=True))
    for key in old:
        if key not in present:
            raise unknown("column", key, present)
    after = [names.get(key, key) for key in present]
    for key in new:
        if after.count(key) > 1:
            raise BatchError(f"rename would make two columns {key!r}; rename or drop the other one first")

    def with_names(columns: Columns) -> dict[str, Any]:
        return {names.get(key, key): column for key, column in columns.items()}

    return None if tensors is None else with_names(tensors), with_names(non_tensors)


def united(kind: str, left: Columns, right: Columns, *, overwrite: bool) -> dict[str, Any]:
    """Return the columns of both; a name in both must hold the same values, or is taken from ``right``."""
    merged = dict(left)
    for key, column in right.items():
        if key in merged and not overwrite:
            difference = first_difference(merged[key], column)
            if difference is not None:
                raise BatchError(
                    f"union: {kind} {key!r} is in both batches with different values: {_form(merged[key])} "
                    "here, "
                    f"{_form(column)} there, first difference {difference}; drop or rename one, or pass "
                    "overwrite=True to take the other batch's"
                )
        elif key not in merged or overwrite:
            merged[key] = column
    return merged


def _form(column: Any) -> str:
    if hasattr(column, "shape") and hasattr(column, "dtype"):
        return f"{str(column.dtype).removeprefix('torch.')}{[*column.shape]}"
    return type(column).__name__


def concat(
    parts: Sequence[tuple[Columns | None, Mapping[str, ObjectColumn]]],
) -> tuple[dict[str, Any] | None, dict[str, ObjectColumn]]:
    """Return tensor and other columns of all parts, row after row; order of columns as in the first part.

    Raises ``BatchError`` naming part and key when a part lacks a column or has one that does not fit.
    """
    check_same_keys("tensor column", [tensors for tensors, _ in parts])
    check_same_keys("non-tensor column", [others for _, others in parts])
    first, first_others = parts[0]
    joined: dict[str, Any] | None = None
    if first is not None:
        joined = {}
        if first:
            from rpcrl.batch import tensors as tensor_columns

            shared: dict[tuple[int, ...], Any] = {}
            for key in first:
                joined[key] = tensor_columns.join(key, [part[0][key] for part in parts if part[0]], shared)
    others = {key: objects.join(key, [part[1][key] for part in parts]) for key in first_others}
    return joined, others


def check_same_keys(kind: str, parts: Sequence[Columns | None]) -> None:
    """Raise ``BatchError`` naming part and key unless all parts have the first one's columns."""
    first = parts[0] or {}
    for number, part in enumerate(parts):
        if (part is None) == (parts[0] is None) and (part or {}).keys() == first.keys():
            continue
        missing = [key for key in first if key not in (part or {})]
        if missing:
            raise _lacks(kind, missing[0], number, 0)
        added = [key for key in part or {} if key not in first]
        if added:
            raise _lacks(kind, added[0], 0, number)


def _lacks(kind: str, key: str, lacking: int, having: int) -> BatchError:
    return BatchError(
        f"concat: part {lacking} has no {kind} {key!r}, but part {having} has one; give it to every part, "
        "or drop it "
        "with select before"
    )
