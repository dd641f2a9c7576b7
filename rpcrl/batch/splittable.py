"""What must a batch offer so that a call can be split over workers?

``len``, ``chunk`` and ``concat``: a user's own type needs no base class. TensorDict lacks ``concat`` and
balanced chunks, so ``chunk`` and ``concat`` of this module serve it too.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, Protocol, Self, runtime_checkable

from rpcrl.batch.rows import bounds
from rpcrl.errors import BatchError

__all__ = ["Splittable", "bounds", "chunk", "concat", "is_splittable"]


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


def concat(parts: Sequence[Any]) -> Any:
    """Return the rows of all parts in order; parts are of one type. Raises ``BatchError`` when they do not
    fit.
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
        return type(first).concat(parts)
    return _concat_tensordicts(parts)


def _not_splittable(value: object) -> BatchError:
    return BatchError(
        f"{type(value).__name__} cannot be split over workers: it needs __len__, chunk(n) and "
        "concat(parts); pass a "
        "DataProto or a TensorDict, or a dispatch mode that sends the value whole"
    )


def _is_tensordict(value: object) -> bool:
    base = getattr(sys.modules.get("tensordict"), "TensorDictBase", None)
    return base is not None and isinstance(value, base)


def _cut_tensordict(value: Any, start: int, stop: int) -> Any:
    from tensordict import TensorDict

    from rpcrl.batch import tensors

    columns = tensors.cut(dict(value.items()), start, stop)
    return TensorDict(columns, batch_size=[stop - start, *value.batch_size[1:]], device=value.device)


def _concat_tensordicts(parts: Sequence[Any]) -> Any:
    from tensordict import NonTensorData, TensorDict

    from rpcrl.batch import joining, tensors

    columns = [dict(part.items()) for part in parts]
    joining.check_same_keys("entry", columns)
    rows = sum(len(part) for part in parts)
    shared: dict[tuple[int, ...], Any] = {}
    joined: dict[str, Any] = {}
    for key, value in columns[0].items():
        if isinstance(value, NonTensorData):  # said of the whole batch; the first part's counts
            joined[key] = NonTensorData(value.data, batch_size=[rows])
        else:
            joined[key] = tensors.join(key, [part[key] for part in columns], shared)
    return TensorDict(joined, batch_size=[rows, *parts[0].batch_size[1:]], device=parts[0].device)
