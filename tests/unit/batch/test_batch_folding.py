"""How do rows move into a second dimension, columns into rows, and single rows into a batch?"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from rpcrl.batch.data_proto import DataProto
from rpcrl.batch.folding import fold_batch_dim, unfold_batch_dim
from rpcrl.errors import BatchError
from tests.batch_samples import assert_same, jagged, sample


def test_folding_makes_runs_of_rows() -> None:
    data = DataProto.from_dict(
        {"x": torch.arange(12).reshape(6, 2), "inner": TensorDict({"y": torch.arange(6)}, batch_size=[6])},
        {"name": list("abcdef")},
        {"step": 1},
    )
    folded = fold_batch_dim(data, 3)
    assert len(folded) == 3
    assert folded.batch["x"].tolist() == [[[0, 1], [2, 3]], [[4, 5], [6, 7]], [[8, 9], [10, 11]]]
    assert folded.batch["inner", "y"].tolist() == [[0, 1], [2, 3], [4, 5]]
    assert folded.non_tensor_batch["name"].tolist() == [["a", "b"], ["c", "d"], ["e", "f"]]
    assert folded.meta_info == {"step": 1}
    assert folded[1].batch["x"].shape == (2, 2)
    assert_same(unfold_batch_dim(folded), data)
    assert len(data) == 6


def test_what_cannot_be_folded_or_unfolded_is_named() -> None:
    with pytest.raises(BatchError, match="6 rows cannot be folded into 4 rows"):
        fold_batch_dim(sample(6, ragged=False), 4)
    with pytest.raises(BatchError, match="column 'x' is jagged and cannot be folded"):
        fold_batch_dim(DataProto.from_dict({"x": jagged([1, 2])}), 2)
    uneven = DataProto.from_dict({"x": torch.zeros(2, 3), "y": torch.zeros(2, 4)})
    with pytest.raises(BatchError, match=r"column 'y' begins with the dimensions \[2, 4\].*\[2, 3\] of the first"):
        unfold_batch_dim(uneven)
    with pytest.raises(BatchError, match="column 'z' begins with"):
        unfold_batch_dim(DataProto.from_dict({"z": torch.zeros(2)}))


def test_column_chunks_become_rows() -> None:
    data = DataProto.from_dict(
        {"x": torch.arange(12).reshape(2, 6), "keep": torch.tensor([5, 6])},
        {"name": ["a", "b"], "grid": np.arange(8).reshape(2, 4)},
        {"step": 1},
    )
    made = data.unfold_column_chunks(2, ["x", "grid"])
    assert made.batch["x"].tolist() == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]]
    assert made.non_tensor_batch["grid"].tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert made.batch["keep"].tolist() == [5, 5, 6, 6]
    assert made.non_tensor_batch["name"].tolist() == ["a", "a", "b", "b"]
    assert_same(data.unfold_column_chunks(2), data.repeat(2))
    with pytest.raises(BatchError, match=r"'x' has the shape \[2, 6\]: its dimension 1 cannot be cut into 4"):
        data.unfold_column_chunks(4, ["x"])
    with pytest.raises(BatchError, match="no column 'xx'; did you mean 'x'"):
        data.unfold_column_chunks(2, ["xx"])


def test_padding_repeats_the_last_or_the_first_row() -> None:
    data = sample(3)
    assert data.padding(2).non_tensor_batch["uid"].tolist() == ["u0", "u1", "u2", "u2", "u2"]
    assert data.padding(1, "first").batch["ids"][:, 0].tolist() == [0, 3, 6, 0]
    assert_same(data.padding(0), data)
    for size, candidate, rows in ((1, "middle", 3), (-1, "last", 3), (1, "last", 0)):
        with pytest.raises(BatchError, match=f"cannot append {size} copies of the '{candidate}' row to {rows} rows"):
            sample(rows).padding(size, candidate)


def test_single_rows_are_collated() -> None:
    data = sample(4)
    assert_same(DataProto.from_items([data[2], data[0]]), data[[2, 0]])
    entries = DataProto.from_dict(None, {"weights": [torch.zeros(2), torch.ones(2)]})
    collated = DataProto.from_items(list(entries))
    assert collated.batch is None
    assert collated.non_tensor_batch["weights"][1].tolist() == [1.0, 1.0]
    assert len(DataProto.from_items([])) == 0
    other = DataProto(data[0:1].batch, data[0:1].non_tensor_batch, {**data.meta_info, "step": 4})
    with pytest.raises(BatchError, match=r"meta_info\['step'\] differs: part 0 has 3, part 1 has 4"):
        DataProto.from_items([data[1], other[0]])


def test_a_deep_copy_shares_nothing() -> None:
    data = DataProto.from_dict({"x": torch.zeros(2)}, {"list": [[1], [2]]}, {"table": np.zeros(2)})
    copied = data.select(deepcopy=True)
    copied.batch["x"] += 1
    copied.non_tensor_batch["list"][0].append(5)
    copied.meta_info["table"] += 1
    assert data.batch["x"].tolist() == [0.0, 0.0]
    assert data.non_tensor_batch["list"].tolist() == [[1], [2]]
    assert data.meta_info["table"].tolist() == [0.0, 0.0]


def test_a_batch_has_one_batch_dimension() -> None:
    tensors: dict[str, Any] = {"x": torch.zeros(2, 3)}
    assert len(DataProto.from_dict(tensors, num_batch_dims=1)) == 2
    with pytest.raises(BatchError, match=r"num_batch_dims=2 cannot be kept.*tensor.flatten\(0, 1\)"):
        DataProto.from_dict(tensors, num_batch_dims=2)
    with pytest.raises(BatchError, match="num_batch_dims=2"):
        DataProto.from_tensordict(TensorDict(tensors, batch_size=[2, 3]), num_batch_dims=2)


def test_the_size_is_printed_of_tensors_and_of_other_columns(capsys: pytest.CaptureFixture[str]) -> None:
    columns = {
        "x": torch.zeros(2**16, 256),
        "inner": TensorDict({"y": torch.zeros(2**16, 256)}, batch_size=[2**16]),
        "jagged": torch.nested.nested_tensor_from_jagged(torch.zeros(2**25), torch.arange(2**16 + 1) * 512),
    }
    DataProto.from_dict(columns, {"n": np.zeros((2**16, 256), dtype=np.float32)}).print_size("batch: ")
    assert capsys.readouterr().out == "batch: tensors: 0.250488 GiB, other columns: 0.062500 GiB\n"
