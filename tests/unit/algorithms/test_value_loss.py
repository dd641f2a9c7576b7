"""Is the critic's loss the clipped one of PPO, and does a clipped value stand still?"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from rpcrl.algorithms.aggregate import LOSS_AGG_MODES, BatchCounts
from rpcrl.algorithms.losses import value_loss
from tests.unit.algorithms import papers


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
@pytest.mark.parametrize("clip", [0.05, 0.5, 100.0])
def test_equals_the_loop_from_the_paper(mode: str, clip: float) -> None:
    batch: Any = papers.ragged_batch(3)
    mask, old, targets = (batch[name] for name in ("response_mask", "values", "token_level_rewards"))
    new = old + torch.randn(mask.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    loss, metrics = value_loss(new, old, targets, mask, BatchCounts.of(mask), cliprange_value=clip, loss_agg_mode=mode)
    rows = papers.value_loss(*(papers.tokens(values, mask) for values in (new, old, targets)), clip=clip)
    assert float(loss) == pytest.approx(papers.aggregate(rows, mode, scale=6.0), rel=1e-12)
    assert float(metrics["vpred_mean"]) == pytest.approx(float(new[mask.bool()].mean()), rel=1e-12)


def test_the_clip_counts_where_it_is_the_larger_term_and_stops_the_gradient_there() -> None:
    # targets 1: within the range; beyond it on the way to the target; beyond it away from the target; masked
    new = torch.tensor([[0.3, 0.9, -2.0, 5.0]], dtype=torch.float64, requires_grad=True)
    old = torch.zeros_like(new)
    mask = torch.tensor([[1, 1, 1, 0]])
    loss, metrics = value_loss(new, old, torch.ones_like(new), mask, BatchCounts.of(mask), cliprange_value=0.5)
    assert float(loss.detach()) == pytest.approx((0.7**2 + 0.5**2 + 3.0**2) / 2 / 3)
    assert float(metrics["vf_clipfrac"]) == pytest.approx(1 / 3)
    loss.backward()
    assert new.grad is not None
    assert new.grad[0].tolist() == pytest.approx([-0.7 / 3, 0.0, -3.0 / 3, 0.0])


def test_padding_may_be_anything() -> None:
    mask = torch.tensor([[1, 0]])
    values = torch.tensor([[0.5, math.nan]])
    loss, _ = value_loss(values, values, torch.tensor([[1.0, math.inf]]), mask, BatchCounts.of(mask))
    assert float(loss) == pytest.approx(0.125)


def test_no_token_no_loss() -> None:
    new = torch.ones(2, 3, requires_grad=True)
    mask = torch.zeros(2, 3)
    loss, metrics = value_loss(new, torch.zeros(2, 3), torch.zeros(2, 3), mask, BatchCounts.of(mask))
    loss.backward()
    assert float(loss.detach()) == 0.0
    assert float(metrics["vf_clipfrac"]) == 0.0
    assert new.grad is not None
    assert not new.grad.any()
