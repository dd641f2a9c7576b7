"""What is the batch that every stage of training takes and returns?

A ``DataProto`` has tensor columns (``batch``), columns of Python values (``non_tensor_batch``) and facts
about the whole (``meta_info``). It is a value: a method returns a new one and leaves its inputs as they were;
only ``pop`` takes away from the batch it is called on. Results share the *contents* of columns, which no
method writes, and never the dicts.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from rpcrl.batch import folding, joining, meta
from rpcrl.batch.content import BatchContent
from rpcrl.batch.item import DataProtoItem
from rpcrl.batch.rows import Index, RowIndexError, as_row, bounds, repeat_counts, row_index
from rpcrl.errors import BatchError

if TYPE_CHECKING:
    from rpcrl.batch.merging import MergeRule

__all__ = ["DataProto", "DataProtoItem"]

Keys = Sequence[str] | None


class DataProto(BatchContent):
    """Rows of tensors and of Python values, and facts about all of them; see the module's docstring.

    ``batch`` has one batch dimension or is None. ``non_tensor_batch`` maps names to arrays (as a rule of
    dtype object) with one entry per row; lists and tuples are converted. Raises ``BatchError`` when columns
    disagree on the rows.
    """

    def __iter__(self) -> Iterator[DataProtoItem]:
        """Iterate over the rows."""
        for row in range(len(self)):
            yield self._item(row)

    # ── Rows ────────────────────────────────────────────────────────────────────────────────────────────────

    def __getitem__(self, item: Any) -> Any:
        """Return one row as a DataProtoItem for an integer, a DataProto for a slice, list, mask, array or
        tensor.
        """
        if isinstance(item, slice):
            return self.slice(item.start, item.stop, item.step)
        row = as_row(item)
        return self.select_idxs(item) if row is None else self._item(row)

    def _item(self, row: int) -> DataProtoItem:
        rows = self.check_consistency()
        if not -rows <= row < rows:
            raise RowIndexError(f"row {row} does not exist: the batch has {rows} rows")
        row %= rows
        columns = self._columns()
        batch = None
        if columns is not None:
            from tensordict import TensorDict

            batch = TensorDict({key: column[row] for key, column in columns.items()}, batch_size=[])
        return DataProtoItem(batch, {key: column[row] for key, column in self.non_tensor_batch.items()}, self.meta_info)

    def select_idxs(self, idxs: Any) -> Self:
        """Return the rows that a list, array or tensor of row numbers names, or that a mask is True for."""
        return self._take(row_index(idxs, self.check_consistency()))

    def slice(self, start: int | None = None, end: int | None = None, step: int | None = None) -> Self:
        """Return rows ``start`` to ``end`` by Python's rules; tensors are views when ``step`` is 1."""
        rows = self.check_consistency()
        first, last, stride = slice(start, end, step).indices(rows)
        if stride != 1:
            return self._take(np.arange(first, last, stride, dtype=np.int64))
        return self._cut(first, max(first, last))

    def _take(self, index: Index) -> Self:
        columns = self._columns()
        if columns is not None:
            from rpcrl.batch import tensors

            columns = tensors.take(columns, index)
        others = {key: column[index] for key, column in self.non_tensor_batch.items()}
        return self._make(len(index), columns, others, self.meta_info, self._device)

    def _cut(self, start: int, stop: int) -> Self:
        columns = self._columns()
        if columns is not None:
            from rpcrl.batch import tensors

            columns = tensors.cut(columns, start, stop)
        others = {key: column[start:stop] for key, column in self.non_tensor_batch.items()}
        return self._make(stop - start, columns, others, self.meta_info, self._device)

    def reorder(self, indices: Any) -> Self:
        """Return all rows in another order; raises ``BatchError`` when ``indices`` is no permutation of the
        rows.
        """
        rows = self.check_consistency()
        index = row_index(indices, rows)
        if len(index) != rows or np.bincount(index, minlength=rows).max(initial=1) > 1:
            raise BatchError(
                f"an order names each of the {rows} rows once; got {len(index)} numbers, "
                f"{len(np.unique(index))} of "
                "them different (to drop or repeat rows, use select_idxs)"
            )
        return self._take(index)

    def repeat(self, repeat_times: int = 2, interleave: bool = True) -> Self:
        """Return every row ``repeat_times`` times: a, a, b, b with ``interleave``, else a, b, a, b."""
        times = as_row(repeat_times)
        if times is None or times < 0:
            raise BatchError(f"repeat_times is {repeat_times!r}; it is an integer of at least 0")
        rows = np.arange(self.check_consistency(), dtype=np.int64)
        return self._take(np.repeat(rows, times) if interleave else np.tile(rows, times))

    def sample_level_repeat(self, repeat_times: Any) -> Self:
        """Return each row as often as its own count says; counts are a tuple, list, array or tensor."""
        rows = self.check_consistency()
        return self._take(np.repeat(np.arange(rows, dtype=np.int64), repeat_counts(repeat_times, rows)))

    def padding(self, padding_size: int, padding_candidate: str = "last") -> Self:
        """Return the batch with ``padding_size`` copies of its last row appended, or of its ``first`` one."""
        rows = self.check_consistency()
        if padding_candidate not in ("first", "last") or padding_size < 0 or (padding_size and not rows):
            raise BatchError(
                f"cannot append {padding_size} copies of the {padding_candidate!r} row to {rows} rows; it is the "
                "'first' or the 'last' row of a batch that has one, and 0 copies or more"
            )
        added = np.full(padding_size, 0 if padding_candidate == "first" else rows - 1, dtype=np.int64)
        return self._take(np.concatenate([np.arange(rows, dtype=np.int64), added]))

    def unfold_column_chunks(self, n_split: int, split_keys: Keys = None) -> Self:
        """Return ``n_split`` rows for each row, row by row.

        A column of ``split_keys`` (tensors or arrays, [N, L, …]) gives each of them its own part of dimension 1:
        [N·n_split, L / n_split, …]. Every other column is repeated. Raises ``BatchError`` for an unknown name and
        for an L that does not divide.
        """
        repeated = self.repeat(n_split)
        columns, others = folding.column_chunks(self._columns(), self.non_tensor_batch, n_split, split_keys or ())
        made = {**repeated._tensors, **columns} if repeated._tensors is not None else None
        return self._make(
            len(repeated), made, {**repeated.non_tensor_batch, **others}, self.meta_info, repeated._device
        )

    def chunk(self, chunks: int, *, uneven: bool = False) -> list[Self]:
        """Return ``chunks`` parts in order, always that many.

        Parts are equal; with ``uneven`` their sizes differ by at most one, and some may be empty. Raises
        ``BatchError`` with the arithmetic when the rows cannot be cut equally and ``uneven`` is not given.
        """
        cuts = bounds(self.check_consistency(), chunks, uneven=uneven)
        return [self._cut(start, stop) for start, stop in cuts]

    def split(self, split_size: int) -> list[Self]:
        """Return parts of ``split_size`` rows, the last one maybe smaller; an empty batch gives one empty
        part.
        """
        if split_size < 1:
            raise BatchError(f"split_size is {split_size}; parts have at least 1 row")
        rows = self.check_consistency()
        return [self._cut(at, min(at + split_size, rows)) for at in range(0, max(rows, 1), split_size)]

    @staticmethod
    def concat(
        data: Sequence[DataProto],
        *,
        merge: Mapping[str, MergeRule] | None = None,
        weights: Sequence[float] | None = None,
    ) -> DataProto:
        """Return the rows of all parts in order, of the first part's type.

        Parts have the same columns. meta_info must agree, except for ``metrics``, which are gathered into lists;
        ``merge`` gives a rule for single fields: ``{"metrics.loss": "mean", "tokens": "sum"}`` (``first_equal``,
        ``mean``, ``sum`` or ``list``), where a mean counts each part by its rows, or by ``weights``. Raises
        ``BatchError`` naming part and key, else.
        """
        if not data:
            raise BatchError("nothing to concatenate: the list of batches is empty")
        for number, part in enumerate(data):
            if not isinstance(part, DataProto):
                raise BatchError(f"concat: part {number} is of type {type(part).__name__}; expected a DataProto")
        counts = [part.check_consistency() for part in data]
        columns, others = joining.concat([(part._columns(), part.non_tensor_batch) for part in data])
        facts = meta.joined(
            [part.meta_info for part in data], rules=merge, weights=counts if weights is None else weights
        )
        return type(data[0])._make(sum(counts), columns, others, facts, data[0]._device)

    def make_iterator(
        self,
        mini_batch_size: int,
        epochs: int = 1,
        seed: int | None = None,
        dataloader_kwargs: Mapping[str, Any] | None = None,
    ) -> Iterator[Self]:
        """Iterate ``epochs`` times over mini-batches, in order.

        With ``dataloader_kwargs={"shuffle": True}`` every epoch has its own order, drawn from ``seed``. Raises
        ``BatchError`` at once when the rows are not a multiple of ``mini_batch_size``.
        """
        options = dict(dataloader_kwargs or {})
        shuffle = bool(options.pop("shuffle", False))
        if options:
            raise BatchError(f"make_iterator knows the option 'shuffle', not {sorted(options)}")
        rows = self.check_consistency()
        if mini_batch_size < 1 or rows % mini_batch_size:
            raise BatchError(
                f"{rows} rows cannot be cut into mini-batches of {mini_batch_size}; choose a divisor of "
                f"{rows}, or "
                f"drop or pad rows first"
            )
        return self._mini_batches(mini_batch_size, epochs, np.random.default_rng(seed) if shuffle else None)

    def _mini_batches(self, size: int, epochs: int, random: np.random.Generator | None) -> Iterator[Self]:
        rows = len(self)
        for _ in range(epochs if rows else 0):
            ordered = self if random is None else self._take(random.permutation(rows))
            yield from ordered.split(size)

    # ── Columns ─────────────────────────────────────────────────────────────────────────────────────────────

    def select(
        self,
        batch_keys: Keys = None,
        non_tensor_batch_keys: Keys = None,
        meta_info_keys: Keys = None,
        deepcopy: bool = False,
    ) -> Self:
        """Return the named columns and facts of all rows; None keeps all. Raises ``BatchError`` for an
        unknown name.

        With ``deepcopy`` the contents of columns and facts are the result's own too, tensors included.
        """
        columns = self._columns()
        if batch_keys is not None and (columns is not None or batch_keys):
            columns = joining.picked("tensor column", columns or {}, batch_keys)
        others = joining.picked("non-tensor column", self.non_tensor_batch, non_tensor_batch_keys)
        facts = joining.picked("meta_info", self.meta_info, meta_info_keys)
        if deepcopy:
            columns = None if columns is None else {key: column.clone() for key, column in columns.items()}
            others, facts = copy.deepcopy((others, facts))
        return self._make(len(self), None if columns is None else dict(columns), others, facts, self._device)

    def pop(self, batch_keys: Keys = None, non_tensor_batch_keys: Keys = None, meta_info_keys: Keys = None) -> Self:
        """Take the named columns and facts out of *this* batch and return them as a batch.

        Raises ``BatchError`` for an unknown name; then nothing was taken.
        """
        columns = self._columns()
        rows = len(self)
        tensors = joining.picked("tensor column", columns or {}, batch_keys or ())
        others = joining.picked("non-tensor column", self.non_tensor_batch, non_tensor_batch_keys or ())
        facts = joining.picked("meta_info", self.meta_info, meta_info_keys or ())
        if tensors:
            self._drop_tensors(tensors)
        for key in others:
            del self.non_tensor_batch[key]
        for key in facts:
            del self.meta_info[key]
        return self._make(rows, tensors or None, others, facts, self._device)

    def _drop_tensors(self, dropped: Mapping[str, Any]) -> None:
        if self._tensordict is not None and not self._tensordict.is_locked:
            for key in dropped:
                self._tensordict.del_(key)
            return
        rows = len(self)
        self._tensors = {key: column for key, column in (self._columns() or {}).items() if key not in dropped}
        self._tensordict, self._rows = None, rows

    def rename(self, old_keys: str | Sequence[str], new_keys: str | Sequence[str]) -> Self:
        """Return the batch with columns renamed, tensors and others alike; names may be swapped.

        Raises ``BatchError`` for an unknown name, for lists of different lengths, and when a new name is
        taken.
        """
        old = [old_keys] if isinstance(old_keys, str) else list(old_keys)
        new = [new_keys] if isinstance(new_keys, str) else list(new_keys)
        columns = self._columns()
        columns, others = joining.renamed(columns, self.non_tensor_batch, old, new)
        return self._make(len(self), columns, others, self.meta_info, self._device)

    def union(self, other: DataProto, *, overwrite: bool = False) -> Self:
        """Return the columns and facts of both batches, which have the same rows.

        A name in both must hold the same values (NaN equal to NaN), or with ``overwrite`` is taken from
        ``other``. Raises ``BatchError`` naming the key, the shapes and the first difference.
        """
        joining.check_same_rows(self, other)
        mine, theirs = self._columns(), other._columns()
        columns = None
        if mine is not None or theirs is not None:
            columns = joining.united("tensor column", mine or {}, theirs or {}, overwrite=overwrite)
        others = joining.united("non-tensor column", self.non_tensor_batch, other.non_tensor_batch, overwrite=overwrite)
        facts = meta.united(self.meta_info, other.meta_info, overwrite=overwrite)
        device = self._device if mine is None or theirs is None or self._device == other._device else None
        rows = len(self) if mine is not None or self.non_tensor_batch else len(other)
        return self._make(rows, columns, others, facts, device)

    def to(self, device: Any) -> Self:
        """Return the batch with its tensors on ``device`` (those already there are shared)."""
        columns = self._columns()
        if columns is None:
            return self._make(len(self), None, dict(self.non_tensor_batch), self.meta_info)
        from rpcrl.batch import tensors

        moved = tensors.move(columns, device)
        return self._make(len(self), moved, dict(self.non_tensor_batch), self.meta_info, device)
