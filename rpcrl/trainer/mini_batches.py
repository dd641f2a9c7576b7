"""Which rows make one optimizer step?

Rows in their order, M prompts × n samples a step. Where agent loops have made several rows of a sample, the samples are
counted instead: a group is never torn, and all mini-batches are filled up to one size with rows that no loss reads.
"""

from __future__ import annotations

from itertools import pairwise

import torch

from rpcrl.batch.data_proto import DataProto
from rpcrl.errors import BatchError
from rpcrl.trainer.metrics import tensors_of

__all__ = ["equal_mini_batches"]


def equal_mini_batches(batch: DataProto, samples: int, *, ranks: int) -> tuple[DataProto, int]:
    """Return the batch so that mini-batches of ``samples`` samples are runs of equally many rows; and how many.

    A sample is a row, or neighbouring rows that the column ``output_index`` counts from 0. Where samples have several,
    mini-batches are filled up to the longest, and to a multiple of ``ranks``, with copies of their last row without a
    response mask: they count as no token and no sequence. Raises BatchError when the samples do not divide.
    """
    starts = _starts(batch)
    count = len(starts) - 1
    if count % samples:
        raise BatchError(
            f"{count} samples do not divide into mini-batches of {samples} (ppo_mini_batch_size x "
            "rollout.n); make train_batch_size a multiple of ppo_mini_batch_size"
        )
    if count == len(batch):
        return batch, samples
    bounds = list(pairwise(starts[::samples]))
    longest = max(last - first for first, last in bounds)
    size = longest + -longest % ranks
    return DataProto.concat([_filled_up(batch[first:last], size) for first, last in bounds]), size


def _starts(batch: DataProto) -> list[int]:
    """Return the first row of each sample, and behind them the number of rows."""
    index = batch.non_tensor_batch.get("output_index")
    if index is None:
        return list(range(len(batch) + 1))
    return [row for row, number in enumerate(index.tolist()) if number == 0] + [len(batch)]


def _filled_up(part: DataProto, size: int) -> DataProto:
    missing = size - len(part)
    if not missing:
        return part
    filling = part[[len(part) - 1] * missing]
    tensors = {name: tensor.clone() for name, tensor in tensors_of(filling).items()}
    tensors["response_mask"] = torch.zeros_like(tensors["response_mask"])
    filled = DataProto.from_dict(tensors=tensors, non_tensors=dict(filling.non_tensor_batch))
    return DataProto.concat([part, filled])
