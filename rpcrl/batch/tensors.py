"""How are rows taken from, cut out of and joined in tensor columns?

Three kinds of column: dense tensors, jagged nested tensors, and nested TensorDicts. Functions take all
columns of a batch at once, because jagged columns that share their offsets must share them afterwards too:
torch compares ragged sizes by the identity of the offsets, and ``mask * values`` fails when they are only
equal.

This module loads torch; import it only where a tensor is at hand.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from rpcrl.batch.rows import Index
from rpcrl.errors import BatchError

__all__ = ["TensorColumns", "check", "cut", "describe", "jagged_parts", "join", "move", "num_bytes", "stack", "take"]

TensorColumns = dict[str, Any]
"""Columns by name: tensors, or nested TensorDicts, whose first dimension counts the rows."""

_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
"""torch selects no rows of these unsigned types; their signed twins have the same bytes."""

_HUGE_PAGES_BYTES = 4 << 20
"""From this size on numpy asks for huge pages."""

_Shared = dict[tuple[int, ...], torch.Tensor]
"""New offsets of one operation, by the identity of the old ones."""


def check(key: str, column: Any) -> int:
    """Return the number of rows of a column; raises ``BatchError`` when it is no column."""
    if isinstance(column, torch.Tensor):
        if column.ndim == 0:
            raise BatchError(f"tensor column {key!r} is a scalar and has no rows; put it in meta_info")
        if column.is_nested and column.layout is not torch.jagged:
            raise BatchError(
                f"tensor column {key!r} is a nested tensor of layout {column.layout}; use layout=torch.jagged"
            )
        return int(column.shape[0])
    sizes = getattr(column, "batch_size", None)
    if sizes is None or not hasattr(column, "keys"):
        raise BatchError(
            f"tensor column {key!r} is of type {type(column).__name__}; expected a torch.Tensor (arrays "
            "and lists "
            "belong among the non-tensors)"
        )
    if len(sizes) == 0:
        raise BatchError(f"tensor column {key!r} is a TensorDict without a batch dimension")
    return int(sizes[0])


def describe(column: Any) -> str:
    """Return dtype and shape in one word or two, e.g. ``int64[8, 16]`` or ``float32[8, *] jagged``."""
    if not isinstance(column, torch.Tensor):
        return f"TensorDict[{', '.join(str(size) for size in column.batch_size)}]"
    dtype = str(column.dtype).removeprefix("torch.")
    if column.is_nested:
        sizes = ["*" if not isinstance(size, int) else str(size) for size in column.shape]
        return f"{dtype}[{', '.join(sizes)}] jagged"
    return f"{dtype}{list(column.shape)}"


def num_bytes(columns: Mapping[str, Any]) -> int:
    """Return the bytes of all columns: of a jagged one its values and offsets."""
    total = 0
    for column in columns.values():
        if not isinstance(column, torch.Tensor):
            total += num_bytes(dict(column.items()))
        elif column.is_nested:
            values, offsets, _, _ = jagged_parts(column)
            total += values.nbytes + offsets.nbytes
        else:
            total += column.nbytes
    return total


def take(columns: Mapping[str, Any], index: Index) -> TensorColumns:
    """Return the rows that ``index`` names, as new tensors on the columns' devices."""
    rows = torch.from_numpy(index)
    by_device: dict[torch.device, torch.Tensor] = {}
    shared: _Shared = {}
    taken: TensorColumns = {}
    for key, column in columns.items():
        device = getattr(column, "device", None) or rows.device
        here = by_device.get(device)
        if here is None:
            here = by_device[device] = rows.to(device)
        if not isinstance(column, torch.Tensor):
            taken[key] = column[here]
        elif column.is_nested:
            taken[key] = _take_jagged(column, here, shared)
        else:
            taken[key] = _select(column, 0, here)
    return taken


def _select(tensor: torch.Tensor, dim: int, index: torch.Tensor) -> torch.Tensor:
    signed = _SIGNED.get(tensor.dtype)
    if signed is None:
        return tensor.index_select(dim, index)
    return tensor.view(signed).index_select(dim, index).view(tensor.dtype)


def cut(columns: Mapping[str, Any], start: int, stop: int) -> TensorColumns:
    """Return rows ``start`` to ``stop`` as views of the columns (of a jagged one: of its values)."""
    shared: _Shared = {}
    return {
        key: _cut_jagged(column, start, stop, shared)
        if isinstance(column, torch.Tensor) and column.is_nested
        else column[start:stop]
        for key, column in columns.items()
    }


def move(columns: Mapping[str, Any], device: Any) -> TensorColumns:
    """Return the columns on another device."""
    shared: _Shared = {}
    moved: TensorColumns = {}
    for key, column in columns.items():
        if isinstance(column, torch.Tensor) and column.is_nested and column.device != torch.device(device):
            values, offsets, _, dim = jagged_parts(column)
            there = _once(shared, _identity(column), partial(offsets.to, device))
            moved[key] = _jagged(values.to(device), there, dim)
        else:
            moved[key] = column.to(device)
    return moved


def join(key: str, parts: Sequence[Any], shared: _Shared) -> Any:
    """Return the parts of one column one after the other.

    ``shared`` is one dict for all columns of an operation. Raises ``BatchError`` naming the first part that
    does not fit: another kind, dtype, device or shape of a row.
    """
    first = parts[0]
    if len(parts) == 1:
        return first
    if not isinstance(first, torch.Tensor):
        return torch.cat(list(parts))
    _check_joinable(key, parts)
    if not first.is_nested:
        return _cat(list(parts))
    pieces = [jagged_parts(part) for part in parts]
    dim = pieces[0][3]
    for number, piece in enumerate(pieces):
        if piece[3] != dim:
            raise BatchError(
                f"tensor column {key!r} cannot be joined: part 0 is ragged in dimension {dim}, part "
                f"{number} in "
                f"dimension {piece[3]}"
            )
    values = _cat([piece[0] for piece in pieces], dim=dim - 1)

    def joined_offsets() -> torch.Tensor:
        return _offsets(torch.cat([piece[1].diff() for piece in pieces]))

    identity = tuple(number for part in parts for number in _identity(part))
    return _jagged(values, _once(shared, identity, joined_offsets), dim)


def _cat(parts: list[torch.Tensor], dim: int = 0) -> torch.Tensor:
    """Return ``torch.cat``; a large result lies in memory that numpy took, which asks the system for huge pages.

    Taking new memory in small pages costs four times what the copy itself does.
    """
    size = sum(part.numel() * part.element_size() for part in parts)
    if size < _HUGE_PAGES_BYTES or any(not _is_plain(part) for part in parts):
        return torch.cat(parts, dim=dim)
    shape = [*parts[0].shape]
    shape[dim] = sum(part.shape[dim] for part in parts)
    memory = torch.from_numpy(np.empty(size, np.uint8)).view(parts[0].dtype).reshape(shape)
    return torch.cat(parts, dim=dim, out=memory)


def _is_plain(part: torch.Tensor) -> bool:
    return type(part) is torch.Tensor and part.is_cpu and part.layout is torch.strided and not part.requires_grad


def _check_joinable(key: str, parts: Sequence[Any]) -> None:
    first = parts[0]
    nested, rank, shape = first.is_nested, first.ndim, first.shape[1:]
    for number, part in enumerate(parts):
        fits = (
            isinstance(part, torch.Tensor)
            and part.is_nested == nested
            and part.dtype == first.dtype
            and part.device == first.device
            and part.ndim == rank
            and (nested or part.shape[1:] == shape)
        )
        if not fits:
            place = f" on {first.device} and {part.device}" if part.device != first.device else ""
            raise BatchError(
                f"tensor column {key!r} cannot be joined: part 0 has {describe(first)}, part {number} has "
                f"{describe(part)}{place}; rows need one dtype, device and shape (pad responses to a "
                "common length)"
            )


def stack(key: str, rows: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Return single rows as one column: dense when their shapes agree, jagged when one dimension differs,
    else None.
    """
    first = rows[0]
    if any(row.dtype != first.dtype or row.ndim != first.ndim or row.is_nested for row in rows):
        return None
    shapes = np.array([row.shape for row in rows], dtype=np.int64).reshape(len(rows), first.ndim)
    ragged = np.flatnonzero((shapes != shapes[0]).any(axis=0))
    if ragged.size == 0:
        return torch.stack(list(rows))
    if ragged.size > 1:
        return None
    dim = int(ragged[0])
    lengths = torch.from_numpy(shapes[:, dim].copy()).to(first.device)
    return _jagged(torch.cat(list(rows), dim=dim), _offsets(lengths), dim + 1)


def jagged_parts(column: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
    """Return values, offsets [rows + 1], lengths [rows] and the ragged dimension (the rows' one is 0).

    A column with holes between its rows is compacted first.
    """
    dim = int(column._ragged_idx)
    if column.lengths() is not None:
        everything = torch.arange(column.shape[0], device=column.device)
        column = _take_jagged(column, everything, {})
    offsets = column.offsets()
    return column.values(), offsets, offsets.diff(), dim


def _take_jagged(column: Any, index: torch.Tensor, shared: _Shared) -> torch.Tensor:
    dim = int(column._ragged_idx)
    starts = column.offsets()[:-1][index]
    lengths = column.lengths()
    lengths = (column.offsets().diff() if lengths is None else lengths)[index]
    offsets = _once(shared, _identity(column), lambda: _offsets(lengths))
    # Position of every value that is kept: each row's run begins at its old start instead of its new one.
    runs = torch.repeat_interleave(starts - offsets[:-1], lengths)
    positions = torch.arange(runs.shape[0], device=runs.device) + runs
    return _jagged(_select(column.values(), dim - 1, positions), offsets, dim)


def _cut_jagged(column: Any, start: int, stop: int, shared: _Shared) -> torch.Tensor:
    if column.lengths() is not None:
        return _take_jagged(column, torch.arange(start, max(start, stop), device=column.device), shared)
    dim = int(column._ragged_idx)
    offsets = column.offsets()
    stop = max(start, stop)
    low, high = int(offsets[start]), int(offsets[stop])
    kept = _once(shared, _identity(column), lambda: offsets[start : stop + 1] - low)
    return _jagged(column.values().narrow(dim - 1, low, high - low), kept, dim)


def _identity(column: Any) -> tuple[int, ...]:
    return id(column.offsets()), id(column.lengths())


def _once(shared: _Shared, identity: tuple[int, ...], make: Any) -> torch.Tensor:
    if identity not in shared:
        shared[identity] = make()
    return shared[identity]


def _offsets(lengths: torch.Tensor) -> torch.Tensor:
    zero = torch.zeros(1, dtype=lengths.dtype, device=lengths.device)
    return torch.cat([zero, lengths.cumsum(0)])


def _jagged(values: torch.Tensor, offsets: torch.Tensor, dim: int) -> torch.Tensor:
    made: torch.Tensor = torch.nested.nested_tensor_from_jagged(values, offsets, jagged_dim=dim)
    return made
