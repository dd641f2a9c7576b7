"""Do advantages and losses depend on the samples only, and not on padding, row order, micro-batches or dp ranks?"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rpcrl.algorithms.advantages import estimate_advantages, get_advantage
from rpcrl.algorithms.aggregate import LOSS_AGG_MODES, BatchCounts
from rpcrl.algorithms.losses import PolicyLossSettings, policy_loss, value_loss
from rpcrl.config.registry import ADVANTAGES
from tests.unit.algorithms import papers

SETTINGS = {"gamma": 0.95, "lam": 0.9, "norm_adv_by_std_in_grpo": True}
TENSORS = ("token_level_rewards", "response_mask", "values")

batches = st.builds(
    papers.ragged_batch,
    seed=st.integers(0, 10_000),
    rows=st.integers(4, 17),
    columns=st.integers(2, 9),
    groups=st.integers(1, 6),
    holes=st.booleans(),
    empty=st.booleans(),
)


def rows_of(batch: dict[str, Any], order: Tensor) -> dict[str, Any]:
    return {**{name: batch[name][order] for name in TENSORS}, "uid": batch["uid"][order.numpy()]}


def close(one: Tensor, other: Tensor) -> None:
    torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ADVANTAGES.built_in)
@given(batch=batches, seed=st.integers(0, 1000), left=st.integers(0, 3), right=st.integers(0, 3))
def test_advantages_follow_their_rows_and_ignore_padding(
    name: str, batch: dict[str, Any], seed: int, left: int, right: int
) -> None:
    estimator = get_advantage(name)
    expected = estimate_advantages(estimator, {**batch, **SETTINGS})
    order = torch.randperm(len(batch["uid"]), generator=torch.Generator().manual_seed(seed))
    moved = rows_of(batch, order)
    for column in TENSORS:
        moved[column] = torch.nn.functional.pad(moved[column], (left, right))
    found = estimate_advantages(estimator, {**moved, **SETTINGS})
    width = batch["response_mask"].shape[1]
    for before, after in zip(expected, found, strict=True):
        close(after[:, left : left + width], before[order])
        assert not after[:, :left].any()
        assert not after[:, left + width :].any()


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo"])
@given(batch=batches)
def test_a_group_is_judged_by_itself(name: str, batch: dict[str, Any]) -> None:
    estimator = get_advantage(name)
    whole, _ = estimate_advantages(estimator, {**batch, **SETTINGS})
    for label in set(batch["uid"].tolist()):
        mine = torch.tensor([i for i, uid in enumerate(batch["uid"]) if uid == label])
        alone, _ = estimate_advantages(estimator, {**rows_of(batch, mine), **SETTINGS})
        close(alone, whole[mine])


def losses_of(batch: dict[str, Any], mode: str, new: Tensor, rows: Tensor, counts: BatchCounts) -> tuple[Tensor, ...]:
    """Policy and value loss of some rows, with a metric of each."""
    old, mask = batch["values"][rows], batch["response_mask"][rows]
    targets = batch["token_level_rewards"][rows]
    pg, pg_figures = policy_loss(old, new[rows], targets, mask, PolicyLossSettings(loss_agg_mode=mode), counts)
    vf, vf_figures = value_loss(new[rows], old, targets, mask, counts, loss_agg_mode=mode)
    return pg, vf, pg_figures["pg_clipfrac"], vf_figures["vf_clipfrac"]


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
@given(
    batch=st.builds(
        papers.ragged_batch, seed=st.integers(0, 10_000), rows=st.sampled_from([4, 8, 12]), columns=st.integers(2, 7)
    ),
    dp_size=st.sampled_from([1, 2, 4]),
    micro=st.integers(1, 12),
    seed=st.integers(0, 1000),
)
def test_losses_and_gradients_do_not_depend_on_how_a_mini_batch_is_cut(
    mode: str, batch: dict[str, Any], dp_size: int, micro: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    mask = batch["response_mask"]
    noise = 0.5 * torch.randn(mask.shape, generator=generator, dtype=torch.float64)
    whole = torch.arange(len(mask))

    def total(order: Tensor, dp: int, size: int) -> tuple[list[float], Tensor]:
        new = (batch["values"] + noise).requires_grad_()
        counts = BatchCounts.of(mask, dp_size=dp)
        sums = [torch.zeros((), dtype=torch.float64) for _ in range(4)]
        for mine in order.chunk(dp):
            for rows in mine.split(size):
                parts = losses_of(batch, mode, new, rows, counts)
                sums = [so_far + part / dp for so_far, part in zip(sums, parts, strict=True)]
        (sums[0] + sums[1]).backward()
        assert new.grad is not None
        return [float(value.detach()) for value in sums], new.grad

    expected, gradient = total(whole, 1, len(whole))
    found, other = total(whole[torch.randperm(len(whole), generator=generator)], dp_size, micro)
    assert found == pytest.approx(expected, rel=1e-9, abs=1e-12)
    close(other, gradient)
    assert not gradient[mask == 0].any()
