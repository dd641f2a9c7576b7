"""Which batches do tests use, and how are two of them compared?"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from rpcrl.batch.compare import first_difference
from rpcrl.batch.data_proto import DataProto


def contents(data: DataProto) -> dict[str, Any]:
    """Return everything that a batch holds, without making it build its TensorDict."""
    return {
        "rows": len(data),
        "tensors": data._columns(),
        "non_tensors": dict(data.non_tensor_batch),
        "meta": data.meta_info,
    }


def assert_same(left: DataProto, right: DataProto) -> None:
    assert first_difference(contents(left), contents(right)) is None


def jagged(lengths: list[int], *, width: int = 0, start: int = 0) -> torch.Tensor:
    """Return a jagged tensor of counted numbers, ragged in dimension 1, or with ``width`` in dimension 2."""
    offsets = torch.tensor([0, *np.cumsum(lengths).tolist()])
    total = int(sum(lengths))
    if not width:
        return torch.nested.nested_tensor_from_jagged(torch.arange(start, start + total).float(), offsets)
    values = torch.arange(width * total).reshape(width, total)
    return torch.nested.nested_tensor_from_jagged(values, offsets, jagged_dim=2)


def sample(rows: int, *, ragged: bool = True, **meta: Any) -> DataProto:
    """Return a batch with columns of many kinds whose entries all differ."""
    tensors = {
        "ids": torch.arange(rows * 3).reshape(rows, 3),
        "wide": torch.arange(rows * 4).reshape(4, rows).t(),
        "half": torch.arange(rows).to(torch.bfloat16),
        "mask": torch.arange(rows) % 2 == 0,
        "nan": torch.full((rows, 1), float("nan")),
    }
    if ragged and rows:
        tensors["text"] = jagged([row % 4 for row in range(rows)])
        tensors["positions"] = jagged([row % 3 + 1 for row in range(rows)], width=3)
    others = {
        "uid": [f"u{row}" for row in range(rows)],
        "entry": [{"row": row, "list": [row, None, float("nan")]} for row in range(rows)],
        "pairs": [[row, row + 1] for row in range(rows)],
    }
    return DataProto.from_dict(tensors, others, {"step": 3, "table": np.arange(3), **meta})
