"""Does a reference give the rows that the same operations on the batch itself give?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rpcrl.batch.data_proto import DataProto
from rpcrl.batch.reference import BatchRef, Stored, Want, schema_of
from rpcrl.errors import BatchError, UsageError


class Shelf:
    """Keeps batches, and counts the rows and columns that are read."""

    run_id = "here"

    def __init__(self) -> None:
        self.batches: list[DataProto] = []
        self.reads: list[tuple[int, int, tuple[str, ...]]] = []

    def put(self, batch: DataProto) -> BatchRef:
        self.batches.append(batch)
        stored = Stored("g", f"w{len(self.batches)}", 0, len(self.batches) - 1, len(batch))
        return BatchRef.of_stored(stored, schema_of(batch), batch.meta_info, reader=self)

    def read(self, wants: Sequence[Want]) -> list[DataProto]:
        self.reads += [(want.stored.key, len(want.rows), want.names) for want in wants]
        found = []
        for want in wants:
            batch = self.batches[want.stored.key]
            tensors = [name for name in want.names if name not in batch.non_tensor_batch]
            others = [name for name in want.names if name in batch.non_tensor_batch]
            found.append(batch.select(tensors, others, []).select_idxs(want.rows))
        return found


def batch_of(first: int, count: int) -> DataProto:
    numbers = list(range(first, first + count))
    return DataProto.from_dict({"x": torch.tensor(numbers, dtype=torch.float64)}, {"n": [f"r{i}" for i in numbers]})


def same(left: DataProto, right: DataProto) -> None:
    assert len(left) == len(right)
    assert list(left._columns() or {}) == list(right._columns() or {})
    for name, column in (right._columns() or {}).items():
        assert torch.equal(left._columns()[name], column), name
    for name, values in right.non_tensor_batch.items():
        assert list(left.non_tensor_batch[name]) == list(values), name
    assert left.meta_info == right.meta_info


@given(
    sizes=st.lists(st.integers(0, 5), min_size=1, max_size=4),
    seed=st.integers(0, 1_000),
    parts=st.integers(1, 5),
    repeats=st.integers(1, 3),
    inline=st.booleans(),
)
def test_a_reference_behaves_as_its_batch(sizes: list[int], seed: int, parts: int, repeats: int, inline: bool) -> None:
    shelf = Shelf()
    batches = [batch_of(10 * number, size) for number, size in enumerate(sizes)]
    refs = [BatchRef.of_batch(b) if inline and i % 2 else shelf.put(b) for i, b in enumerate(batches)]
    whole, ref = DataProto.concat(batches), BatchRef.concat(refs)
    random = np.random.default_rng(seed)

    def both(operate: Any) -> None:
        nonlocal whole, ref
        whole, ref = operate(whole), operate(ref)
        if any(isinstance(source, Stored) for layer in ref._layers for source in layer.sources):
            ref = BatchRef.from_plain(ref.to_plain(), reader=shelf)

    order = random.permutation(len(whole))
    both(lambda batch: batch.reorder(order))
    cuts = random.permutation(parts)
    both(lambda batch: type(batch).concat([batch.chunk(parts, uneven=True)[i] for i in cuts]))
    tags = DataProto.from_dict({"t": torch.arange(len(whole))}, {}, {"k": 1})
    both(lambda batch: batch.union(tags))
    both(lambda batch: batch.repeat(repeats, interleave=bool(seed % 2)))
    both(lambda batch: batch[len(batch) // 3 :])
    same(ref.fetch(), whole)
    same(ref.select(["t"], ["n"], []).fetch(), whole.select(["t"], ["n"], []))
    assert list(ref["n"]) == list(whole.non_tensor_batch["n"])


def test_only_the_rows_and_columns_that_are_asked_for_are_read() -> None:
    shelf = Shelf()
    ref = BatchRef.concat([shelf.put(batch_of(0, 4)), shelf.put(batch_of(4, 4))])
    assert ref[5:7]["x"].tolist() == [5.0, 6.0]
    assert shelf.reads == [(1, 2, ("x",))]
    assert [stored.key for stored in ref[5:7].keepers()] == [1]
    plain = ref[5:7].to_plain()
    assert [sources for _, sources, _, _ in plain["layers"]] == [[["g", "w2", 0, 1, 4]]], "and no other is told of"


def test_what_cannot_be_done_without_reading_is_refused() -> None:
    shelf = Shelf()
    ref = shelf.put(batch_of(0, 4))
    with pytest.raises(BatchError, match="not read to be compared"):
        ref.union(batch_of(0, 4))
    same(ref.union(batch_of(7, 4), overwrite=True).fetch(), batch_of(7, 4))
    with pytest.raises(BatchError, match="has 4 rows, the other has 3"):
        ref.union(DataProto.from_dict({"t": torch.arange(3)}))
    with pytest.raises(BatchError, match="part 1 has"):
        BatchRef.concat([ref, ref.select(["x"], [])])
    with pytest.raises(BatchError, match="single row"):
        ref[0]
    with pytest.raises(BatchError, match="names each of the 4 rows once"):
        ref.reorder([0, 0, 1, 2])
    with pytest.raises(UsageError, match="lost the way"):
        BatchRef.from_plain(ref.to_plain(), reader=None).fetch()
    assert "4 rows of x, n" in repr(ref)
    assert shelf.reads == []


class Lease:
    def __init__(self, identity: str, key: int) -> None:
        self.identity, self.key = identity, key


def test_a_rolling_buffer_keeps_only_what_its_rows_are_in() -> None:
    shelf = Shelf()

    def made(number: int) -> BatchRef:
        batch = batch_of(4 * number, 4)
        shelf.batches.append(batch)
        stored = Stored("g", "w", 0, len(shelf.batches) - 1, 4)
        return BatchRef.of_stored(stored, schema_of(batch), {}, reader=shelf, lease=Lease("w", stored.key))

    buffer = made(0)
    for number in range(1, 20):
        buffer = BatchRef.concat([buffer[-4:], made(number)])
    [layer] = buffer._layers
    assert [stored.key for stored in buffer.keepers()] == [lease.key for lease in layer.leases] == [18, 19]
    assert len(layer.sources) == 2
    assert buffer["x"].tolist() == [float(row) for row in range(72, 80)]
    empty = buffer[:0]
    assert len(empty.fetch()) == 0, "an empty reference still knows its columns"


def test_batches_and_references_are_joined() -> None:
    shelf = Shelf()
    joined = BatchRef.concat([shelf.put(batch_of(0, 2)), batch_of(2, 2)])
    same(joined.fetch(), batch_of(0, 4))
    with pytest.raises(BatchError, match="part 1 is of type int"):
        BatchRef.concat([joined, 3])  # type: ignore[list-item]
