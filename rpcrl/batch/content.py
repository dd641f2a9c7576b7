"""What does a batch hold, how is it made, and in which other forms does it come?

Tensor columns are kept as a plain dict until somebody asks for ``batch``; from then on the TensorDict that
was handed out is the truth, so ``data.batch["key"] = tensor`` works. Neither torch nor tensordict is loaded
for a batch without tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from rpcrl.batch import conversion, joining, meta, objects
from rpcrl.batch.item import DataProtoItem
from rpcrl.batch.rows import is_tensor
from rpcrl.errors import BatchError

if TYPE_CHECKING:
    from tensordict import TensorDict

__all__ = ["BatchContent"]


class BatchContent:
    """Columns and facts of a batch, without the methods that make another batch of them; see ``DataProto``."""

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
        num_batch_dims: int = 1,
    ) -> Self:
        """Return a batch of the given columns; without tensors ``batch`` is None.

        The caller's dicts are left as they are. Raises ``BatchError`` naming the first column and the one
        that has another number of rows.
        """
        _check_batch_dims(num_batch_dims)
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
    def from_tensordict(
        cls, tensordict: TensorDict, meta_info: Mapping[str, Any] | None = None, num_batch_dims: int = 1
    ) -> Self:
        """Return a batch of a TensorDict with one batch dimension.

        A NonTensorStack becomes a column of Python values, a NonTensorData an entry of meta_info. ``batch`` is None
        when there are such columns and no tensors.
        """
        _check_batch_dims(num_batch_dims)
        rows, tensors, others, facts = conversion.parts_of_tensordict(tensordict)
        made = cls._make(
            rows, tensors if tensors or not others else None, others, {**facts, **(meta_info or {})}, tensordict.device
        )
        made.check_consistency()
        return made

    @classmethod
    def from_items(cls, items: Sequence[DataProtoItem]) -> Self:
        """Return a batch of single rows, as ``batch[3]`` gives them; their meta_info must agree.

        It also serves as the ``collate_fn`` of a DataLoader over a batch.
        """
        rows = [{**({} if item.batch is None else item.batch), **item.non_tensor_batch} for item in items]
        tensors, others = conversion.columns_of_rows(rows)
        own = items[0].non_tensor_batch if items else {}
        for key in [key for key in tensors if key in own]:  # tensors as entries of a column of Python values
            others[key] = objects.object_column([row[key] for row in rows])
            del tensors[key]
        return cls.from_dict(tensors, others, meta.joined([item.meta_info for item in items]))

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

    def __repr__(self) -> str:
        return conversion.describe(self, self._columns(), long=False)

    def print_size(self, prefix: str = "") -> None:
        """Print the bytes of tensor columns and of other columns, in GiB; of Python values only their references."""
        columns = self._columns()
        num_bytes = 0
        if columns:
            from rpcrl.batch import tensors

            num_bytes = tensors.num_bytes(columns)
        others = sum(column.nbytes for column in self.non_tensor_batch.values())
        text = f"{prefix}tensors: {num_bytes / 2**30:.6f} GiB, other columns: {others / 2**30:.6f} GiB"
        print(text)  # noqa: T201 - it is what the method is for

    def get_data_info(self) -> str:
        """Return a text of several lines with every column's type and shape and every key of meta_info."""
        return conversion.describe(self, self._columns(), long=True)

    def check_consistency(self) -> int:
        """Return the number of rows; raises ``BatchError`` naming pivot and offender when columns disagree on
        it.
        """
        return joining.count_rows(self._columns(), self.non_tensor_batch, len(self))

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


def _check_batch_dims(num_batch_dims: int) -> None:
    if num_batch_dims != 1:
        raise BatchError(
            f"a batch has one batch dimension, its rows; num_batch_dims={num_batch_dims} cannot be kept. Make rows of "
            f"the leading dimensions first: tensor.flatten(0, {num_batch_dims - 1})"
        )
