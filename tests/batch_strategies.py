"""Which batches does hypothesis draw? Every kind of column, of any number of rows, with and without tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from rpcrl.batch.data_proto import DataProto
from rpcrl.batch.objects import object_column
from tests.batch_samples import jagged

DTYPES = (
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float64,
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int32,
    torch.int64,
    torch.complex64,
    torch.float8_e4m3fn,
    torch.uint16,
)


def _dense(draw: st.DrawFn, rows: int) -> torch.Tensor:
    dtype = draw(st.sampled_from(DTYPES))
    width = draw(st.integers(0, 3))
    counted = torch.arange(rows * width * 2) % 113
    form = draw(st.sampled_from(["plain", "transposed", "strided", "flat", "expanded"]))
    if form == "flat":
        return (torch.arange(rows) % 113).to(dtype)
    if form == "transposed":
        return counted[: rows * width].to(dtype).reshape(width, rows).t()
    if form == "strided":
        return counted.to(dtype).reshape(rows, width * 2)[:, ::2]
    if form == "expanded":
        return (torch.arange(rows) % 2).to(dtype).reshape(rows, 1).expand(rows, width)
    return counted[: rows * width].to(dtype).reshape(rows, width)


def _jagged(draw: st.DrawFn, rows: int) -> torch.Tensor:
    lengths = draw(st.lists(st.integers(0, 3), min_size=rows, max_size=rows))
    return jagged(lengths, width=draw(st.sampled_from([0, 2])))


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | st.binary(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=2), inner, max_size=2),
    max_leaves=4,
)


def _values(draw: st.DrawFn, rows: int) -> Any:
    form = draw(st.sampled_from(["objects", "numbers", "texts", "frozen", "strided"]))
    if form == "numbers":
        return np.arange(rows * 2, dtype=np.float32).reshape(rows, 2)
    if form == "texts":
        return np.array([f"row {row}" for row in range(rows)], dtype="<U8")
    if form == "strided":
        return np.arange(rows * 2)[::2]
    column = object_column(draw(st.lists(VALUES, min_size=rows, max_size=rows)))
    column.flags.writeable = form != "frozen"
    return column


@st.composite
def batches(draw: st.DrawFn, rows: st.SearchStrategy[int] = st.integers(0, 12), *, ragged: bool = True) -> DataProto:  # noqa: B008
    """Return a batch whose column ``row`` numbers its rows, so that an order can be told."""
    count = draw(rows)
    tensors = {f"tensor{number}": _dense(draw, count) for number in range(draw(st.integers(0, 3)))}
    if ragged and count and draw(st.booleans()):
        tensors["jagged"] = _jagged(draw, count)
    others = {f"value{number}": _values(draw, count) for number in range(draw(st.integers(0, 2)))}
    facts = draw(st.dictionaries(st.sampled_from(["step", "note"]), VALUES, max_size=2))
    return DataProto.from_dict(tensors, {"row": list(range(count)), **others}, facts)
