"""What must a batch offer so that a call can be split over workers?

``len``, ``chunk`` and ``concat``: a user's own type needs no base class. TensorDict lacks ``concat`` and
balanced chunks, so ``chunk`` and ``concat`` of this module serve it too.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, Self, runtime_checkable

import numpy as np

from rpcrl.batch.merging import MergeRule, merge_values
from rpcrl.batch.rows import Index, bounds
from rpcrl.errors import BatchError

__all__ = ["Splittable", "bounds", "chunk", "concat", "cut", "is_splittable", "pad"]


@runtime_checkable
class Splittable(Protocol):
    """A batch of rows that can be cut into parts and put together again."""

    def __len__(self) -> int:
        """Return the number of rows."""
        ...

    def chunk(self, chunks: int, *, uneven: bool = False) -> Sequence[Self]:
        """Return exactly ``chunks`` parts in order: equal ones, or with ``uneven`` of sizes that differ by at
        most 1.
        """
        ...

    @staticmethod
    def concat(data: Sequence[Any]) -> Any:
        """Return the rows of all parts in order."""
        ...


def is_splittable(value: object) -> bool:
    """Tell whether ``chunk`` and ``concat`` work on a value."""
    return isinstance(value, Splittable) or _is_tensordict(value)


def chunk(value: Any, parts: int, *, uneven: bool = False) -> list[Any]:
    """Return ``parts`` parts of a batch in order; raises ``BatchError`` when they cannot be equal."""
    if not _is_tensordict(value):
        if not isinstance(value, Splittable):
            raise _not_splittable(value)
        # A user's own type may know equal parts only.
        return list(value.chunk(parts, uneven=True) if uneven else value.chunk(parts))
    if value.batch_dims < 1:
        raise BatchError("a TensorDict without a batch dimension cannot be cut; give it batch_size=[rows]")
    return [_cut_tensordict(value, start, stop) for start, stop in bounds(len(value), parts, uneven=uneven)]


def cut(value: Any, start: int, stop: int) -> Any:
    """Return rows ``start`` to ``stop`` of a batch, in a batch; of a user's own type by its slices."""
    if _is_tensordict(value):
        return _cut_tensordict(value, start, stop)
    return value[start:stop]


def pad(value: Any, num_rows: int) -> Any:
    """Return a batch of ``num_rows`` rows: its own, and then its own again from the first on, over and over.

    Raises ``BatchError`` for a batch without rows.
    """
    rows = len(value)
    if not rows:
        raise BatchError(f"a batch without rows cannot be padded to {num_rows}: there is no row to repeat")
    if _is_tensordict(value):
        return _take_tensordict(value, np.arange(num_rows, dtype=np.int64) % rows)
    if _keeps_facts(value):  # concat would merge its meta_info
        return value.select_idxs(np.arange(num_rows, dtype=np.int64) % rows)
    whole, left = divmod(num_rows, rows)
    return concat([value] * whole + ([value[:left]] if left else []))


def concat(
    parts: Sequence[Any],
    *,
    merge: Mapping[str, MergeRule] | None = None,
    weights: Sequence[float] | None = None,
) -> Any:
    """Return the rows of all parts in order; parts are of one type.

    What is said of a part as a whole (meta_info; NonTensorData of a TensorDict) must agree, or is merged by the rule
    for its name; see ``DataProto.concat``. Raises ``BatchError`` when parts do not fit.
    """
    if not parts:
        raise BatchError("nothing to concatenate: the list of batches is empty")
    first = parts[0]
    for number, part in enumerate(parts):
        if type(part) is not type(first):
            raise BatchError(
                f"concat: part 0 is a {type(first).__name__}, part {number} a {type(part).__name__}; "
                "return one type "
                "from every rank"
            )
    if not _is_tensordict(first):
        if not isinstance(first, Splittable):
            raise _not_splittable(first)
        if _keeps_facts(first):
            whole: Any = type(first)
            return whole.concat(parts, merge=merge, weights=weights)
        if merge:
            raise BatchError(
                f"the rules {dict(merge)} merge facts of a DataProto or a TensorDict; a {type(first).__name__} merges "
                "its own in concat"
            )
        return type(first).concat(parts)
    return _concat_tensordicts(parts, merge or {}, weights)


def _not_splittable(value: object) -> BatchError:
    return BatchError(
        f"{type(value).__name__} cannot be split over workers: it needs __len__, chunk(n) and "
        "concat(parts); pass a "
        "DataProto or a TensorDict, or a dispatch mode that sends the value whole"
    )


def _keeps_facts(value: object) -> bool:
    """Tell whether a batch has a meta_info whose merging it can be told: a DataProto, or a reference to one."""
    homes = (("rpcrl.batch.data_proto", "DataProto"), ("rpcrl.batch.reference", "BatchRef"))
    kinds = (getattr(sys.modules.get(module), name, None) for module, name in homes)
    return any(kind is not None and isinstance(value, kind) for kind in kinds)


def _is_tensordict(value: object) -> bool:
    base = getattr(sys.modules.get("tensordict"), "TensorDictBase", None)
    return base is not None and isinstance(value, base)


def _cut_tensordict(value: Any, start: int, stop: int) -> Any:
    from tensordict import TensorDict

    from rpcrl.batch import tensors

    columns = tensors.cut(dict(value.items()), start, stop)
    return TensorDict(columns, batch_size=[stop - start, *value.batch_size[1:]], device=value.device)


def _take_tensordict(value: Any, index: Index) -> Any:
    from tensordict import NonTensorData, TensorDict

    from rpcrl.batch import tensors

    entries = dict(value.items())
    facts = {
        key: NonTensorData(entry.data, batch_size=[len(index)])
        for key, entry in entries.items()
        if isinstance(entry, NonTensorData)
    }
    columns = tensors.take({key: entry for key, entry in entries.items() if key not in facts}, index)
    made = {key: facts.get(key, columns.get(key)) for key in entries}
    return TensorDict(made, batch_size=[len(index), *value.batch_size[1:]], device=value.device)


def _concat_tensordicts(parts: Sequence[Any], merge: Mapping[str, MergeRule], weights: Sequence[float] | None) -> Any:
    from tensordict import NonTensorData, TensorDict

    from rpcrl.batch import joining, tensors

    columns = [dict(part.items()) for part in parts]
    joining.check_same_keys("entry", columns)
    counts = [len(part) for part in parts]
    rows = sum(counts)
    shared: dict[tuple[int, ...], Any] = {}
    joined: dict[str, Any] = {}
    for key in columns[0]:
        entries = [part[key] for part in columns]
        if all(isinstance(entry, NonTensorData) for entry in entries):  # said of the whole batch
            said = {number: [entry.data] for number, entry in enumerate(entries)}
            rule = merge.get(key, "first_equal")
            fact = merge_values(f"entry {key!r}", rule, said, counts if weights is None else weights)
            joined[key] = NonTensorData(fact, batch_size=[rows])
        else:
            joined[key] = tensors.join(key, entries, shared)
    return TensorDict(joined, batch_size=[rows, *parts[0].batch_size[1:]], device=parts[0].device)
