"""Mini-batches of rows, and of samples that have several: whole groups, and filling that no loss reads."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rpcrl.algorithms.aggregate import BatchCounts
from rpcrl.batch.data_proto import DataProto
from rpcrl.errors import BatchError
from rpcrl.trainer.mini_batches import equal_mini_batches


def batch_of(outputs: list[int], *, indexed: bool = True) -> DataProto:
    """One row an output; ``outputs`` has how many each sample has."""
    rows = [(sample, number) for sample, count in enumerate(outputs) for number in range(count)]
    return DataProto.from_dict(
        tensors={
            "sample": torch.tensor([sample for sample, _ in rows]),
            "response_mask": torch.ones(len(rows), 3, dtype=torch.int64),
        },
        non_tensors={"output_index": [number for _, number in rows]} if indexed else {"uid": ["p"] * len(rows)},
    )


@pytest.mark.parametrize("indexed", [True, False])
def test_rows_that_are_samples_stay_as_they_lie(indexed: bool):
    batch = batch_of([1] * 6, indexed=indexed)
    whole, size = equal_mini_batches(batch, 2, ranks=4)
    assert whole is batch
    assert size == 2, "whether that goes over the ranks is for who deals them out"


@given(st.lists(st.integers(1, 4), min_size=4, max_size=12), st.integers(1, 4), st.integers(1, 4))
def test_samples_stay_whole_and_filling_counts_nothing(outputs: list[int], samples: int, ranks: int):
    batch = batch_of(outputs)
    if len(outputs) % samples:
        with pytest.raises(BatchError, match=f"{len(outputs)} samples do not divide into mini-batches of {samples}"):
            equal_mini_batches(batch, samples, ranks=ranks)
        return
    whole, size = equal_mini_batches(batch, samples, ranks=ranks)
    parts = whole.split(size)
    assert len(parts) == len(outputs) // samples
    longest = 0
    for number, part in enumerate(parts):
        own = outputs[number * samples : (number + 1) * samples]
        longest = max(longest, sum(own))
        expected = [number * samples + place for place, count in enumerate(own) for _ in range(count)]
        read = part.batch["response_mask"].bool().any(-1)
        assert part.batch["sample"][read].tolist() == expected
        counts = BatchCounts.of(part.batch["response_mask"])
        assert (counts.batch_num_tokens, counts.global_batch_size) == (3 * sum(own), sum(own))
    if len(batch) != len(outputs):
        assert size % ranks == 0
        assert longest <= size < longest + ranks
