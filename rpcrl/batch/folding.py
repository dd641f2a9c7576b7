"""How do rows move into a second dimension, and columns into rows?

Shapes only: no value is dropped, added or reordered within its column.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from rpcrl.batch.joining import unknown
from rpcrl.errors import BatchError

if TYPE_CHECKING:
    from rpcrl.batch.data_proto import DataProto

__all__ = ["column_chunks", "fold_batch_dim", "unfold_batch_dim"]

Batch = TypeVar("Batch", bound="DataProto")


def fold_batch_dim(batch: Batch, new_batch_size: int) -> Batch:
    """Return a batch of ``new_batch_size`` rows, each of which holds a run of the old ones: [N, …] → [n, N / n, …].

    Raises ``BatchError`` when N is not a multiple of n, and for a jagged column.
    """
    rows = batch.check_consistency()
    if new_batch_size < 1 or rows % new_batch_size:
        raise BatchError(f"{rows} rows cannot be folded into {new_batch_size} rows of equally many")
    return _reshaped(batch, 1, (new_batch_size, rows // new_batch_size))


def unfold_batch_dim(batch: Batch, batch_dims: int = 2) -> Batch:
    """Return a batch whose rows are the first ``batch_dims`` dimensions of every column: [n, m, …] → [n·m, …].

    Undoes ``fold_batch_dim``. Raises ``BatchError`` naming the column that lacks the dimensions, or has others.
    """
    batch.check_consistency()
    if batch_dims < 1:
        raise BatchError(f"batch_dims is {batch_dims}; a batch has at least 1")
    leading: tuple[int, ...] | None = None
    for key, column in {**(batch._columns() or {}), **batch.non_tensor_batch}.items():
        shape = _shape(key, column)[:batch_dims]
        leading = shape if leading is None else leading
        if len(shape) < batch_dims or shape != leading:
            raise BatchError(
                f"column {key!r} begins with the dimensions {list(shape)}, but {batch_dims} batch dimensions are to "
                f"become rows, {list(leading)} of the first column; every column needs the same"
            )
    return _reshaped(batch, batch_dims, (len(batch) if leading is None else math.prod(leading),))


def _reshaped(batch: Batch, old_dims: int, new: tuple[int, ...]) -> Batch:
    def reshaped(key: str, column: Any) -> Any:
        return column.reshape(*new, *_shape(key, column)[old_dims:])

    columns = batch._columns()
    made = None if columns is None else {key: reshaped(key, column) for key, column in columns.items()}
    others = {key: reshaped(key, column) for key, column in batch.non_tensor_batch.items()}
    return type(batch)._make(new[0], made, others, batch.meta_info, batch._device)


def _shape(key: str, column: Any) -> tuple[int, ...]:
    if getattr(column, "is_nested", False):
        raise BatchError(f"column {key!r} is jagged and cannot be folded; pad its rows to a common length first")
    return tuple(getattr(column, "batch_size", None) or column.shape)


def column_chunks(
    tensors: Mapping[str, Any] | None, non_tensors: Mapping[str, Any], parts: int, keys: Sequence[str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the named columns with dimension 1 cut into ``parts`` rows: [N, L, …] → [N·parts, L / parts, …]."""
    made: tuple[dict[str, Any], dict[str, Any]] = ({}, {})
    for key in keys:
        is_tensor_column = key in (tensors or {})
        if not is_tensor_column and key not in non_tensors:
            raise unknown("column", key, [*(tensors or {}), *non_tensors])
        column = (tensors or {})[key] if is_tensor_column else non_tensors[key]
        shape = _shape(key, column)
        if len(shape) < 2 or parts < 1 or shape[1] % parts:
            raise BatchError(
                f"column {key!r} has the shape {list(shape)}: its dimension 1 cannot be cut into {parts} equal parts"
            )
        made[0 if is_tensor_column else 1][key] = column.reshape(shape[0] * parts, shape[1] // parts, *shape[2:])
    return made
