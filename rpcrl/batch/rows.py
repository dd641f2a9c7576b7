"""Which rows does an index name, and where is a batch cut into parts?

Everything here works on row numbers alone: plain integers and one-dimensional int64 arrays.
"""

from __future__ import annotations

import itertools
import operator
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from rpcrl.errors import BatchError

__all__ = ["Index", "RowIndexError", "as_row", "bounds", "is_tensor", "repeat_counts", "row_index"]

Index = npt.NDArray[np.int64]
"""Row numbers, each in ``[0, rows)``."""


class RowIndexError(BatchError, IndexError):
    """A row number is outside of the batch; also an IndexError, so that Python's own loops over rows end."""


def is_tensor(value: object) -> bool:
    """Tell whether a value is a torch tensor, without loading torch: before that, nobody has one."""
    tensor = getattr(sys.modules.get("torch"), "Tensor", None)
    return tensor is not None and isinstance(value, tensor)


def as_row(value: Any) -> int | None:
    """Return the row number that a scalar index names, or None when the index is not a scalar integer."""
    if isinstance(value, bool | np.bool_):
        raise BatchError("True and False name no row; use 0 or 1, or a mask with one entry per row")
    if getattr(value, "ndim", 0) != 0 or isinstance(value, str):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def row_index(value: Any, rows: int) -> Index:
    """Return row numbers for a list, array or tensor of integers, or for a mask with one entry per row.

    Negative numbers count from the end. Raises ``RowIndexError`` for a row outside of the batch,
    ``BatchError`` for a mask of another length or an index of another type. The result is a new array.
    """
    array = _flat_array(value)
    if array.dtype == np.bool_:
        if len(array) != rows:
            raise BatchError(f"the mask has {len(array)} entries but the batch has {rows} rows; give one entry per row")
        return np.flatnonzero(array).astype(np.int64, copy=False)
    if array.size == 0:
        return np.empty(0, dtype=np.int64)
    if array.dtype.kind not in "iu":
        raise BatchError(f"rows are named by integers or a mask, not by {array.dtype} values; convert the index first")
    index: Index = np.array(array, dtype=np.int64)
    low, high = int(index.min()), int(index.max())
    if low < -rows or high >= rows:
        worst = high if high >= rows else low
        raise RowIndexError(f"row {worst} does not exist: the batch has {rows} rows (0 to {rows - 1})")
    if low < 0:
        index[index < 0] += rows
    return index


def _flat_array(value: Any) -> npt.NDArray[Any]:
    if is_tensor(value):
        value = value.detach().cpu().numpy()
    elif not isinstance(value, list | range | np.ndarray):
        raise BatchError(
            f"a batch is not indexed by {type(value).__name__}; use an int, a slice, or a list, array or "
            "tensor of "
            "row numbers or of one bool per row (a column is read as batch.batch[key] or "
            "batch.non_tensor_batch[key])"
        )
    try:
        array = np.asarray(value)
    except ValueError as error:  # a ragged list
        raise BatchError(f"the list of rows is not flat: {error}") from None
    if array.ndim != 1:
        raise BatchError(f"the index has shape {array.shape}; rows are named by a one-dimensional index")
    return array


def repeat_counts(value: Any, rows: int) -> Index:
    """Return how often each row is repeated, from a tuple, list, array or tensor with one count per row."""
    array = _flat_array(list(value) if isinstance(value, tuple) else value)
    if len(array) != rows:
        raise BatchError(f"{len(array)} repeat counts for {rows} rows; give one count per row")
    if array.size and (array.dtype.kind not in "iu" or int(array.min()) < 0):
        raise BatchError("repeat counts are integers of at least 0")
    return array.astype(np.int64)


def bounds(rows: int, parts: int, *, uneven: bool = False) -> Sequence[tuple[int, int]]:
    """Return ``parts`` pairs ``(start, stop)`` that cut ``rows`` rows in order.

    Sizes are equal, or with ``uneven`` differ by at most one, larger parts first; parts may be empty then.
    Raises ``BatchError`` when the rows cannot be cut equally and ``uneven`` is not given.
    """
    if parts < 1:
        raise BatchError(f"a batch is cut into at least 1 part, not {parts}")
    size, left = divmod(rows, parts)
    if left and not uneven:
        raise BatchError(
            f"{rows} rows cannot be cut into {parts} equal parts: {rows} / {parts} leaves {left} over; "
            f"pad with pad_to_multiple(batch, {parts}) or allow parts of {size} and {size + 1} rows with "
            "uneven=True"
        )
    cuts = [number * size + min(number, left) for number in range(parts + 1)]
    return list(itertools.pairwise(cuts))
