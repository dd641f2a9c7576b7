"""How is a batch handled whose rows are somewhere else? As a ``BatchRef``: who keeps which rows, and what columns.

A reference is a value like a DataProto: it is cut, joined, reordered and united without moving a row. Its columns
come in layers (a layer's columns were made together); each layer says for every row which source has it and where.
A source is a result that a worker keeps, or a batch that came along with the reference.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from rpcrl.batch import meta
from rpcrl.batch.data_proto import DataProto
from rpcrl.batch.layers import Column, Held, Layer, Stored, aligned, in_order, joined, named, schema_of
from rpcrl.batch.merging import MergeRule
from rpcrl.batch.rows import Index, as_row, bounds, row_index
from rpcrl.errors import BatchError, UsageError

__all__ = ["BatchRef", "Column", "Reader", "Stored", "Want", "schema_of"]


class Want(NamedTuple):
    """Rows and columns of one stored result."""

    stored: Stored
    rows: Index
    names: tuple[str, ...]


class Reader(Protocol):
    """The way to the rows."""

    @property
    def run_id(self) -> str:
        """The run whose workers it reads from."""
        ...

    def read(self, wants: Sequence[Want]) -> list[DataProto]:
        """Return a batch for each want, in order. Raises WorkerLostError where the keeper is gone."""
        ...


class BatchRef:
    """Rows that stay where they were made; see the module's docstring.

    ``ref["rewards"]`` reads one column, ``fetch()`` all of them. A worker whose method takes a batch may be given a
    reference: it gets exactly its own rows, from the workers that keep them.
    """

    def __init__(
        self, layers: Sequence[Layer], num_rows: int, meta_info: Mapping[str, Any], reader: Reader | None
    ) -> None:
        self._layers = tuple(layers)
        self._num_rows = num_rows
        self.meta_info: dict[str, Any] = meta.own(dict(meta_info))
        self._reader = reader
        self.as_tensordict = False
        """Whether the rows were made as a TensorDict, and come back as one."""
        self.stayed = False
        """Whether this is a result that was left on its worker until somebody asks for it."""

    @classmethod
    def of_stored(
        cls,
        stored: Stored,
        columns: Mapping[str, Column],
        meta_info: Mapping[str, Any],
        *,
        reader: Reader | None,
        lease: Held | None = None,
    ) -> BatchRef:
        """Return the reference to all rows of one stored result."""
        rows = np.arange(stored.num_rows, dtype=np.int64)
        leases = () if lease is None else (lease,)
        layer = Layer(dict(columns), (stored,), np.zeros(stored.num_rows, np.int32), rows, leases)
        return cls([layer], stored.num_rows, meta_info, reader)

    @classmethod
    def of_batch(cls, batch: DataProto, *, reader: Reader | None = None) -> BatchRef:
        """Return a reference that has its rows with it, to be joined with others."""
        rows = len(batch)
        held = batch.select(meta_info_keys=[])
        layer = Layer(schema_of(batch), (held,), np.zeros(rows, np.int32), np.arange(rows, dtype=np.int64))
        return cls([layer], rows, batch.meta_info, reader)

    # ── Looking at it ───────────────────────────────────────────────────────────────────────────────────────

    def __len__(self) -> int:
        return self._num_rows

    @property
    def columns(self) -> dict[str, Column]:
        """What each column holds, by its name."""
        return {name: column for layer in self._layers for name, column in layer.columns.items()}

    def __contains__(self, name: object) -> bool:
        """Tell whether there is a column of that name."""
        return any(name in layer.columns for layer in self._layers)

    def __repr__(self) -> str:
        return f"<BatchRef: {self._num_rows} rows of {', '.join(self.columns) or 'no columns'}>"

    @property
    def run_id(self) -> str:
        """The run whose workers keep the rows; empty if all rows are here."""
        here = self._reader is None or not any(isinstance(s, Stored) for layer in self._layers for s in layer.sources)
        return "" if here or self._reader is None else self._reader.run_id

    @property
    def holds_leases(self) -> bool:
        """Whether results are kept because of this reference, or of others of this process."""
        return any(layer.leases for layer in self._layers)

    def keepers(self) -> list[Stored]:
        """Return the stored results that the rows are in."""
        found = {
            source: None
            for layer in self._layers
            for number in np.unique(layer.source_of)
            if isinstance(source := layer.sources[number], Stored)
        }
        return list(found)

    def fetch(self, names: Sequence[str] | None = None) -> DataProto:
        """Return the rows, with the named columns or all, as a batch of this process.

        Raises ``BatchError`` for an unknown name, WorkerLostError for rows whose keeper is gone.
        """
        wanted = self if names is None else self.select_columns(names)
        wants: list[Want] = []
        plans: list[list[tuple[Index, DataProto | int]]] = []
        for layer in wanted._layers:
            plan: list[tuple[Index, DataProto | int]] = []
            for number in np.unique(layer.source_of) if wanted._num_rows else [0]:
                places = np.flatnonzero(layer.source_of == number).astype(np.int64, copy=False)
                source, rows = layer.sources[number], layer.row_of[places]
                if isinstance(source, Stored):
                    plan.append((places, len(wants)))
                    wants.append(Want(source, rows, tuple(layer.columns)))
                else:
                    plan.append((places, named(source, layer.columns).select_idxs(rows)))
            plans.append(plan)
        read = self._read(wants)
        result: DataProto | None = None
        for plan in plans:
            parts = [part if isinstance(part, DataProto) else read[part] for _, part in plan]
            rows_of_layer = in_order(parts, [places for places, _ in plan])
            result = rows_of_layer if result is None else result.union(rows_of_layer)
        made = DataProto() if result is None else result
        made.meta_info = meta.own(self.meta_info)
        return made

    def _read(self, wants: Sequence[Want]) -> list[DataProto]:
        if not wants:
            return []
        if self._reader is None:
            raise UsageError(f"{self!r} cannot be read here: it has lost the way to its keepers")
        return self._reader.read(wants)

    # ── Rows ────────────────────────────────────────────────────────────────────────────────────────────────

    def __getitem__(self, item: Any) -> Any:
        """Return a column for a name, else a reference to the rows of a slice, list, mask, array or tensor."""
        if isinstance(item, str):
            fetched = self.fetch([item])
            return (fetched._columns() or fetched.non_tensor_batch)[item]
        if isinstance(item, slice):
            return self._take(item)
        if as_row(item) is not None:
            raise BatchError("a single row of a reference is not read by itself; use ref[i : i + 1].fetch()")
        return self.select_idxs(item)

    def select_idxs(self, idxs: Any) -> BatchRef:
        """Return the rows that a list, array or tensor of row numbers names, or that a mask is True for."""
        return self._take(row_index(idxs, self._num_rows))

    def reorder(self, indices: Any) -> BatchRef:
        """Return all rows in another order; raises ``BatchError`` when ``indices`` is no permutation of the rows."""
        index = row_index(indices, self._num_rows)
        if len(index) != self._num_rows or len(np.unique(index)) != self._num_rows:
            raise BatchError(f"an order names each of the {self._num_rows} rows once (to drop or repeat: select_idxs)")
        return self._take(index)

    def repeat(self, repeat_times: int = 2, interleave: bool = True) -> BatchRef:
        """Return every row ``repeat_times`` times: a, a, b, b with ``interleave``, else a, b, a, b."""
        rows = np.arange(self._num_rows, dtype=np.int64)
        return self._take(np.repeat(rows, repeat_times) if interleave else np.tile(rows, repeat_times))

    def chunk(self, chunks: int, *, uneven: bool = False) -> list[BatchRef]:
        """Return ``chunks`` parts in order, as ``DataProto.chunk`` does."""
        return [self._take(slice(start, stop)) for start, stop in bounds(self._num_rows, chunks, uneven=uneven)]

    def split(self, split_size: int) -> list[BatchRef]:
        """Return parts of ``split_size`` rows, the last one maybe smaller."""
        if split_size < 1:
            raise BatchError(f"split_size is {split_size}; parts have at least 1 row")
        return [self._take(slice(at, at + split_size)) for at in range(0, max(self._num_rows, 1), split_size)]

    def _take(self, index: Index | slice) -> BatchRef:
        rows = len(range(*index.indices(self._num_rows))) if isinstance(index, slice) else len(index)
        return self._like([layer.take(index) for layer in self._layers], rows, self.meta_info)

    @staticmethod
    def concat(
        data: Sequence[BatchRef | DataProto],
        *,
        merge: Mapping[str, MergeRule] | None = None,
        weights: Sequence[float] | None = None,
    ) -> BatchRef:
        """Return the rows of all parts in order; columns and meta_info as in ``DataProto.concat``."""
        if not data:
            raise BatchError("nothing to concatenate: the list of references is empty")
        parts = [_as_reference(part, number) for number, part in enumerate(data)]
        names = list(parts[0].columns)
        for number, part in enumerate(parts):
            if set(part.columns) != set(names):
                raise BatchError(
                    f"concat: part 0 has the columns {sorted(names)}, part {number} has {sorted(part.columns)}"
                )
        counts = [len(part) for part in parts]
        facts = meta.joined(
            [part.meta_info for part in parts], rules=merge, weights=counts if weights is None else weights
        )
        layers = [joined(group) for group in aligned([part._layers for part in parts], names)]
        made = parts[0]._like(layers, sum(counts), facts)
        made._reader = next((part._reader for part in parts if part._reader is not None), None)
        return made

    # ── Columns ─────────────────────────────────────────────────────────────────────────────────────────────

    def select(
        self,
        batch_keys: Sequence[str] | None = None,
        non_tensor_batch_keys: Sequence[str] | None = None,
        meta_info_keys: Sequence[str] | None = None,
    ) -> BatchRef:
        """Return the named columns and facts of all rows, as ``DataProto.select``; None keeps all of a kind."""
        by_kind = {"tensor": batch_keys, "object": non_tensor_batch_keys}
        names = [
            name for name, column in self.columns.items() if (keys := by_kind[column.kind]) is None or name in keys
        ]
        self._check_known([*(batch_keys or ()), *(non_tensor_batch_keys or ())])
        picked = self.select_columns(names)
        if meta_info_keys is not None:
            picked.meta_info = {key: picked.meta_info[key] for key in meta_info_keys}
        return picked

    def select_columns(self, names: Sequence[str]) -> BatchRef:
        """Return the named columns, of whichever kind."""
        self._check_known(names)
        wanted = dict.fromkeys(names, "")
        layers = [layer.only(wanted) for layer in self._layers]
        return self._like([layer for layer in layers if layer.columns], self._num_rows, self.meta_info)

    def _like(self, layers: Sequence[Layer], num_rows: int, meta_info: Mapping[str, Any]) -> BatchRef:
        made = BatchRef(layers, num_rows, meta_info, self._reader)
        made.as_tensordict = self.as_tensordict
        return made

    def union(self, other: BatchRef | DataProto, *, overwrite: bool = False) -> BatchRef:
        """Return the columns and facts of both, which have the same rows.

        Values are not read to be compared: a name in both is refused, or with ``overwrite`` taken from ``other``.
        """
        added = BatchRef.of_batch(other) if isinstance(other, DataProto) else other
        if len(added) != self._num_rows:
            raise BatchError(f"union: this reference has {self._num_rows} rows, the other has {len(added)}")
        both = [name for name in added.columns if name in self]
        if both and not overwrite:
            raise BatchError(
                f"union: both have the columns {both}, and values of a reference are not read to be compared; drop "
                "them on one side, or pass overwrite=True to take the other's"
            )
        mine = self.select_columns([name for name in self.columns if name not in both])
        facts = meta.united(self.meta_info, added.meta_info, overwrite=overwrite)
        return BatchRef([*mine._layers, *added._layers], self._num_rows, facts, self._reader or added._reader)

    def _check_known(self, names: Sequence[str]) -> None:
        unknown = [name for name in names if name not in self]
        if unknown:
            raise BatchError(f"no column {', '.join(map(repr, unknown))}; there are: {', '.join(self.columns)}")

    # ── Travelling ──────────────────────────────────────────────────────────────────────────────────────────

    def to_plain(self) -> dict[str, Any]:
        """Return what travels: only the sources that the rows are in, without leases."""
        layers = []
        for layer in self._layers:
            used = np.unique(layer.source_of) if self._num_rows else np.zeros(1, np.int32)
            sources: list[Any] = []
            row_of = layer.row_of.copy()
            for number in used:
                source = layer.sources[number]
                if isinstance(source, DataProto):
                    places = layer.source_of == number
                    source = named(source, layer.columns).select_idxs(row_of[places])
                    row_of[places] = np.arange(len(source))
                    sources.append(source)
                else:
                    sources.append([source.group, source.identity, source.rank, source.key, source.num_rows])
            columns = {name: tuple(column) for name, column in layer.columns.items()}
            source_of = np.searchsorted(used, layer.source_of).astype(np.int32)
            layers.append([columns, sources, source_of, row_of])
        return {"layers": layers, "rows": self._num_rows, "meta_info": self.meta_info}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any], *, reader: Reader | None) -> BatchRef:
        """Return the reference that ``to_plain`` described."""
        layers = [
            Layer(
                {name: Column(*column) for name, column in columns.items()},
                tuple(source if isinstance(source, DataProto) else Stored(*source) for source in sources),
                source_of,
                row_of,
            )
            for columns, sources, source_of, row_of in plain["layers"]
        ]
        return cls(layers, plain["rows"], plain["meta_info"], reader)


def _as_reference(part: object, number: int) -> BatchRef:
    if isinstance(part, DataProto):
        return BatchRef.of_batch(part)
    if not isinstance(part, BatchRef):
        raise BatchError(f"concat: part {number} is of type {type(part).__name__}; expected a BatchRef or a DataProto")
    return part
