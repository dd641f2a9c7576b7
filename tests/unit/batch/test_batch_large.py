"""Are large columns joined as small ones are, though their memory is taken in another way?"""

from __future__ import annotations

import pytest
import torch

from rpcrl import DataProto

MIB = 1 << 20


def _joined(*parts: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = DataProto.concat([DataProto.from_dict(tensors={"x": part}) for part in parts]).batch["x"]
    return result


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float64, torch.complex64]
)
def test_large_columns_join_in_order(dtype: torch.dtype) -> None:
    whole = (torch.arange(6 * MIB) % 251).to(dtype).reshape(-1, 1024)
    parts = (whole[:1000], whole[1000:1001], whole[1001:1001], whole[1001:])
    joined = _joined(*parts)
    assert joined.dtype == dtype
    assert not joined.untyped_storage().resizable()  # its memory is numpy's, which is in huge pages where there are any
    assert torch.equal(joined, whole)
    joined[0] = 0
    assert bool((whole[0] != joined[0]).any())  # a batch is a value


def test_large_columns_that_need_gradients_or_are_not_contiguous() -> None:
    whole = torch.rand(2048, 1024)
    leaf = whole.clone().requires_grad_()
    joined = _joined(leaf[:1000], leaf[1000:])
    joined.sum().backward()
    assert torch.equal(leaf.grad, torch.ones_like(whole))  # type: ignore[arg-type]
    turned = whole.t().contiguous().t()
    assert torch.equal(_joined(turned[:7], turned[7:]), whole)


def test_large_jagged_columns_join_in_order() -> None:
    rows = [torch.rand(length, 512) for length in (1500, 1, 900, 1200)]
    parts = [torch.nested.as_nested_tensor(each, layout=torch.jagged) for each in (rows[:1], rows[1:3], rows[3:])]
    joined = _joined(*parts)
    assert all(torch.equal(mine, other) for mine, other in zip(joined.unbind(), rows, strict=True))
