"""How does a column of Python values keep one entry per row?

A column is a numpy array whose first dimension counts the rows, as a rule of dtype object. numpy likes to
look into lists and to widen types; these functions never let it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from rpcrl.batch.rows import is_tensor
from rpcrl.errors import BatchError

__all__ = ["ObjectColumn", "as_column", "join", "object_column"]

ObjectColumn = npt.NDArray[Any]


def object_column(values: Sequence[Any]) -> ObjectColumn:
    """Return a one-dimensional object array of the values; nested lists, arrays and tensors stay single
    entries.
    """
    return np.fromiter(values, dtype=object, count=len(values))


def as_column(key: str, value: object) -> ObjectColumn:
    """Return a value as a column: arrays as they are, lists and tuples as one entry per row.

    Raises ``BatchError`` for anything else, and for an array without a row dimension.
    """
    if isinstance(value, np.ndarray):
        if value.ndim == 0:
            raise BatchError(
                f"non-tensor column {key!r} is an array without rows; put a value of the whole batch in meta_info"
            )
        return value
    if isinstance(value, list | tuple):
        return object_column(value)
    if is_tensor(value):
        raise BatchError(f"non-tensor column {key!r} is a tensor; put it among the tensors, or give a list of tensors")
    raise BatchError(
        f"non-tensor column {key!r} is of type {type(value).__name__}; expected an array, list or tuple "
        "with one "
        "entry per row (put a value of the whole batch in meta_info)"
    )


def join(key: str, columns: Sequence[ObjectColumn]) -> ObjectColumn:
    """Return the columns one after the other; of different dtypes they become objects, never other values."""
    if len(columns) == 1:
        return columns[0]
    first = columns[0]
    for part, column in enumerate(columns):
        if column.shape[1:] != first.shape[1:]:
            raise BatchError(
                f"non-tensor column {key!r} cannot be joined: part 0 has shape {first.shape}, part {part} "
                "has "
                f"{column.shape}; make it a one-dimensional object array with one entry per row"
            )
    kinds = {column.dtype if column.dtype.kind not in "US" else column.dtype.kind for column in columns}
    if len(kinds) > 1:  # numpy would turn 1 and "a" into "1" and "a"
        columns = [column.astype(object) for column in columns]
    return np.concatenate(columns)
