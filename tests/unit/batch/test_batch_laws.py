"""Do the laws hold for every kind of column? What is cut goes together again, and nothing changes its input."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, get_args

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rpcrl.batch import splittable
from rpcrl.batch.compare import first_difference
from rpcrl.batch.data_proto import DataProto
from rpcrl.batch.folding import fold_batch_dim, unfold_batch_dim
from rpcrl.batch.padding import pad_to_multiple, unpad
from rpcrl.dispatch.mode import Arguments, CallShape, Dispatch
from rpcrl.dispatch.splitting import UnevenPolicy, unpad_result
from rpcrl.errors import BatchError, DispatchError
from tests.batch_samples import assert_same, contents, sample
from tests.batch_strategies import batches


class _Group:
    def __init__(self, world_size: int) -> None:
        self.world_size = world_size

    def mesh(self, name: str) -> Any:
        raise NotImplementedError(name)


def echo(batch: Any, world_size: int, policy: UnevenPolicy) -> tuple[Any, list[int]]:
    """Split a batch over ranks, hand every part back, and collect; returns the result and the parts' sizes."""
    shape, group = CallShape("role.echo", policy), _Group(world_size)
    sent = Dispatch.DP_COMPUTE_PROTO.dispatch(group, shape, Arguments((batch,), {}))
    parts = [part.args[0] for part in sent.per_rank]
    assert len(parts) == world_size
    back = Dispatch.DP_COMPUTE_PROTO.collect(group, shape.sent(sent), parts)
    return unpad_result(back, sent.num_padding, sent.num_rows, call="role.echo"), [len(part) for part in parts]


@pytest.mark.parametrize("policy", get_args(UnevenPolicy))
@pytest.mark.parametrize("form", ["DataProto", "TensorDict"])
def test_p44_split_echo_collect_is_the_identity_for_all_sizes(policy: UnevenPolicy, form: str) -> None:
    for rows in range(41):
        data = sample(rows, ragged=form == "TensorDict" and rows % 7 == 3).select(["ids", "half", "mask"])
        batch = data if form == "DataProto" else data.select(None, ["uid"]).to_tensordict()
        for world_size in range(1, 9):
            left_over = rows % world_size
            if left_over and (policy == "error" or (policy == "drop" and rows < world_size)):
                with pytest.raises(DispatchError, match=f"cannot split {rows} rows into {world_size} equal parts"):
                    echo(batch, world_size, policy)
                continue
            back, sizes = echo(batch, world_size, policy)
            assert max(sizes) - min(sizes) <= (1 if policy == "uneven" else 0)
            expected = batch[: rows - left_over] if policy == "drop" else batch
            if form == "DataProto":
                assert_same(back, expected)
            else:
                assert type(back) is type(batch)
                assert first_difference(dict(back.items()), dict(expected.items())) is None


@given(batches(), st.integers(1, 8), st.sampled_from(["pad", "uneven"]))
def test_p44_any_kind_of_column_comes_back_as_it_went(data: DataProto, world_size: int, policy: UnevenPolicy) -> None:
    assert_same(echo(data, world_size, policy)[0], data)


@given(batches(), st.integers(1, 5))
def test_concat_undoes_chunk_and_split(data: DataProto, parts: int) -> None:
    before = copy.deepcopy(contents(data))
    assert_same(DataProto.concat(data.chunk(parts, uneven=True)), data)
    assert_same(DataProto.concat(data.split(parts)), data)
    assert first_difference(before, contents(data)) is None


@given(batches(st.integers(1, 12)), st.integers(1, 30))
def test_unpad_undoes_padding(data: DataProto, multiple: int) -> None:
    padded, added = pad_to_multiple(data, multiple)
    assert padded.non_tensor_batch["row"].tolist() == [row % len(data) for row in range(len(data) + added)]
    assert_same(unpad(padded, added), data)
    for candidate, row in (("first", 0), ("last", len(data) - 1)):
        longer = data.padding(multiple, candidate)
        assert longer.non_tensor_batch["row"].tolist()[len(data) :] == [row] * multiple
        assert_same(unpad(longer, multiple), data)


@given(batches(), st.integers(1, 4))
def test_tensordicts_are_padded_and_cut_as_batches_are(data: DataProto, multiple: int) -> None:
    whole = data.select(meta_info_keys=[]).to_tensordict()
    if len(data):
        padded, added = pad_to_multiple(whole, multiple)
        assert type(padded) is type(whole)
        expected = pad_to_multiple(data.select(meta_info_keys=[]), multiple)[0]
        assert_same(DataProto.from_tensordict(padded), _objects(expected))
        assert_same(DataProto.from_tensordict(unpad(padded, added)), _objects(data.select(meta_info_keys=[])))
    back = splittable.concat(splittable.chunk(whole, multiple, uneven=True))
    assert_same(DataProto.from_tensordict(back), _objects(data.select(meta_info_keys=[])))


def _objects(data: DataProto) -> DataProto:
    """Give columns of Python values the form that other forms give back: one entry per row."""
    others = {key: list(column) for key, column in data.non_tensor_batch.items()}
    return DataProto.from_dict(data._columns(), others, data.meta_info)


@given(batches(ragged=False), st.integers(1, 4))
def test_unfolding_undoes_folding(data: DataProto, rows: int) -> None:
    data = data.select(meta_info_keys=[])
    if len(data) % rows:
        with pytest.raises(BatchError, match=f"{len(data)} rows cannot be folded into {rows}"):
            fold_batch_dim(data, rows)
        return
    folded = fold_batch_dim(data, rows)
    assert len(folded) == rows
    assert folded.non_tensor_batch["row"].shape == (rows, len(data) // rows)
    assert_same(unfold_batch_dim(folded), data)


@given(batches())
def test_other_forms_and_back(data: DataProto) -> None:
    facts = data.meta_info
    assert_same(DataProto.from_tensordict(data.to_tensordict()), _objects(data))
    if len(data):
        stacked = _objects(DataProto.from_dict(_stacked(data), data.non_tensor_batch, facts))
        assert_same(DataProto.from_items(list(data)), stacked)
        assert [row["row"] for row in data.to_list()] == list(range(len(data)))
        plain = data.select(non_tensor_batch_keys=["row"])
        assert_same(DataProto.from_list(plain.to_list(), facts), stacked.select(non_tensor_batch_keys=["row"]))


def _stacked(data: DataProto) -> dict[str, Any]:
    """A jagged column whose rows happen to be equally long is stacked densely."""
    columns = dict(data._columns() or {})
    if "jagged" in columns and len({row.shape for row in columns["jagged"].unbind()}) == 1:
        columns["jagged"] = torch.stack(list(columns["jagged"].unbind()))
    return columns


@given(st.data())
def test_p51_a_conflict_names_key_shapes_and_the_first_differing_place(drawn: st.DataObject) -> None:
    rows, width = drawn.draw(st.integers(1, 6)), drawn.draw(st.integers(1, 4))
    left = torch.full((rows, width), float("nan"))
    places = drawn.draw(st.sets(st.tuples(st.integers(0, rows - 1), st.integers(0, width - 1)), max_size=4))
    right = left.clone()
    for place in places:
        right[place] = 7.0
    one, other = DataProto.from_dict({"value": left}), DataProto.from_dict({"value": right})
    if not places:
        assert_same(one.union(other), one)
        return
    with pytest.raises(BatchError) as caught:
        one.union(other)
    shape = f"float32[{rows}, {width}]"
    first = list(min(places))
    assert "'value'" in str(caught.value)
    assert str(caught.value).count(shape) == 2
    assert f"first difference at {first}: nan and 7.0" in str(caught.value)


@given(st.data())
def test_p51_object_columns_are_compared_to_the_bottom(drawn: st.DataObject) -> None:
    data = drawn.draw(batches(st.integers(1, 6)))
    row = drawn.draw(st.integers(0, len(data) - 1))
    deep = [{"a": [number, (float("nan"), np.arange(3))]} for number in range(len(data))]
    other = copy.deepcopy(deep)
    one = DataProto.from_dict(None, {"deep": deep})
    assert_same(one.union(DataProto.from_dict(None, {"deep": other})), one)
    other[row]["a"][1][1][2] = 9
    with pytest.raises(BatchError) as caught:
        one.union(DataProto.from_dict(None, {"deep": other}))
    assert f"first difference at [{row}]['a'][1][1][2]: " in str(caught.value)


METHODS: dict[str, Callable[[DataProto], Any]] = {
    "rows": lambda data: [data[0], data[-1], data[[0, 0]], data[::2], list(data)],
    "chunk": lambda data: [data.chunk(3, uneven=True), data.split(2)],
    "concat": lambda data: DataProto.concat([data, data]),
    "repeat": lambda data: [
        data.repeat(2),
        data.repeat(2, interleave=False),
        data.sample_level_repeat([2] * len(data)),
    ],
    "reorder": lambda data: data.reorder(list(range(len(data)))[::-1]),
    "select": lambda data: [data.select(), data.select([], ["row"], []), data.select(deepcopy=True)],
    "rename": lambda data: data.rename("row", "line"),
    "union": lambda data: [data.union(data), data.union(data, overwrite=True)],
    "padding": lambda data: [data.padding(2), data.padding(1, "first"), pad_to_multiple(data, 5)],
    "folding": lambda data: [fold_batch_dim(data, 1), data.unfold_column_chunks(2)],
    "forms": lambda data: [data.to_tensordict(), data.to_list(), repr(data), data.get_data_info(), data.to("cpu")],
    "iterator": lambda data: list(data.make_iterator(1, 2, 3, {"shuffle": True})),
    "dispatch": lambda data: [echo(data, 3, "pad"), echo(data, 3, "uneven")],
}


@pytest.mark.parametrize("name", METHODS)
@given(data=batches(st.integers(1, 8), ragged=False))
def test_no_method_changes_its_input(name: str, data: DataProto) -> None:
    before = copy.deepcopy(contents(data))
    METHODS[name](data)
    assert first_difference(before, contents(data)) is None
