"""What does a worker keep for others? Results of its methods, until their caller lets go of them.

It is served beside the roles, by a thread of its own: rows can be read while a method runs.
"""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from rpcrl.dispatch.register import register
from rpcrl.errors import UsageError

__all__ = ["STORE", "Store", "is_keepable", "num_bytes"]

STORE = "_store"
"""The role under which a store is called."""


@dataclass(frozen=True)
class _Kept:
    batch: Any
    owner: str


class Store:
    """Batches by number. Thread-safe."""

    def __init__(self) -> None:
        self._kept: dict[int, _Kept] = {}
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()

    def keep(self, value: Any, owner: str) -> tuple[int, dict[str, Any]]:
        """Keep a copy of a batch for ``owner``; returns its number and what it looks like.

        Raises UsageError for what is no DataProto and no TensorDict.
        """
        from rpcrl.batch.data_proto import DataProto
        from rpcrl.batch.reference import schema_of

        if not is_keepable(value):
            raise UsageError(
                f"a result that stays on its worker (returns='ref') is a DataProto or a TensorDict, not a "
                f"{type(value).__name__}"
            )
        batch = value if isinstance(value, DataProto) else DataProto.from_tensordict(value)
        # The method may change its tensors in the next call; what was returned stays as it was.
        kept = batch.select(deepcopy=True)
        with self._lock:
            number = next(self._numbers)
            self._kept[number] = _Kept(kept, owner)
        look = {
            "columns": {name: tuple(column) for name, column in schema_of(kept).items()},
            "rows": len(kept),
            "meta_info": kept.meta_info,
            "tensordict": not isinstance(value, DataProto),
        }
        return number, look

    @register
    def read(self, key: int, rows: Any, names: tuple[str, ...]) -> Any:
        """Return rows ([num_rows] numbers) and columns of a kept batch. Raises UsageError if it was let go."""
        import numpy as np

        with self._lock:
            kept = self._kept.get(key)
        if kept is None:
            raise UsageError(
                f"result {key} is not kept here any more: its caller has let go of it. Hold the BatchRef (or its "
                "Future) as long as somebody reads the rows"
            )
        batch = kept.batch
        tensors = [name for name in names if name not in batch.non_tensor_batch]
        picked = batch.select(tensors, [name for name in names if name in batch.non_tensor_batch], [])
        start = int(rows[0]) if len(rows) else 0
        if np.array_equal(rows, np.arange(start, start + len(rows))):
            return picked[start : start + len(rows)]
        return picked.select_idxs(rows)

    @register
    def num_kept(self) -> int:
        """Return how many results are kept."""
        with self._lock:
            return len(self._kept)

    def free(self, keys: Iterable[int]) -> None:
        """Let go of results; numbers that are not kept do no harm."""
        with self._lock:
            for key in keys:
                self._kept.pop(key, None)

    def forget(self, owner: str) -> None:
        """Let go of everything that is kept for a caller that is gone."""
        with self._lock:
            for key in [key for key, kept in self._kept.items() if kept.owner == owner]:
                del self._kept[key]


def is_keepable(value: object) -> bool:
    """Tell whether a result can be kept, without loading what nobody has loaded."""
    kinds = (("rpcrl.batch.data_proto", "DataProto"), ("tensordict", "TensorDictBase"))
    known = (getattr(sys.modules.get(module), name, None) for module, name in kinds)
    return any(kind is not None and isinstance(value, kind) for kind in known)


def num_bytes(value: Any) -> int:
    """Return the bytes of a batch: of its tensors and arrays; Python values count a few each."""
    from rpcrl.batch import tensors
    from rpcrl.batch.data_proto import DataProto

    batch = value if isinstance(value, DataProto) else DataProto.from_tensordict(value)
    columns = batch._columns()
    others = sum(column.nbytes for column in batch.non_tensor_batch.values())
    return others + (tensors.num_bytes(columns) if columns else 0)
