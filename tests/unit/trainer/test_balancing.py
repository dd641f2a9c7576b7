"""Balanced rows: on a batch, on a reference that never fetches the rest, and through a method that answers by row."""

import numpy as np
import torch

from rpcrl.batch.data_proto import DataProto
from rpcrl.batch.reference import BatchRef
from rpcrl.trainer.balancing import balanced, in_balance, row_lengths

LENGTHS = [8, 8, 8, 7, 2, 1, 1, 1]


def batch():
    mask = torch.arange(8) < torch.tensor(LENGTHS).unsqueeze(1)
    return DataProto.from_dict(
        tensors={"attention_mask": mask.long(), "row": torch.arange(8), "length": torch.tensor(LENGTHS)},
        non_tensors={"uid": np.array([f"u{row}" for row in range(8)], dtype=object)},
    )


def sums(rows):
    lengths = row_lengths(rows)
    return [sum(lengths[:4]), sum(lengths[4:])]


def test_halves_of_a_batch_have_about_the_same_number_of_tokens():
    assert sums(batch()) == [31, 5]
    rows, order = balanced(batch(), 2)
    assert sums(rows) == [18, 18]
    assert rows.batch["row"].tolist() == order
    assert rows.non_tensor_batch["uid"].tolist() == [f"u{row}" for row in order]


def test_a_reference_is_reordered_and_fetches_only_the_lengths():
    fetched = []

    class Watched(BatchRef):
        def fetch(self, names=None):
            fetched.append(names)
            return super().fetch(names)

    reference = Watched.of_batch(batch())
    rows, order = balanced(reference, 2, column="length")
    assert isinstance(rows, BatchRef)
    assert fetched == [["length"]]
    whole = rows.fetch()
    assert whole.batch["row"].tolist() == order
    assert sums(whole) == [18, 18]


def test_the_answer_comes_back_in_the_batchs_order():
    seen = []

    def method(rows):
        seen.append(sums(rows))
        return DataProto.from_dict(tensors={"answer": rows.batch["row"] * 10})

    assert in_balance(method, batch(), 2).batch["answer"].tolist() == [row * 10 for row in range(8)]
    assert seen == [[18, 18]]


def test_rows_that_do_not_divide_stay():
    rows, order = balanced(batch(), 3)
    assert order == list(range(8))
    assert torch.equal(rows.batch["row"], torch.arange(8))
