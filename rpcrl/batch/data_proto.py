"""What is the batch that every stage of training takes and returns?

A ``DataProto`` has tensor columns (``batch``), columns of Python values (``non_tensor_batch``) and facts
about the whole (``meta_info``). It is a value: a method returns a new one and leaves its inputs as they were;
only ``pop`` takes away from the batch it is called on. Results share the *contents* of columns, which no
method writes, and never the dicts.

Tensor columns are kept as a plain dict until somebody asks for ``batch``; from then on the TensorDict that
was handed out is the truth, so ``data.batch["key"] = tensor`` works. Neither torch nor tensordict is loaded
for a batch without tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from rpcrl.batch import conversion, joining, meta, objects
from rpcrl.batch.item import DataProtoItem
from rpcrl.batch.rows import Index, RowIndexError, as_row, bounds, is_tensor, repeat_counts, row_index
from rpcrl.errors import BatchError

if TYPE_CHECKING:
    from tensordict import TensorDict

__all__ = ["DataProto", "DataProtoItem"]

Keys = Sequence[str] | None


class DataProto:
    """Rows of tensors and of Python values, and facts about all of them; see the module's docstring.

    ``batch`` has one batch dimension or is None. ``non_tensor_batch`` maps names to arrays (as a rule of
    dtype object) with one entry per row; lists and tuples are converted. Raises ``BatchError`` when columns
    disagree on the rows.
    """

    non_tensor_batch: dict[str, objects.ObjectColumn]
    meta_info: dict[str, Any]
    _rows: int
    _tensors: dict[str, Any] | None
    _tensordict: TensorDict | None
    _device: Any

    def __init__(
        self,
        batch: TensorDict | None = None,
        non_tensor_batch: Mapping[str, Any] | None = None,
        meta_info: Mapping[str, Any] | None = None,
    ) -> None:
        self.batch = batch
        self.non_tensor_batch = {key: objects.as_column(key, value) for key, value in (non_tensor_batch or {}).items()}
        self.meta_info = meta.own(dict(meta_info or {}))
        self.check_consistency()

    # ── Making one ──────────────────────────────────────────────────────────────────────────────────────────

    @classmethod
    def from_dict(
        cls,
        tensors: Mapping[str, Any] | None = None,
        non_tensors: Mapping[str, Any] | None = None,
        meta_info: Mapping[str, Any] | None = None,
    ) -> Self:
        """Return a batch of the given columns; without tensors ``batch`` is None.

        The caller's dicts are left as they are. Raises ``BatchError`` naming the first column and the one
        that has another number of rows.
        """
        columns = {key: objects.as_column(key, value) for key, value in (non_tensors or {}).items()}
        made = cls._make(0, dict(tensors) if tensors else None, columns, dict(meta_info or {}))
        made._rows = made.check_consistency()
        return made

    @classmethod
    def from_single_dict(cls, data: Mapping[str, Any], meta_info: Mapping[str, Any] | None = None) -> Self:
        """Return a batch of one dict's columns: tensors go to ``batch``, arrays and lists to
        ``non_tensor_batch``.
        """
        tensors = {key: value for key, value in data.items() if is_tensor(value)}
        others = {key: value for key, value in data.items() if key not in tensors}
        return cls.from_dict(tensors, others, meta_info)

    @classmethod
    def from_list(cls, rows: Sequence[Mapping[str, Any]], meta_info: Mapping[str, Any] | None = None) -> Self:
        """Return a batch of one dict per row, all with the same keys.

        Tensors of one shape are stacked, tensors that differ in one dimension become a jagged column, and
        anything else becomes a column of Python values.
        """
        tensors, others = conversion.columns_of_rows(rows)
        return cls.from_dict(tensors, others, meta_info)

    @classmethod
    def from_tensordict(cls, tensordict: TensorDict, meta_info: Mapping[str, Any] | None = None) -> Self:
        """Return a batch of a TensorDict with one batch dimension.

        A NonTensorStack becomes a column of Python values, a NonTensorData an entry of meta_info.
        """
        rows, tensors, others, facts = conversion.parts_of_tensordict(tensordict)
        made = cls._make(rows, tensors, others, {**facts, **(meta_info or {})}, tensordict.device)
        made.check_consistency()
        return made

    @classmethod
    def _make(
        cls,
        rows: int,
        tensors: dict[str, Any] | None,
        non_tensors: dict[str, objects.ObjectColumn],
        meta_info: Mapping[str, Any],
        device: Any = None,
    ) -> Self:
        """Build without checks; the dicts of columns are taken over, meta_info is copied."""
        made = cls.__new__(cls)
        made._rows = rows
        made._tensors = tensors
        made._tensordict = None
        made._device = device
        made.non_tensor_batch = non_tensors
        made.meta_info = meta.own(dict(meta_info))
        return made

    # ── Looking at it ───────────────────────────────────────────────────────────────────────────────────────

    @property
    def batch(self) -> TensorDict | None:
        """The tensor columns as a TensorDict of this batch's own, or None when there are none."""
        if self._tensordict is None and self._tensors is not None:
            from tensordict import TensorDict

            self._tensordict = TensorDict(self._tensors, batch_size=[self._rows], device=self._device)
            self._tensors = None
        return self._tensordict

    @batch.setter
    def batch(self, value: TensorDict | None) -> None:
        self._tensordict = None
        self._tensors = None
        self._rows = 0
        self._device = None
        if value is not None:
            self._rows, self._tensors = conversion.columns_of_tensordict(value)
            self._device = value.device

    def _columns(self) -> dict[str, Any] | None:
        """Return the tensor columns as a plain dict that the caller may not change."""
        return self._tensors if self._tensordict is None else dict(self._tensordict.items())

    def __len__(self) -> int:
        if self._tensordict is not None:
            return int(self._tensordict.batch_size[0])
        if self._tensors is not None:
            return self._rows
        for column in self.non_tensor_batch.values():
            return len(column)
        return 0

    def __contains__(self, key: object) -> bool:
        """Tell whether there is a column of that name, tensor or not."""
        return key in self.non_tensor_batch or key in (self._columns() or {})

    def __iter__(self) -> Iterator[DataProtoItem]:
        """Iterate over the rows."""
        for row in range(len(self)):
            yield self._item(row)

    def __repr__(self) -> str:
        return conversion.describe(self, self._columns(), long=False)

    def get_data_info(self) -> str:
        """Return a text of several lines with every column's type and shape and every key of meta_info."""
        return conversion.describe(self, self._columns(), long=True)

    def check_consistency(self) -> int:
        """Return the number of rows; raises ``BatchError`` naming pivot and offender when columns disagree on
        it.
        """
        return joining.count_rows(self._columns(), self.non_tensor_batch, len(self))

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
    def concat(data: Sequence[DataProto]) -> DataProto:
        """Return the rows of all parts in order, of the first part's type.

        Parts have the same columns. meta_info must agree, except for ``metrics``, which are gathered into
        lists. Raises ``BatchError`` naming part and key, else.
        """
        if not data:
            raise BatchError("nothing to concatenate: the list of batches is empty")
        for number, part in enumerate(data):
            if not isinstance(part, DataProto):
                raise BatchError(f"concat: part {number} is of type {type(part).__name__}; expected a DataProto")
        rows = sum(part.check_consistency() for part in data)
        columns, others = joining.concat([(part._columns(), part.non_tensor_batch) for part in data])
        facts = meta.joined([part.meta_info for part in data])
        return type(data[0])._make(rows, columns, others, facts, data[0]._device)

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

    def select(self, batch_keys: Keys = None, non_tensor_batch_keys: Keys = None, meta_info_keys: Keys = None) -> Self:
        """Return the named columns and facts of all rows; None keeps all. Raises ``BatchError`` for an
        unknown name.
        """
        columns = self._columns()
        if batch_keys is not None and (columns is not None or batch_keys):
            columns = joining.picked("tensor column", columns or {}, batch_keys)
        others = joining.picked("non-tensor column", self.non_tensor_batch, non_tensor_batch_keys)
        facts = joining.picked("meta_info", self.meta_info, meta_info_keys)
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

    # ── Other forms ─────────────────────────────────────────────────────────────────────────────────────────

    def to_list(self) -> list[dict[str, Any]]:
        """Return one dict per row with tensors (views) and Python values."""
        return conversion.rows_of_columns(self._columns() or {}, self.non_tensor_batch, self.check_consistency())

    def to_tensordict(self) -> TensorDict:
        """Return one TensorDict: columns of Python values as NonTensorStack, facts as NonTensorData.

        Raises ``BatchError`` when a name occurs twice among tensors, other columns and meta_info.
        """
        rows = self.check_consistency()
        return conversion.tensordict_of(self._columns() or {}, self.non_tensor_batch, self.meta_info, rows)

    def save_to_disk(self, path: str | Path) -> None:
        """Write the batch into one file (safetensors; no pickle), or leave what was there on any error.

        Python values may be None, bool, numbers, str, bytes, lists, tuples, dicts, arrays and tensors. Raises
        ``BatchError`` naming the place of any other value.
        """
        from rpcrl.batch import storage

        storage.save(Path(path), self._columns(), self.non_tensor_batch, self.meta_info, self.check_consistency())

    @classmethod
    def load_from_disk(cls, path: str | Path) -> Self:
        """Return the batch that ``save_to_disk`` wrote; its tensors are on the CPU and its own.

        Raises ``BatchError`` when the file is not such a batch or is damaged.
        """
        from rpcrl.batch import storage

        rows, columns, others, facts = storage.load(Path(path))
        made = cls._make(rows, columns, others, facts)
        made.check_consistency()
        return made
