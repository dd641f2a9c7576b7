"""Balanced rows: on a batch, on a reference that never fetches the rest, and through a method that answers by row."""

import numpy as np
import pytest
import torch

from rpcrl.batch.data_proto import DataProto
from rpcrl.batch.reference import BatchRef
from rpcrl.errors import BatchError
from rpcrl.trainer.balancing import balanced, dealt, in_balance, row_lengths

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


def test_a_ranks_run_has_its_rows_of_every_mini_batch_in_their_order():
    rows = dealt(batch(), 2, mini_batch_rows=4, balance=False).batch["row"].tolist()
    assert rows == [0, 1, 4, 5, 2, 3, 6, 7], "rank 0 has half of 0-3 and half of 4-7"
    assert dealt(batch(), 1, mini_batch_rows=4, balance=True).batch["row"].tolist() == list(range(8))


def test_balance_moves_rows_between_the_ranks_and_never_between_mini_batches():
    rows = dealt(batch(), 2, mini_batch_rows=4, balance=True)
    order, lengths = rows.batch["row"].tolist(), rows.batch["length"].tolist()
    assert sorted(order[0:2] + order[4:6]) == [0, 1, 2, 3]
    assert sorted(order[2:4] + order[6:8]) == [4, 5, 6, 7]
    assert (sum(lengths[0:2]), sum(lengths[4:6])) in ((16, 15), (15, 16))
    assert sorted((sum(lengths[2:4]), sum(lengths[6:8]))) == [2, 3]


def test_a_mini_batch_that_the_ranks_cannot_share_is_an_error():
    with pytest.raises(BatchError, match=r"a mini-batch of 4 samples .* does not divide over 3 dp ranks"):
        dealt(batch(), 3, mini_batch_rows=4, balance=False)
