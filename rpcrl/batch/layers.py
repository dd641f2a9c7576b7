"""How is it written down where the rows of a reference are? In layers: columns that were made together.

A layer says for every row which source has it, and where. A source is a result that a worker keeps, or a batch that
came along with the reference.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from rpcrl.batch.data_proto import DataProto
from rpcrl.batch.rows import Index

__all__ = ["Column", "Held", "Layer", "Stored", "aligned", "in_order", "joined", "named", "schema_of"]


class Column(NamedTuple):
    """What a column holds."""

    kind: str
    """``tensor``, or ``object`` for Python values."""
    dtype: str
    row_shape: tuple[int, ...] | None
    """Shape of one row; None where rows differ or are Python values."""


@dataclass(frozen=True)
class Stored:
    """One result that a worker keeps."""

    group: str
    identity: str
    rank: int
    key: int
    num_rows: int


class Held(Protocol):
    """Keeps one stored result stored, as long as it lives."""

    @property
    def identity(self) -> str:
        """The worker that keeps it."""
        ...

    @property
    def key(self) -> int:
        """Its number there."""
        ...


Numbers = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Layer:
    """Columns that were made together, and where their rows are."""

    columns: Mapping[str, Column]
    sources: tuple[Stored | DataProto, ...]
    source_of: Numbers
    """[rows]: which source has the row."""
    row_of: Index
    """[rows]: where it stands there."""
    leases: tuple[Held, ...] = field(default=(), compare=False)
    """What keeps the stored results stored, in the process that called for them."""

    def take(self, index: Index | slice) -> Layer:
        """Return the layer with the rows of an index."""
        taken = replace(self, source_of=self.source_of[index], row_of=self.row_of[index])
        return taken if len(self.sources) == 1 else taken.compacted()

    def compacted(self) -> Layer:
        """Return the layer without the sources that none of its rows is in, and without their leases."""
        used = np.flatnonzero(np.bincount(self.source_of, minlength=1))
        if not len(used):
            used = np.zeros(1, np.int64)  # something must tell what an empty batch looks like
        if len(used) == len(self.sources):
            return self
        renumbered = np.zeros(len(self.sources), np.int32)
        renumbered[used] = np.arange(len(used), dtype=np.int32)
        sources = tuple(self.sources[number] for number in used)
        kept = {(source.identity, source.key) for source in sources if isinstance(source, Stored)}
        leases = tuple(lease for lease in self.leases if (lease.identity, lease.key) in kept)
        return replace(self, sources=sources, source_of=renumbered[self.source_of], leases=leases)

    def only(self, names: Mapping[str, str]) -> Layer:
        """Return the layer with the columns that are named."""
        return replace(self, columns={name: column for name, column in self.columns.items() if name in names})


def schema_of(batch: DataProto) -> dict[str, Column]:
    """Return what each column of a batch holds."""
    columns: dict[str, Column] = {}
    for name, tensor in (batch._columns() or {}).items():
        shape = None if getattr(tensor, "is_nested", False) or not hasattr(tensor, "dtype") else tuple(tensor.shape[1:])
        columns[name] = Column("tensor", str(getattr(tensor, "dtype", type(tensor).__name__)), shape)
    for name, values in batch.non_tensor_batch.items():
        columns[name] = Column("object", str(values.dtype), None)
    return columns


def named(batch: DataProto, columns: Mapping[str, Column]) -> DataProto:
    """Return the named columns of a batch, without its facts."""
    return batch.select(
        [name for name, column in columns.items() if column.kind == "tensor"],
        [name for name, column in columns.items() if column.kind == "object"],
    )


def in_order(parts: Sequence[DataProto], places: Sequence[Index]) -> DataProto:
    """Put the rows of several sources where they belong."""
    joined = parts[0] if len(parts) == 1 else DataProto.concat(parts)
    order = np.concatenate(places) if places else np.zeros(0, np.int64)
    if np.array_equal(order, np.arange(len(order))):
        return joined
    return joined.reorder(np.argsort(order))


def aligned(parts: Sequence[Sequence[Layer]], names: Sequence[str]) -> list[list[Layer]]:
    """Return, for each set of columns that is in one layer in every part, those layers with these columns."""
    groups: dict[tuple[int, ...], list[str]] = {}
    for name in names:
        signature = tuple(next(number for number, layer in enumerate(part) if name in layer.columns) for part in parts)
        groups.setdefault(signature, []).append(name)
    return [
        [part[number].only(dict.fromkeys(group, "")) for part, number in zip(parts, signature, strict=True)]
        for signature, group in groups.items()
    ]


def joined(layers: Sequence[Layer]) -> Layer:
    """Return one layer with the rows of all, which have the same columns."""
    sources: list[Stored | DataProto] = []
    known: dict[object, int] = {}
    numbers: list[Numbers] = []
    for layer in layers:
        here = np.zeros(len(layer.sources), np.int32)
        for number, source in enumerate(layer.sources):
            name: object = source if isinstance(source, Stored) else id(source)
            if name not in known:
                known[name] = len(sources)
                sources.append(source)
            here[number] = known[name]
        numbers.append(here[layer.source_of])
    leases = {id(lease): lease for layer in layers for lease in layer.leases}
    return Layer(
        layers[0].columns,
        tuple(sources),
        np.concatenate(numbers),
        np.concatenate([layer.row_of for layer in layers]),
        tuple(leases.values()),
    ).compacted()
