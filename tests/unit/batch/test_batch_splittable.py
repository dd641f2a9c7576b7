"""Can batches of every type be cut and joined?"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import NonTensorData, TensorDict

from rpcrl.batch.compare import first_difference
from rpcrl.batch.splittable import Splittable, chunk, concat, is_splittable
from rpcrl.errors import BatchError
from tests.batch_samples import assert_same, jagged, sample


class Words:
    """A user's own batch: no base class, nothing of rpcrl."""

    def __init__(self, words: list[str]) -> None:
        self.words = words

    def __len__(self) -> int:
        return len(self.words)

    def chunk(self, chunks: int, *, uneven: bool = False) -> list[Words]:
        return [Words(self.words[start::chunks]) for start in range(chunks)]

    @staticmethod
    def concat(data: list[Words]) -> Words:
        return Words([word for part in data for word in part.words])


def test_a_users_own_batch_needs_no_base_class() -> None:
    words = Words(["a", "b", "c"])
    assert isinstance(words, Splittable)
    assert [part.words for part in chunk(words, 2, uneven=True)] == [["a", "c"], ["b"]]
    assert concat(chunk(words, 2)).words == ["a", "c", "b"]


def test_data_protos_are_splittable() -> None:
    data = sample(7)
    assert is_splittable(data)
    assert_same(concat(chunk(data, 3, uneven=True)), data)


@pytest.mark.parametrize("parts", [1, 2, 3, 5, 9])
def test_tensordicts_are_cut_evenly_balanced_with_jagged_and_python_values(parts: int) -> None:
    whole = TensorDict(
        {
            "x": torch.arange(15).reshape(5, 3),
            "text": jagged([1, 0, 2, 3, 1]),
            "positions": jagged([1, 1, 2, 3, 1], width=2),
            "name": ["a", "b", "c", "d", "e"],
            "fact": NonTensorData("same", batch_size=[5]),
        },
        batch_size=[5],
    )
    assert is_splittable(whole)
    pieces = chunk(whole, parts, uneven=True)
    assert len(pieces) == parts
    assert max(len(piece) for piece in pieces) - min(len(piece) for piece in pieces) <= 1
    joined = concat(pieces)
    for key in ("x", "text", "positions"):
        assert first_difference(joined[key], whole[key]) is None
    assert joined["positions"]._ragged_idx == 2
    assert joined.get("name").tolist() == ["a", "b", "c", "d", "e"]
    assert joined["fact"] == "same"


@pytest.mark.parametrize("value", [None, 3, "text", torch.zeros(4), {"a": 1}])
def test_p38_what_cannot_be_split_is_named(value: Any) -> None:
    assert not is_splittable(value)
    with pytest.raises(BatchError, match=f"{type(value).__name__} cannot be split"):
        chunk(value, 2)
    with pytest.raises(BatchError, match=f"{type(value).__name__} cannot be split"):
        concat([value])


def test_p38_parts_of_different_types_are_named() -> None:
    with pytest.raises(BatchError, match="part 0 is a DataProto, part 1 a NoneType"):
        concat([sample(1), None])
    with pytest.raises(BatchError, match="list of batches is empty"):
        concat([])
    with pytest.raises(BatchError, match="part 1 has no entry 'x'"):
        concat([TensorDict({"x": torch.zeros(1)}, [1]), TensorDict({"y": torch.zeros(1)}, [1])])
    with pytest.raises(BatchError, match="without a batch dimension"):
        chunk(TensorDict({"x": torch.zeros(1)}, []), 1)
