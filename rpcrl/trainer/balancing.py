"""In which order do a batch's rows give every rank about the same number of tokens?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from rpcrl.algorithms.partition import balanced_order
from rpcrl.batch.data_proto import DataProto
from rpcrl.batch.reference import BatchRef
from rpcrl.errors import BatchError

if TYPE_CHECKING:
    from typing import Any

__all__ = ["balanced", "dealt", "in_balance", "row_lengths"]

Rows = TypeVar("Rows", DataProto, BatchRef)


def row_lengths(batch: DataProto | BatchRef, column: str = "attention_mask") -> list[int]:
    """Return each row's tokens: a column of lengths ``[N]`` as it is, or the sum of a mask ``[N, T]``.

    Of a reference only this column is fetched.
    """
    table = batch.fetch([column]) if isinstance(batch, BatchRef) else batch
    tensors = table.batch
    value: Any = tensors[column] if tensors is not None and column in tensors else table.non_tensor_batch[column]
    lengths = np.asarray(value)
    return [int(length) for length in (lengths.sum(-1) if lengths.ndim > 1 else lengths)]


def balanced(batch: Rows, parts: int, *, column: str = "attention_mask") -> tuple[Rows, list[int]]:
    """Return the rows so ordered that ``parts`` equal consecutive runs have about the same number of tokens.

    Also returns the order: new row i is the old row ``order[i]``. Rows that do not divide stay as they are. A
    reference's rows stay where they lie; only the order in which they are read changes.
    """
    order = balanced_order(row_lengths(batch, column), parts)
    return batch.reorder(order), order


def dealt(batch: DataProto, ranks: int, *, mini_batch_rows: int, balance: bool) -> DataProto:
    """Return the rows so ordered that the r-th of ``ranks`` equal runs has rank r's rows of every mini-batch.

    Rows go to mini-batches in the order of ``batch``, and those of one to the ranks in equal runs: in their order, or
    with ``balance`` so that the ranks have about the same number of tokens. Raises BatchError when a mini-batch's rows
    do not divide over the ranks.
    """
    if mini_batch_rows % ranks:
        raise BatchError(
            f"a mini-batch of {mini_batch_rows} samples (ppo_mini_batch_size x rollout.n) does not divide over {ranks} "
            f"dp ranks; make it a multiple of {ranks}"
        )
    if ranks == 1:
        return batch
    order = np.arange(len(batch)).reshape(-1, mini_batch_rows)
    if balance:
        lengths = np.asarray(row_lengths(batch))
        order = np.stack([rows[balanced_order(lengths[rows].tolist(), ranks)] for rows in order])
    return batch.reorder(order.reshape(len(order), ranks, -1).transpose(1, 0, 2).reshape(-1))


def in_balance(method: Callable[[DataProto], DataProto], batch: DataProto, ranks: int) -> DataProto:
    """Call a method that answers row by row with balanced rows; the answer is in the order of ``batch``."""
    rows, order = balanced(batch, ranks)
    return method(rows).reorder(_inverse(order))


def _inverse(order: Sequence[int]) -> list[int]:
    back = [0] * len(order)
    for new, old in enumerate(order):
        back[old] = new
    return back
