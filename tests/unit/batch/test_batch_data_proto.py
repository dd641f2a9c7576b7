"""What does a batch take, give and refuse?"""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

from rpcrl.batch.data_proto import DataProto, DataProtoItem
from rpcrl.batch.padding import pad_to_multiple, unpad
from rpcrl.errors import BatchError
from tests.batch_samples import assert_same, jagged, sample

ROOT = Path(__file__).parents[3]


def test_from_dict_leaves_the_callers_dicts_alone_and_keeps_lists_as_entries() -> None:
    tensors: dict[str, Any] = {"x": torch.zeros(2)}
    others: dict[str, Any] = {"pairs": [[1, 2], [3, 4]], "tensors": [torch.zeros(2), torch.zeros(2)]}
    facts = {"a": {"b": 1}}
    data = DataProto.from_dict(tensors, others, facts)
    data.meta_info["a"]["b"] = 2
    data.batch["y"] = torch.ones(2)
    data.non_tensor_batch["z"] = np.array([1, 2], dtype=object)
    assert list(tensors) == ["x"]
    assert others["pairs"] == [[1, 2], [3, 4]]
    assert list(others) == ["pairs", "tensors"]
    assert facts == {"a": {"b": 1}}
    assert data.non_tensor_batch["pairs"].shape == (2,)
    assert data.non_tensor_batch["pairs"][1] == [3, 4]
    assert data.non_tensor_batch["tensors"].shape == (2,)


def test_p38_a_column_of_another_length_is_named_beside_the_pivot() -> None:
    with pytest.raises(BatchError, match=r"'b' has 2 rows but tensor column 'a' has 3"):
        DataProto.from_dict({"a": torch.zeros(3), "b": torch.zeros(2)})
    with pytest.raises(BatchError, match=r"non-tensor column 'u' has 1 rows but tensor column 'a' has 3"):
        DataProto.from_dict({"a": torch.zeros(3)}, {"u": ["x"]})
    with pytest.raises(BatchError, match=r"non-tensor column 'v' has 1 rows but non-tensor column 'u' has 2"):
        DataProto.from_dict(None, {"u": [1, 2], "v": [1]})
    late = sample(3)
    late.non_tensor_batch["late"] = np.array([1], dtype=object)
    with pytest.raises(BatchError, match=r"'late' has 1 rows"):
        late.chunk(3)
    late.non_tensor_batch["late"] = [1, 2, 3]  # type: ignore[assignment]
    with pytest.raises(BatchError, match=r"'late' is of type list; assign a numpy array"):
        late.repeat(2)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(
    ("tensors", "others", "text"),
    [
        ({"a": torch.tensor(1)}, None, "'a' is a scalar"),
        ({"a": [1, 2]}, None, "'a' is of type list; expected a torch.Tensor"),
        ({"a": torch.nested.nested_tensor([torch.zeros(1)], layout=torch.strided)}, None, "layout=torch.jagged"),
        (None, {"a": torch.zeros(2)}, "'a' is a tensor"),
        (None, {"a": "text"}, "'a' is of type str"),
        (None, {"a": None}, "'a' is of type NoneType"),
        (None, {"a": np.array(1)}, "without rows"),
    ],
)
def test_p38_a_value_that_is_no_column_is_named_with_its_type(tensors: Any, others: Any, text: str) -> None:
    with pytest.raises(BatchError, match=text):
        DataProto.from_dict(tensors, others)


def test_single_dict_sorts_tensors_from_the_rest() -> None:
    data = DataProto.from_single_dict({"x": torch.zeros(2), "n": np.arange(2), "s": ["a", "b"]}, {"m": 1})
    assert list(data.batch.keys()) == ["x"]
    assert list(data.non_tensor_batch) == ["n", "s"]
    assert data.meta_info == {"m": 1}


def test_the_constructor_takes_a_tensordict_of_one_batch_dimension() -> None:
    given = TensorDict({"x": torch.zeros(2, 3)}, batch_size=[2])
    data = DataProto(given, {"u": ["a", "b"]}, {"m": 1})
    data.batch["y"] = torch.ones(2)
    assert list(given.keys()) == ["x"]
    with pytest.raises(BatchError, match=r"batch_size \[2, 3\]"):
        DataProto(TensorDict({"x": torch.zeros(2, 3)}, batch_size=[2, 3]))
    with pytest.raises(BatchError, match="of type dict; expected a TensorDict"):
        DataProto({"x": torch.zeros(2)})  # type: ignore[arg-type]
    with pytest.raises(BatchError, match="from_tensordict"):
        DataProto(TensorDict({"x": NonTensorStack("a", "b")}, batch_size=[2]))


def test_the_tensordict_that_was_handed_out_is_the_truth() -> None:
    data = sample(4)
    data.batch["new"] = torch.arange(4)
    del data.batch["half"]
    assert data[1:3].batch["new"].tolist() == [1, 2]
    assert "half" not in data
    data.batch = TensorDict({"only": torch.zeros(4)}, batch_size=[4])
    assert list(data.repeat(2).batch.keys()) == ["only"]


def test_a_number_gives_one_row() -> None:
    data = sample(3)
    for number in (1, -2, np.int64(1), np.uint8(1), torch.tensor(1), np.array(1)):
        row = data[number]
        assert isinstance(row, DataProtoItem)
        assert row.batch["ids"].tolist() == [3, 4, 5]
        assert row.batch["positions"].shape == (3, 2)
        assert row.non_tensor_batch["uid"] == "u1"
        assert row.meta_info["step"] == 3
    assert [row.non_tensor_batch["uid"] for row in data] == ["u0", "u1", "u2"]


@pytest.mark.parametrize(
    ("index", "text"),
    [
        (5, "row 5 does not exist: the batch has 3 rows"),
        ([0, -4], "row -4 does not exist"),
        (torch.tensor([3]), "row 3 does not exist"),
        ([True, False], "mask has 2 entries but the batch has 3 rows"),
        ([0.0, 1.0], "not by float64"),
        ([[0], [1]], r"shape \(2, 1\)"),
        ([[0], [1, 2]], "not flat"),
        ("uid", "not indexed by str"),
        (True, "name no row"),
        ((0, 1), "not indexed by tuple"),
    ],
)
def test_an_index_that_names_no_rows_is_refused(index: Any, text: str) -> None:
    with pytest.raises(BatchError, match=text):
        sample(3)[index]


def test_a_missing_row_is_an_index_error_too() -> None:
    with pytest.raises(IndexError):
        sample(3)[3]


def test_batches_without_rows_or_without_columns_work() -> None:
    empty = sample(0)
    for made in (empty[:], empty[[]], empty.repeat(3), empty.chunk(4)[3], empty.reorder([]), *empty.split(2)):
        assert_same(made, empty)
    assert_same(DataProto.concat([empty, sample(2, ragged=False)]), sample(2, ragged=False))
    nothing = DataProto()
    assert len(nothing) == 0
    assert nothing.batch is None
    assert_same(nothing.repeat(2), nothing)
    assert len(nothing.chunk(3)) == 3
    assert nothing.union(sample(2)).non_tensor_batch["uid"].tolist() == ["u0", "u1"]
    assert len(sample(2).union(nothing)) == 2
    assert len(sample(2).select([], [])) == 2
    only_objects = DataProto.from_dict(None, {"u": [1, 2, 3]})
    assert only_objects.batch is None
    assert [len(part) for part in only_objects.chunk(2, uneven=True)] == [2, 1]
    assert only_objects[0].batch is None
    assert only_objects.to("cpu").non_tensor_batch["u"].tolist() == [1, 2, 3]


def test_read_only_arrays_and_views_are_taken_as_they_are() -> None:
    frozen = np.array(["a", "b", "c", "d"], dtype=object)
    frozen.flags.writeable = False
    data = DataProto.from_dict({"t": torch.arange(8).reshape(2, 4).t()}, {"f": frozen, "n": np.arange(8)[::2]})
    index = np.array([3, 0])
    index.flags.writeable = False
    taken = data[index]
    assert taken.non_tensor_batch["f"].tolist() == ["d", "a"]
    assert taken.batch["t"].tolist() == [[3, 7], [0, 4]]
    assert taken.non_tensor_batch["n"].tolist() == [6, 0]


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.bool, torch.int8, torch.uint16, torch.uint64, torch.float8_e4m3fn]
)
def test_every_dtype_goes_through(dtype: torch.dtype) -> None:
    data = DataProto.from_dict({"x": torch.tensor([0, 1, 1, 0]).to(dtype)})
    assert data.repeat(2)[[1, 3]].batch["x"].dtype is dtype
    assert_same(DataProto.concat(data.chunk(2)), data)
    assert_same(data.union(DataProto.from_dict({"x": data.batch["x"].clone()})), data)


def test_select_names_what_is_missing_and_the_nearest() -> None:
    data = sample(2)
    chosen = data.select(["mask", "ids"], [], ["step"])
    assert list(chosen.batch.keys()) == ["mask", "ids"] or set(chosen.batch.keys()) == {"mask", "ids"}
    assert chosen.non_tensor_batch == {}
    assert chosen.meta_info == {"step": 3}
    with pytest.raises(BatchError, match=r"no tensor column 'idz'; did you mean 'ids'\?"):
        data.select(["idz"])
    with pytest.raises(BatchError, match=r"no non-tensor column 'x'"):
        data.select(None, ["x"])
    with pytest.raises(BatchError, match=r"no meta_info 'stop'; did you mean 'step'"):
        data.select(None, None, ["stop"])
    with pytest.raises(BatchError, match=r"list of names, got the text 'ids'"):
        data.select("ids")


@pytest.mark.parametrize("with_tensordict", [False, True])
def test_pop_takes_away_and_only_when_all_names_exist(with_tensordict: bool) -> None:
    data = sample(3)
    if with_tensordict:
        data.batch.lock_()
    with pytest.raises(BatchError, match="no meta_info 'nothing'"):
        data.pop(["ids"], ["uid"], ["nothing"])
    assert "ids" in data
    assert "uid" in data
    taken = data.pop(["ids", "text"], ["uid"], ["step"])
    assert set(taken.batch.keys()) == {"ids", "text"}
    assert taken.non_tensor_batch["uid"].tolist() == ["u0", "u1", "u2"]
    assert taken.meta_info == {"step": 3}
    assert "ids" not in data
    assert "step" not in data.meta_info
    assert_same(data.union(taken).select(["ids"], ["uid"], []), sample(3).select(["ids"], ["uid"], []))
    assert data.pop(None, ["entry"]).batch is None


def test_rename_moves_names_of_both_kinds_and_swaps() -> None:
    data = sample(2)
    assert data.rename(["ids", "uid"], ["numbers", "name"]).non_tensor_batch["name"].tolist() == ["u0", "u1"]
    swapped = data.rename(["half", "mask"], ["mask", "half"])
    assert swapped.batch["mask"].dtype is torch.bfloat16
    with pytest.raises(BatchError, match="two columns 'uid'"):
        data.rename("ids", "uid")
    with pytest.raises(BatchError, match="no column 'idss'; did you mean 'ids'"):
        data.rename("idss", "x")
    with pytest.raises(BatchError, match="as many new names as old ones"):
        data.rename(["ids", "mask"], ["a"])


def test_p51_union_of_equal_duplicates_keeps_one() -> None:
    data = sample(5, cycle={"nan": float("nan")})
    data.batch.lock_()
    again = DataProto.from_dict(
        {key: column.clone() for key, column in data.batch.items()},
        copy.deepcopy(data.non_tensor_batch),
        data.meta_info,
    )
    assert_same(data.union(again), data)


def test_p51_union_of_different_duplicates_names_key_shapes_and_place() -> None:
    left = DataProto.from_dict({"a": torch.zeros(3, 2)}, {"o": [[1, {"k": 2}], 0, 0]}, {"m": np.arange(3)})
    changed = torch.zeros(3, 2)
    changed[1, 1] = 5
    with pytest.raises(BatchError, match=r"'a' .*float32\[3, 2\] here.*first difference at \[1, 1\]: 0.0 and 5.0"):
        left.union(DataProto.from_dict({"a": changed}))
    with pytest.raises(BatchError, match=r"shapes \(3, 2\) and \(3, 1\)"):
        left.union(DataProto.from_dict({"a": torch.zeros(3, 1)}))
    with pytest.raises(BatchError, match=r"dtypes torch.float32 and torch.int64"):
        left.union(DataProto.from_dict({"a": torch.zeros(3, 2, dtype=torch.int64)}))
    with pytest.raises(BatchError, match=r"'o' .*at \[0\]\[1\]\['k'\]: 2 and 3"):
        left.union(DataProto.from_dict(None, {"o": [[1, {"k": 3}], 0, 0]}))
    with pytest.raises(BatchError, match=r"meta_info\['m'\] differs.*at \[2\]"):
        left.union(DataProto(None, None, {"m": np.array([0, 1, 5])}))
    assert left.union(DataProto.from_dict({"a": changed}), overwrite=True).batch["a"][1, 1] == 5


def test_p51_union_of_different_lengths_names_both() -> None:
    with pytest.raises(BatchError, match="this batch has 3 rows and the other 4"):
        sample(3).union(sample(4))
    with pytest.raises(BatchError, match="the other batch is of type NoneType"):
        sample(3).union(None)  # type: ignore[arg-type]


def test_union_tolerates_cycles_and_objects_that_refuse_to_compare() -> None:
    def cyclic() -> list[Any]:
        entry: list[Any] = [1]
        entry.append(entry)
        return entry

    left, right = DataProto.from_dict(None, {"c": [cyclic()]}), DataProto.from_dict(None, {"c": [cyclic()]})
    assert len(left.union(right)) == 1

    class Stubborn:
        def __eq__(self, other: object) -> bool:
            raise RuntimeError("no")

        __hash__ = None  # type: ignore[assignment]

    thing = Stubborn()
    same = DataProto.from_dict(None, {"c": [thing]})
    assert len(same.union(DataProto.from_dict(None, {"c": [thing]}))) == 1
    with pytest.raises(BatchError, match="first difference"):
        same.union(DataProto.from_dict(None, {"c": [Stubborn()]}))


def test_concat_gathers_metrics_and_compares_the_rest() -> None:
    def part(loss: Any, **facts: Any) -> DataProto:
        return DataProto.from_dict({"x": torch.zeros(1)}, None, {"metrics": loss, "t": torch.ones(2), **facts})

    parts = [part({"loss": 1.0, "list": [1, 2]}), part([{"loss": 2.0}, None, {"list": [3]}]), part(None, extra=1)]
    facts = DataProto.concat(parts).meta_info
    assert facts["metrics"] == {"loss": [1.0, 2.0], "list": [1, 2, 3]}
    assert facts["extra"] == 1
    assert parts[0].meta_info["metrics"]["list"] == [1, 2]
    parts[2].meta_info["t"] = torch.tensor([1.0, 2.0])
    with pytest.raises(
        BatchError, match=r"meta_info\['t'\] differs: part 0 has .*, part 2 has .*at \[1\]: 1.0 and 2.0"
    ):
        DataProto.concat(parts)
    with pytest.raises(BatchError, match=r"meta_info\['metrics'\] of part 1 is of type float"):
        DataProto.concat([part({}), part(1.0)])


def test_p38_concat_names_part_and_key() -> None:
    full = sample(2, ragged=False)
    with pytest.raises(BatchError, match="part 1 has no tensor column 'ids', but part 0 has one"):
        DataProto.concat([full, full.select(["mask"])])
    with pytest.raises(BatchError, match="part 0 has no tensor column 'ids', but part 1 has one"):
        DataProto.concat([full.select(["mask"]), full.select(["mask", "ids"])])
    with pytest.raises(BatchError, match="part 0 has no tensor column 'ids', but part 1 has one"):
        DataProto.concat([DataProto.from_dict(None, dict(full.non_tensor_batch), full.meta_info), full])
    with pytest.raises(BatchError, match="part 1 has no non-tensor column 'pairs'"):
        DataProto.concat([full, full.select(None, ["uid", "entry"])])
    with pytest.raises(BatchError, match="part 1 is of type NoneType; expected a DataProto"):
        DataProto.concat([full, None])  # type: ignore[list-item]
    with pytest.raises(BatchError, match="list of batches is empty"):
        DataProto.concat([])


@pytest.mark.parametrize(
    ("left", "right", "text"),
    [
        (torch.zeros(1, 2), torch.zeros(1, 3), r"part 0 has float32\[1, 2\], part 1 has float32\[1, 3\]"),
        (torch.zeros(1), torch.zeros(1).int(), r"float32\[1\], part 1 has int32\[1\]"),
        (torch.zeros(1, 2), jagged([2]), r"part 1 has float32\[1, \*\] jagged"),
        (jagged([2], width=2), jagged([2], width=2).transpose(1, 2), "ragged in dimension"),
        (torch.zeros(1), torch.zeros(1, device="meta"), "on cpu and meta"),
    ],
)
def test_columns_that_cannot_be_joined_are_refused(left: torch.Tensor, right: torch.Tensor, text: str) -> None:
    with pytest.raises(BatchError, match=text):
        DataProto.concat([DataProto.from_dict({"x": left}), DataProto.from_dict({"x": right})])


def test_joined_object_columns_keep_their_values() -> None:
    def joined(left: Any, right: Any) -> Any:
        return DataProto.concat([DataProto.from_dict(None, {"c": left}), DataProto.from_dict(None, {"c": right})])

    assert joined(np.array([1]), np.array(["a"])).non_tensor_batch["c"].tolist() == [1, "a"]
    assert joined(np.array(["a"]), np.array(["bcd"])).non_tensor_batch["c"].tolist() == ["a", "bcd"]
    assert joined(np.array([2**53 + 1]), np.array([0.5])).non_tensor_batch["c"].tolist() == [2**53 + 1, 0.5]
    with pytest.raises(BatchError, match=r"'c' cannot be joined: part 0 has shape \(1, 2\), part 1 has \(1, 3\)"):
        joined(np.zeros((1, 2)), np.zeros((1, 3)))


def test_jagged_columns_keep_their_ragged_dimension_and_share_offsets() -> None:
    values = jagged([3, 1, 0, 2])
    mask = torch.nested.nested_tensor_from_jagged(values.values() * 2, values.offsets())
    data = DataProto.from_dict({"values": values, "mask": mask, "positions": jagged([3, 1, 0, 2], width=2)})
    made = [data[[3, 0]], data[1:3], data.repeat(2), *data.chunk(3, uneven=True), DataProto.concat(data.chunk(2))]
    for batch in made:
        assert (batch.batch["values"] * batch.batch["mask"]).shape[0] == len(batch)
        assert batch.batch["positions"]._ragged_idx == 2
    assert [row.tolist() for row in data[[3, 0]].batch["values"].unbind()] == [[4.0, 5.0], [0.0, 1.0, 2.0]]
    assert [row.tolist() for row in data[2:].batch["positions"].unbind()] == [[[], []], [[4, 5], [10, 11]]]


def test_a_jagged_column_with_holes_is_cut_and_taken_right() -> None:
    dense = torch.arange(12).reshape(3, 4)
    holes = torch.nested.narrow(dense, 1, torch.tensor([0, 1, 2]), torch.tensor([2, 3, 1]), layout=torch.jagged)
    data = DataProto.from_dict({"x": holes})
    rows = [[0, 1], [5, 6, 7], [10]]
    assert [row.tolist() for row in data[1:].batch["x"].unbind()] == rows[1:]
    assert [row.tolist() for row in data[[2, 0]].batch["x"].unbind()] == [rows[2], rows[0]]
    assert [row.tolist() for row in DataProto.concat(data.chunk(3)).batch["x"].unbind()] == rows


def test_nested_tensordicts_go_along() -> None:
    inner = TensorDict({"y": torch.arange(4)}, batch_size=[4])
    data = DataProto.from_dict({"x": torch.zeros(4), "inner": inner})
    assert data[[3, 1]].batch["inner", "y"].tolist() == [3, 1]
    assert_same(DataProto.concat(data.chunk(2)), data)
    assert_same(data.union(DataProto.from_dict({"inner": inner.clone()})), data)


def test_reorder_takes_permutations_only() -> None:
    assert sample(3).reorder(torch.tensor([2, 0, 1])).non_tensor_batch["uid"].tolist() == ["u2", "u0", "u1"]
    for order in ([0, 1], [0, 1, 1], [0, 1, 2, 2]):
        with pytest.raises(BatchError, match="each of the 3 rows once"):
            sample(3).reorder(order)


@pytest.mark.parametrize("form", [list, tuple, np.array, torch.tensor])
def test_rows_repeat_by_their_own_counts(form: Any) -> None:
    assert sample(3).sample_level_repeat(form([2, 0, 1])).non_tensor_batch["uid"].tolist() == ["u0", "u0", "u2"]
    with pytest.raises(BatchError, match="2 repeat counts for 3 rows"):
        sample(3).sample_level_repeat(form([1, 2]))
    with pytest.raises(BatchError, match="at least 0"):
        sample(3).sample_level_repeat(form([1, -2, 1]))
    with pytest.raises(BatchError, match="repeat_times is -1"):
        sample(3).repeat(-1)


@pytest.mark.parametrize(("rows", "added"), [(0, 0), (1, 3), (3, 1), (4, 0), (5, 3), (10, 2)])
def test_p43_padding_over_four_ranks(rows: int, added: int) -> None:
    padded, count = pad_to_multiple(sample(rows), 4)
    assert (len(padded), count) == (rows + added, added)
    assert [len(part) for part in padded.chunk(4)] == [len(padded) // 4] * 4


def test_p43_a_batch_without_rows_is_refused_only_when_rows_are_needed() -> None:
    with pytest.raises(BatchError, match="without rows cannot be padded to 4"):
        pad_to_multiple(sample(0), 4, at_least=1)
    assert len(pad_to_multiple(sample(4), 4, at_least=5)[0]) == 8
    with pytest.raises(BatchError, match="at least 1, not 0"):
        pad_to_multiple(sample(4), 0)
    with pytest.raises(BatchError, match="5 padding rows off a batch of 4 rows"):
        unpad(sample(4), 5)


def test_p43_an_uneven_cut_is_refused_with_numbers_unless_allowed() -> None:
    with pytest.raises(BatchError, match=r"10 rows cannot be cut into 3 equal parts: 10 / 3 leaves 1 over; pad with"):
        sample(10).chunk(3)
    assert [len(part) for part in sample(10).chunk(3, uneven=True)] == [4, 3, 3]
    with pytest.raises(BatchError, match="at least 1 part, not 0"):
        sample(10).chunk(0)
    with pytest.raises(BatchError, match="split_size is 0"):
        sample(10).split(0)


def test_the_iterator_goes_over_mini_batches_in_a_drawn_order() -> None:
    def names(**options: Any) -> list[str]:
        batches = list(sample(6).make_iterator(2, 2, dataloader_kwargs=options.pop("kwargs", None), **options))
        assert [len(batch) for batch in batches] == [2] * 6
        return [name for batch in batches for name in batch.non_tensor_batch["uid"]]

    assert names() == [f"u{row}" for row in range(6)] * 2
    shuffled = names(seed=1, kwargs={"shuffle": True})
    assert shuffled == names(seed=1, kwargs={"shuffle": True})
    assert shuffled != names(seed=2, kwargs={"shuffle": True})
    assert sorted(shuffled[:6]) == sorted(shuffled[6:]) == [f"u{row}" for row in range(6)]
    with pytest.raises(BatchError, match="6 rows cannot be cut into mini-batches of 4"):
        sample(6).make_iterator(4)
    with pytest.raises(BatchError, match=r"\['num_workers'\]"):
        sample(6).make_iterator(2, dataloader_kwargs={"num_workers": 1})


def test_tensordicts_and_lists_of_rows_and_back() -> None:
    for rows in (0, 1, 4):
        data = sample(rows)
        assert_same(DataProto.from_tensordict(data.to_tensordict()), data)
    data = sample(4)
    assert_same(DataProto.from_list(data.to_list(), data.meta_info), data)
    with pytest.raises(BatchError, match="row 0 and row 1 differ in b"):
        DataProto.from_list([{"a": 1}, {"a": 1, "b": 2}])
    assert len(DataProto.from_list([])) == 0
    mixed = DataProto.from_list([{"t": torch.zeros(1, 2)}, {"t": torch.zeros(2, 1)}])
    assert mixed.non_tensor_batch["t"][1].shape == (2, 1)
    with pytest.raises(BatchError, match="'step' is the name of two entries"):
        data.union(DataProto.from_dict(None, {"step": [1, 2, 3, 4]})).to_tensordict()
    taken = DataProto.from_tensordict(
        TensorDict({"m": NonTensorData({"a": 1}, batch_size=[2])}, batch_size=[2]), {"n": 2}
    )
    assert taken.meta_info == {"m": {"a": 1}, "n": 2}
    assert len(taken) == 2


def test_the_texts_are_short_and_name_shapes() -> None:
    text = repr(sample(3))
    assert text.startswith("DataProto(3 rows; batch: ids int64[3, 3], ")
    assert "\n" not in text
    many = DataProto.from_dict({f"column{number}": torch.zeros(2, 100) for number in range(50)})
    assert len(repr(many)) < 400
    assert "… 42 more" in repr(many)
    info = sample(3).get_data_info()
    assert "batch['positions']: int64[3, 3, *] jagged on cpu" in info
    assert "non_tensor_batch['entry']: object[3] of dict" in info
    assert "meta_info['step']: int 3" in info


def test_results_keep_the_subclass_and_the_device() -> None:
    class Mine(DataProto):
        pass

    mine = Mine.from_dict({"x": torch.zeros(4)})
    made = [mine[:2], mine.repeat(), mine.union(mine), Mine.concat([mine]), mine.pop([]), mine.to("cpu")]
    assert {type(result) for result in made} == {Mine}
    moved = mine.to("cpu").repeat(2)
    assert moved.batch.device == torch.device("cpu")
    meta = DataProto.from_dict({"x": torch.zeros(4), "j": jagged([1, 2, 0, 1])}).to("cpu")
    assert meta.batch["j"]._ragged_idx == 1


def test_a_batch_without_tensors_loads_neither_torch_nor_tensordict(tmp_path: Path) -> None:
    code = f"""
import sys
from rpcrl.batch import compare, data_proto, padding, splittable, storage
D = data_proto.DataProto
d = D.from_dict(None, {{"u": ["a", "b", "c"]}}, {{"m": 1}})
d = D.concat(padding.pad_to_multiple(d.union(d).repeat(2).select(None, ["u"])[1:], 4)[0].chunk(2))
d = d[[0, 1]].reorder([1, 0]).rename("u", "v").to("cpu")
d.save_to_disk({str(tmp_path / "batch")!r})
d = D.load_from_disk({str(tmp_path / "batch")!r})
assert splittable.is_splittable(d) and d.batch is None
print(repr(d), d.get_data_info(), d[0], list(d), d.to_list(), d.pop(None, ["v"]))
print(sorted({{"torch", "tensordict"}} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"
