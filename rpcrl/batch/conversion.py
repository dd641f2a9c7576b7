"""How does a batch become a TensorDict, a list of rows or a text, and come back?"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rpcrl.batch.compare import shortened
from rpcrl.batch.meta import own
from rpcrl.batch.objects import ObjectColumn, object_column
from rpcrl.batch.rows import is_tensor
from rpcrl.errors import BatchError

if TYPE_CHECKING:
    from tensordict import TensorDict

__all__ = [
    "columns_of_rows",
    "columns_of_tensordict",
    "describe",
    "parts_of_tensordict",
    "rows_of_columns",
    "tensordict_of",
]


def columns_of_tensordict(tensordict: Any) -> tuple[int, dict[str, Any]]:
    """Return the number of rows and the columns of a TensorDict that holds tensors only."""
    rows, tensors, others, facts = parts_of_tensordict(tensordict)
    for key in [*others, *facts]:
        raise BatchError(f"{key!r} in batch is not a tensor; use DataProto.from_tensordict, or non_tensor_batch")
    return rows, tensors


def parts_of_tensordict(
    tensordict: Any,
) -> tuple[int, dict[str, Any], dict[str, ObjectColumn], dict[str, Any]]:
    """Return rows, tensor columns, columns of Python values (NonTensorStack) and facts (NonTensorData)."""
    from tensordict import NonTensorData, NonTensorStack, TensorDictBase

    if not isinstance(tensordict, TensorDictBase):
        raise BatchError(
            f"batch is of type {type(tensordict).__name__}; expected a TensorDict or None "
            "(DataProto.from_dict takes a dict of tensors)"
        )
    if tensordict.batch_dims != 1:
        raise BatchError(
            "a batch has exactly one batch dimension, this TensorDict has batch_size "
            f"{list(tensordict.batch_size)}; "
            "flatten it with reshape(-1), or give it batch_size=[rows]"
        )
    tensors: dict[str, Any] = {}
    others: dict[str, ObjectColumn] = {}
    facts: dict[str, Any] = {}
    for key, value in tensordict.items():
        if isinstance(value, NonTensorStack):
            others[key] = object_column(value.tolist())
        elif isinstance(value, NonTensorData):
            facts[key] = value.data
        else:
            tensors[key] = value
    return int(tensordict.batch_size[0]), tensors, others, facts


def tensordict_of(
    tensors: Mapping[str, Any], non_tensors: Mapping[str, ObjectColumn], facts: Mapping[str, Any], rows: int
) -> TensorDict:
    """Return one TensorDict of everything; raises ``BatchError`` for a name that occurs twice."""
    from tensordict import NonTensorData, NonTensorStack, TensorDict

    contents = dict(tensors)
    for key in [*non_tensors, *facts]:
        if key in contents:
            raise BatchError(f"{key!r} is the name of two entries of the batch; a TensorDict has one, so rename one")
        if key in non_tensors:
            entries = [NonTensorData(entry, batch_size=[]) for entry in non_tensors[key]]
            # A stack of no entries cannot be made directly, only cut out of a longer one.
            contents[key] = NonTensorStack(*entries) if entries else NonTensorStack(NonTensorData(None))[:0]
        else:
            contents[key] = NonTensorData(own(facts[key]), batch_size=[rows])
    return TensorDict(contents, batch_size=[rows])


def columns_of_rows(rows: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any], dict[str, ObjectColumn]]:
    """Return tensor columns and other columns of one dict per row; raises ``BatchError`` when their keys
    differ.
    """
    if not rows:
        return {}, {}
    first = rows[0]
    for number, row in enumerate(rows):
        if row.keys() != first.keys():
            different = sorted(str(key) for key in row.keys() ^ first.keys())
            raise BatchError(f"rows have the same keys; row 0 and row {number} differ in {', '.join(different)}")
    tensors: dict[str, Any] = {}
    others: dict[str, ObjectColumn] = {}
    for key in first:
        values = [row[key] for row in rows]
        column = None
        if all(is_tensor(value) for value in values):
            from rpcrl.batch.tensors import stack

            column = stack(key, values)
        if column is None:
            others[key] = object_column(values)
        else:
            tensors[key] = column
    return tensors, others


def rows_of_columns(
    tensors: Mapping[str, Any], non_tensors: Mapping[str, ObjectColumn], rows: int
) -> list[dict[str, Any]]:
    """Return one dict per row."""
    columns: dict[str, Iterable[Any]] = {key: column.unbind(0) for key, column in tensors.items()}
    columns |= non_tensors
    unpacked = {key: list(column) for key, column in columns.items()}
    return [{key: column[row] for key, column in unpacked.items()} for row in range(rows)]


def describe(data: Any, tensors: Mapping[str, Any] | None, *, long: bool) -> str:
    """Return a text about a batch: one line of names and shapes, or with ``long`` one line per entry."""
    shapes: dict[str, str] = {}
    if tensors:
        from rpcrl.batch.tensors import describe as describe_tensor

        shapes = {key: describe_tensor(column) for key, column in tensors.items()}
    if not long:
        batch = "none" if tensors is None else _listed([f"{key} {shape}" for key, shape in shapes.items()])
        others, facts = _listed(list(data.non_tensor_batch)), _listed(list(data.meta_info))
        return f"{type(data).__name__}({len(data)} rows; batch: {batch}; non_tensor: {others}; meta: {facts})"
    lines = [f"{type(data).__name__} of {len(data)} rows"]
    for key, column in (tensors or {}).items():
        lines.append(f"  batch[{key!r}]: {shapes[key]} on {getattr(column, 'device', None)}")
    for key, values in data.non_tensor_batch.items():
        kinds = sorted({type(value).__name__ for value in values.ravel()})
        lines.append(
            f"  non_tensor_batch[{key!r}]: {values.dtype}{list(values.shape)} of {' | '.join(kinds) or 'nothing'}"
        )
    for key, value in data.meta_info.items():
        lines.append(f"  meta_info[{key!r}]: {type(value).__name__} {shortened(value)}")
    return "\n".join(lines)


def _listed(names: Sequence[str], limit: int = 8) -> str:
    more = f", … {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more or "none"
