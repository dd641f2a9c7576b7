"""Do the laws hold for every size: nothing changes its input, and what is cut goes together again?"""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rpcrl.batch.data_proto import DataProto
from rpcrl.batch.padding import pad_to_multiple, unpad
from rpcrl.batch.rows import bounds
from rpcrl.errors import BatchError
from tests.batch_samples import assert_same, contents, sample

ROWS = st.integers(0, 40)
PARTS = st.integers(1, 8)


@pytest.mark.parametrize("rows", range(41))
def test_p44_every_size_is_cut_into_exactly_n_balanced_parts_and_joined_again(rows: int) -> None:
    data = sample(rows, ragged=rows % 5 == 1)
    for parts in range(1, 9):
        pieces = data.chunk(parts, uneven=True)
        sizes = [len(piece) for piece in pieces]
        assert len(pieces) == parts
        assert sum(sizes) == rows
        assert max(sizes) - min(sizes) <= 1
        assert sizes == sorted(sizes, reverse=True)
        assert_same(DataProto.concat(pieces), data)
        if rows % parts == 0:
            even = data.chunk(parts)
            assert {len(piece) for piece in even} == {rows // parts}
            assert_same(DataProto.concat(even), data)
        else:
            with pytest.raises(BatchError, match=f"{rows} / {parts} leaves {rows % parts} over"):
                data.chunk(parts)


@given(ROWS, PARTS)
def test_bounds_meet_and_cover(rows: int, parts: int) -> None:
    cuts = bounds(rows, parts, uneven=True)
    assert [cuts[0][0], cuts[-1][1]] == [0, rows]
    assert all(left[1] == right[0] for left, right in pairwise(cuts))


@given(st.integers(1, 40), st.integers(1, 100))
def test_padding_cycles_from_the_start_and_unpadding_undoes_it(rows: int, multiple: int) -> None:
    data = sample(rows)
    padded, added = pad_to_multiple(data, multiple)
    assert len(padded) == rows + added
    assert len(padded) % multiple == 0
    assert added < multiple
    assert padded.non_tensor_batch["uid"].tolist() == [f"u{row % rows}" for row in range(len(padded))]
    assert_same(unpad(padded, added), data)


@given(st.integers(0, 12), st.integers(0, 5))
def test_repeat_has_two_orders(rows: int, times: int) -> None:
    data = sample(rows)
    by_row = [row for row in range(rows) for _ in range(times)]
    by_batch = list(range(rows)) * times
    assert_same(data.repeat(times), data.select_idxs(by_row))
    assert_same(data.repeat(times, interleave=False), data.select_idxs(by_batch))
    assert data.repeat(times).non_tensor_batch["uid"].tolist() == [f"u{row}" for row in by_row]
    assert data.repeat(times, interleave=False).batch["ids"][:, 0].tolist() == [3 * row for row in by_batch]


@given(st.data())
def test_rows_are_selected_as_python_lists_are(data: st.DataObject) -> None:
    rows = data.draw(st.integers(1, 12))
    batch = sample(rows)
    names = batch.non_tensor_batch["uid"].tolist()
    index = data.draw(st.lists(st.integers(-rows, rows - 1), max_size=20))
    cut = data.draw(st.slices(rows))
    mask = data.draw(st.lists(st.booleans(), min_size=rows, max_size=rows))
    for form in (list, np.array, torch.tensor):
        taken = batch[form(index)] if index else batch[[]]
        assert taken.non_tensor_batch["uid"].tolist() == [names[row] for row in index]
        assert taken.batch["ids"][:, 0].tolist() == [3 * (row % rows) for row in index]
        assert len(batch[form(mask)]) == sum(mask)
    assert batch[cut].non_tensor_batch["uid"].tolist() == names[cut]
    assert batch[cut].batch["half"].tolist() == list(range(rows))[cut]


@given(ROWS, st.integers(1, 50))
def test_split_and_concat_are_the_identity(rows: int, size: int) -> None:
    data = sample(rows)
    pieces = data.split(size)
    assert [len(piece) for piece in pieces[:-1]] == [size] * (len(pieces) - 1)
    assert_same(DataProto.concat(pieces), data)


@given(st.permutations(range(9)))
def test_reorder_and_its_inverse_are_the_identity(order: list[int]) -> None:
    data = sample(9)
    assert_same(data.reorder(order).reorder(np.argsort(order)), data)


OTHER = DataProto.from_dict({"more": torch.ones(6)}, {"name": list("abcdef")}, {"other": 1})

METHODS: dict[str, Callable[[DataProto], Any]] = {
    "[int]": lambda data: data[2],
    "[slice]": lambda data: data[1:4],
    "[list]": lambda data: data[[5, 0]],
    "[mask]": lambda data: data[np.arange(6) > 2],
    "slice": lambda data: data.slice(1, 6, 2),
    "select": lambda data: data.select(["ids"], ["uid"], ["step"]),
    "select all": lambda data: data.select(),
    "rename": lambda data: data.rename("ids", "numbers"),
    "union": lambda data: data.union(OTHER),
    "union with itself": lambda data: data.union(data),
    "repeat": lambda data: data.repeat(2),
    "repeat rows": lambda data: data.sample_level_repeat([0, 1, 2, 0, 1, 3]),
    "chunk": lambda data: data.chunk(3),
    "uneven chunk": lambda data: data.chunk(4, uneven=True),
    "split": lambda data: data.split(4),
    "concat": lambda data: DataProto.concat([data, data]),
    "concat of one": lambda data: DataProto.concat([data]),
    "reorder": lambda data: data.reorder([5, 4, 3, 2, 1, 0]),
    "to": lambda data: data.to("cpu"),
    "pad": lambda data: pad_to_multiple(data, 4)[0],
    "pad by nothing": lambda data: pad_to_multiple(data, 3)[0],
    "unpad": lambda data: unpad(data, 0),
    "make_iterator": lambda data: list(data.make_iterator(2, 2, 1, {"shuffle": True})),
    "to_tensordict": lambda data: data.to_tensordict(),
    "to_list": lambda data: data.to_list(),
    "repr": lambda data: [repr(data), data.get_data_info(), "ids" in data, len(data)],
}


@pytest.mark.parametrize("with_tensordict", [False, True])
@pytest.mark.parametrize("name", METHODS)
def test_no_method_changes_its_input_or_shares_a_dict_with_it(name: str, with_tensordict: bool) -> None:
    data = sample(6, nested={"list": [1, {"deep": 2}]}, metrics={"loss": [1.0]})
    if with_tensordict:
        assert data.batch is not None
    before = contents(data)
    tensors = {key: column.clone() for key, column in (before["tensors"] or {}).items()}
    others = {key: column.copy() for key, column in data.non_tensor_batch.items()}
    facts = copy.deepcopy(data.meta_info)

    made = METHODS[name](data)
    results = [part for part in (made if isinstance(made, list) else [made]) if hasattr(part, "meta_info")]
    for result in results:
        result.meta_info["added"] = 1
        for key in ("nested", "metrics"):
            result.meta_info.get(key, {})["added"] = 1
        result.meta_info.get("nested", {}).get("list", [0]).append("added")
        result.non_tensor_batch["added"] = np.zeros(len(result) if isinstance(result, DataProto) else 1, dtype=object)
        if isinstance(result, DataProto):
            result.batch["added"] = torch.zeros(len(result))

    expected = DataProto.from_dict(tensors, others, facts)
    assert_same(data, expected)
    assert len({id(result.meta_info) for result in results}) == len(results)
