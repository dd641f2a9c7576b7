"""Does what is written to disk come back the same, and is a damaged file refused?"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import save_file
from tensordict import TensorDict

from rpcrl.batch import storage
from rpcrl.batch.data_proto import DataProto
from rpcrl.batch.objects import object_column
from rpcrl.errors import BatchError
from tests.batch_samples import assert_same, jagged, sample

LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(),
    st.binary(),
    st.complex_numbers(),
    st.just(np.float32(1.5)),
)
KEYS = st.one_of(st.text(), st.integers(), st.none(), st.tuples(st.integers(), st.text()))
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(KEYS, inner, max_size=4),
        st.tuples(inner, inner),
    ),
    max_leaves=12,
)


@given(st.lists(VALUES, min_size=1, max_size=4))
def test_every_value_comes_back_with_its_type(values: list[Any]) -> None:
    writer = storage._Writer()
    text = json.dumps(writer.value(values, "here", 0), allow_nan=False)

    class File:
        def get_tensor(self, name: str) -> Any:
            return writer.blobs[name]

    assert _typed(storage._Reader(File(), with_torch=False).value(json.loads(text))) == _typed(values)


def _typed(value: Any) -> Any:
    """Return a value with every type spelt out, because 1 == 1.0 == True and NaN != NaN."""
    if isinstance(value, list | tuple):
        return type(value), [_typed(entry) for entry in value]
    if isinstance(value, dict):
        return dict, [(_typed(key), _typed(entry)) for key, entry in value.items()]
    return type(value), repr(value)


def test_every_kind_of_column_comes_back(tmp_path: Path) -> None:
    data = sample(5, nested={"list": [1, (2, {"deep": float("inf")})], 7: "seven", "$tag": b"\x00\xff"})
    for dtype in (torch.int8, torch.uint16, torch.float16, torch.float8_e5m2, torch.complex64, torch.complex128):
        data.batch[str(dtype)] = torch.arange(5).to(dtype)
    shared = torch.arange(10)
    data.batch["view"], data.batch["overlapping"], data.batch["again"] = shared[:5], shared[3:8], shared[:5]
    data.non_tensor_batch["number"] = np.arange(5)[::-1]
    data.non_tensor_batch["text"] = np.array(["a", "bc", "", "d", "ü"])
    data.non_tensor_batch["when"] = np.arange(5).astype("datetime64[s]")
    data.non_tensor_batch["grid"] = np.arange(10).reshape(5, 2).astype(">f4")
    arrays = np.array([[None, "x"]], dtype=object)
    data.non_tensor_batch["inner"] = object_column([torch.ones(2).bfloat16(), arrays, jagged([1, 2]), None, 1])
    path = tmp_path / "batch"
    data.save_to_disk(path)
    loaded = DataProto.load_from_disk(path)
    assert_same(loaded, data)
    assert list(loaded.non_tensor_batch) == list(data.non_tensor_batch)
    assert loaded.non_tensor_batch["text"].dtype == data.non_tensor_batch["text"].dtype
    loaded.batch["ids"] += 1
    loaded.non_tensor_batch["number"][0] = 9
    assert_same(DataProto.load_from_disk(path), data)
    assert [entry.name for entry in tmp_path.iterdir()] == ["batch"]
    with safe_open(path, framework="pt") as file:
        assert torch.equal(file.get_tensor("batch.half"), data.batch["half"])


def test_jagged_columns_that_shared_offsets_share_them_again(tmp_path: Path) -> None:
    values = jagged([2, 0, 3])
    mask = torch.nested.nested_tensor_from_jagged(values.values() * 2, values.offsets())
    DataProto.from_dict({"v": values, "m": mask, "p": jagged([1, 2, 3], width=2)}).save_to_disk(tmp_path / "b")
    loaded = DataProto.load_from_disk(tmp_path / "b").batch
    assert (loaded["v"] * loaded["m"]).shape[0] == 3
    assert loaded["p"]._ragged_idx == 2


def test_what_was_loaded_does_not_depend_on_the_file(tmp_path: Path) -> None:
    path = tmp_path / "batch"
    sample(50).save_to_disk(path)
    loaded = DataProto.load_from_disk(path)
    with path.open("r+b") as file:  # in place, as no save of ours would do
        file.write(bytes(path.stat().st_size))
    assert_same(loaded, sample(50))


@pytest.mark.parametrize("rows", [0, 3])
def test_batches_without_rows_tensors_or_objects_come_back(tmp_path: Path, rows: int) -> None:
    data = sample(rows)
    for made in (data, data.select([], []), data.select(None, []), DataProto(), DataProto(None, {"u": [1] * rows})):
        made.save_to_disk(tmp_path / "batch")
        assert_same(DataProto.load_from_disk(tmp_path / "batch"), made)


class Odd:
    pass


def _cycle() -> list[Any]:
    entry: list[Any] = []
    entry.append(entry)
    return entry


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (DataProto(None, {"o": [1, {"k": Odd()}]}), r"non_tensor_batch\['o'\]\[1\]\['k'\] is of type .*Odd"),
        (DataProto(None, None, {"f": print}), r"meta_info\['f'\] is of type builtins.builtin_function_or_method"),
        (DataProto(None, None, {"c": _cycle()}), "contains itself"),
        (DataProto(None, {"v": np.zeros(1, dtype=[("a", "i4")])}), "store its fields"),
        (DataProto.from_dict({"t": TensorDict({"x": torch.zeros(2)}, [2])}), "'t' is a nested TensorDict"),
        (DataProto.from_dict({"s": torch.eye(2).to_sparse()}), "'s' is a torch.sparse_coo tensor"),
    ],
)
def test_what_cannot_be_written_is_named_and_the_old_file_stays(tmp_path: Path, data: DataProto, text: str) -> None:
    path = tmp_path / "batch"
    sample(2).save_to_disk(path)
    with pytest.raises(BatchError, match=text):
        data.save_to_disk(path)
    assert_same(DataProto.load_from_disk(path), sample(2))
    assert [entry.name for entry in tmp_path.iterdir()] == ["batch"]


def test_a_failed_write_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "batch"
    sample(2).save_to_disk(path)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(storage.os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        sample(3).save_to_disk(path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["batch"]
    assert len(DataProto.load_from_disk(path)) == 2


def test_files_that_are_no_batch_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        DataProto.load_from_disk(tmp_path / "nothing")
    with pytest.raises(FileNotFoundError):
        sample(1).save_to_disk(tmp_path / "no" / "directory")
    path = tmp_path / "batch"
    sample(3).save_to_disk(path)
    whole = path.read_bytes()
    for cut in (0, 5, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:cut])
        with pytest.raises(BatchError, match="is not a batch or is damaged"):
            DataProto.load_from_disk(path)
    save_file({"x": np.zeros(2)}, path)
    with pytest.raises(BatchError, match="not of a batch: it has no 'document'"):
        DataProto.load_from_disk(path)


@pytest.mark.parametrize(
    ("document", "text"),
    [
        ({"format": "rpcrl.batch", "version": 99}, "version 99; this rpcrl reads 'rpcrl.batch' version 1"),
        ([1], "damaged"),
        (_doc := {"format": "rpcrl.batch", "version": 1, "rows": 1, "batch": None}, "KeyError"),
        ({**_doc, "non_tensor_batch": {}, "meta_info": {"x": {"$evil": 1}}}, r"unknown type '\$evil'"),
        ({**_doc, "non_tensor_batch": {}, "meta_info": {"x": {"$bytes": "é"}}}, "damaged"),
        ({**_doc, "non_tensor_batch": {"u": 3}, "meta_info": {}}, "'u' is of type int"),
    ],
)
def test_documents_that_make_no_sense_are_refused(tmp_path: Path, document: Any, text: str) -> None:
    raw = np.frombuffer(json.dumps(document).encode(), dtype=np.uint8)
    save_file({"document": raw}, tmp_path / "batch")
    with pytest.raises(BatchError, match=text):
        DataProto.load_from_disk(tmp_path / "batch")


def test_numbers_that_json_has_not_come_back(tmp_path: Path) -> None:
    facts = {"nan": float("nan"), "inf": -math.inf, "big": 10**40, "lone": "\ud800", "zero": -0.0}
    DataProto(None, None, facts).save_to_disk(tmp_path / "batch")
    loaded = DataProto.load_from_disk(tmp_path / "batch").meta_info
    assert {key: repr(value) for key, value in loaded.items()} == {key: repr(value) for key, value in facts.items()}
