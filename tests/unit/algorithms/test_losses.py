"""Do the losses equal float64 loops written from the papers, however the batch is padded, ordered and cut?"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from rpcrl.algorithms.aggregate import LOSS_AGG_MODES, BatchCounts, agg_loss
from rpcrl.algorithms.losses import PolicyLossSettings, get_policy_loss, policy_loss, register_policy_loss
from rpcrl.errors import UsageError


def ragged(rows: int, columns: int, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, columns + 1, (rows,), generator=generator)
    lengths[0], lengths[1] = 0, columns
    mask = (torch.arange(columns)[None] < lengths[:, None]).long()
    new = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
    return {
        "new": new - 2,
        "old": new - 2 + 0.8 * torch.randn(rows, columns, generator=generator, dtype=torch.float64),
        "advantages": 2 * torch.randn(rows, columns, generator=generator, dtype=torch.float64),
        "mask": mask,
    }


def loop_token_loss(old: float, new: float, advantage: float, low: float, high: float, c: float) -> float:
    ratio = math.exp(max(-20.0, min(20.0, new - old)))
    objective = min(ratio * advantage, max(1 - low, min(1 + high, ratio)) * advantage)
    if advantage < 0:
        objective = max(objective, c * advantage)
    return -objective


def loop_aggregate(losses: list[list[float]], mode: str, scale: float) -> float:
    """``losses`` holds only each row's real tokens."""
    rows = [row for row in losses if row]
    if mode == "token-mean":
        return sum(map(sum, rows)) / sum(map(len, rows))
    if mode == "token-sum":
        return sum(map(sum, rows))
    if mode == "seq-mean-token-sum":
        return sum(map(sum, rows)) / len(rows)
    if mode == "seq-mean-token-sum-norm":
        return sum(map(sum, rows)) / scale / len(rows)
    return sum(sum(row) / len(row) for row in rows) / len(rows)


def real_losses(data: dict[str, Tensor], low: float, high: float, c: float) -> list[list[float]]:
    return [
        [
            loop_token_loss(*(float(data[k][i, t]) for k in ("old", "new", "advantages")), low, high, c)
            for t in range(data["mask"].shape[1])
            if data["mask"][i, t]
        ]
        for i in range(data["mask"].shape[0])
    ]


def call(data: dict[str, Tensor], settings: PolicyLossSettings, counts: BatchCounts, rows: slice = slice(None)):
    return policy_loss(
        data["old"][rows], data["new"][rows], data["advantages"][rows], data["mask"][rows], settings, counts
    )


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
@pytest.mark.parametrize(("low", "high", "c"), [(0.2, 0.2, 3.0), (0.2, 0.28, 3.0), (0.1, 0.5, 1.3)])
def test_equals_the_loop_from_the_papers(mode: str, low: float, high: float, c: float) -> None:
    data = ragged(12, 7, seed=1)
    settings = PolicyLossSettings(clip_ratio_low=low, clip_ratio_high=high, clip_ratio_c=c, loss_agg_mode=mode)
    loss, _ = call(data, settings, BatchCounts.of(data["mask"]))
    expected = loop_aggregate(real_losses(data, low, high, c), mode, scale=7.0)
    assert float(loss) == pytest.approx(expected, rel=1e-12)


def test_metrics_count_tokens_where_a_clip_was_active() -> None:
    # ratios e^0.5, e^-0.5, e^2, 1 with A = 1, -1, -1, -1: clipped high, clipped low, dual clip, none.
    new = torch.tensor([[0.5, -0.5, 2.0, 0.0, 9.0]], dtype=torch.float64)
    advantages = torch.tensor([[1.0, -1.0, -1.0, -1.0, 5.0]], dtype=torch.float64)
    mask = torch.tensor([[1, 1, 1, 1, 0]])
    loss, metrics = policy_loss(
        torch.zeros_like(new), new, advantages, mask, PolicyLossSettings(), BatchCounts.of(mask)
    )
    assert float(metrics["pg_clipfrac"]) == pytest.approx(2 / 4)
    assert float(metrics["pg_clipfrac_lower"]) == pytest.approx(1 / 4)
    assert float(metrics["ppo_kl"]) == pytest.approx(-(0.5 - 0.5 + 2.0 + 0.0) / 4)
    assert float(loss) == pytest.approx((-1.2 + 0.8 + 3.0 + 1.0) / 4)


def test_gradient_is_zero_where_clipped_and_minus_a_rho_elsewhere() -> None:
    new = torch.tensor([[0.5, 0.1, 4.0]], dtype=torch.float64, requires_grad=True)
    advantages = torch.tensor([[1.0, 2.0, -1.0]], dtype=torch.float64)
    mask = torch.ones(1, 3)
    loss, _ = policy_loss(
        torch.zeros(1, 3, dtype=torch.float64),
        new,
        advantages,
        mask,
        PolicyLossSettings(),
        BatchCounts.of(mask),
    )
    loss.backward()
    assert new.grad is not None
    assert new.grad[0].tolist() == pytest.approx([0.0, -2.0 * math.exp(0.1) / 3, 0.0])


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_loss_and_gradient_do_not_depend_on_micro_batches_ranks_or_row_order(mode: str) -> None:
    data = ragged(12, 7, seed=2)
    settings = PolicyLossSettings(loss_agg_mode=mode)

    def total(order: Tensor, dp_size: int, micro_batch: int) -> tuple[float, Tensor, dict[str, float]]:
        new = data["new"].clone().requires_grad_()
        counts = BatchCounts.of(data["mask"], dp_size=dp_size)
        loss, sums = torch.zeros((), dtype=torch.float64), {}
        per_rank = len(order) // dp_size
        for rank in range(dp_size):
            mine = order[rank * per_rank : (rank + 1) * per_rank]
            for rows in mine.split(micro_batch):
                part, metrics = policy_loss(
                    data["old"][rows],
                    new[rows],
                    data["advantages"][rows],
                    data["mask"][rows],
                    settings,
                    counts,
                )
                loss = loss + part / dp_size
                for name, value in metrics.items():
                    sums[name] = sums.get(name, 0.0) + float(value) / dp_size
        loss.backward()
        assert new.grad is not None
        return float(loss.detach()), new.grad, sums

    identity = torch.arange(12)
    loss, gradient, metrics = total(identity, 1, 12)
    for order, dp_size, micro_batch in [
        (identity, 1, 5),
        (identity, 2, 6),
        (identity.flip(0), 4, 1),
        (torch.randperm(12, generator=torch.Generator().manual_seed(0)), 3, 2),
    ]:
        other_loss, other_gradient, other_metrics = total(order, dp_size, micro_batch)
        assert other_loss == pytest.approx(loss, rel=1e-12)
        torch.testing.assert_close(other_gradient, gradient, rtol=1e-12, atol=1e-14)
        assert other_metrics == pytest.approx(metrics, rel=1e-12)


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_padding_never_enters_even_as_nan(mode: str) -> None:
    data = ragged(12, 7, seed=3)
    settings = PolicyLossSettings(loss_agg_mode=mode, loss_scale_factor=7.0)
    counts = BatchCounts.of(data["mask"])
    expected, _ = call(data, settings, counts)
    wider = {name: torch.nn.functional.pad(value, (0, 3, 0, 2)) for name, value in data.items()}
    off = wider["mask"] == 0
    for name in ("new", "old", "advantages"):
        wider[name] = torch.where(off, torch.full((), math.nan, dtype=torch.float64), wider[name])
    assert BatchCounts.of(wider["mask"]) == counts
    loss, metrics = call(wider, settings, counts)
    assert float(loss) == pytest.approx(float(expected), rel=1e-12)
    assert all(math.isfinite(float(value)) for value in metrics.values())


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_a_part_without_tokens_adds_zero_and_has_a_gradient(mode: str) -> None:
    new = torch.randn(2, 4, requires_grad=True)
    mask = torch.zeros(2, 4)
    loss, _ = policy_loss(
        torch.zeros(2, 4),
        new,
        torch.ones(2, 4),
        mask,
        PolicyLossSettings(loss_agg_mode=mode),
        BatchCounts.of(mask),
    )
    loss.backward()
    assert loss.item() == 0.0
    assert new.grad is not None
    assert not new.grad.any()


def test_far_log_ratios_stay_finite() -> None:
    new = torch.tensor([[500.0, -500.0]])
    mask = torch.ones(1, 2)
    loss, metrics = policy_loss(
        torch.zeros(1, 2), new, torch.tensor([[-1.0, -1.0]]), mask, PolicyLossSettings(), BatchCounts.of(mask)
    )
    assert float(loss) == pytest.approx((3.0 + 0.8) / 2)
    assert float(metrics["ppo_kl"]) == pytest.approx(0.0)


def test_weights_of_a_rollout_correction_multiply_each_token() -> None:
    data = ragged(6, 5, seed=4)
    weights = torch.rand(6, 5, dtype=torch.float64)
    counts = BatchCounts.of(data["mask"])
    loss, _ = policy_loss(
        data["old"], data["new"], data["advantages"], data["mask"], PolicyLossSettings(), counts, weights
    )
    losses = real_losses(data, 0.2, 0.2, 3.0)
    total = sum(value * float(weights[i, t]) for i, row in enumerate(losses) for t, value in enumerate(row))
    assert float(loss) == pytest.approx(total / counts.batch_num_tokens, rel=1e-12)


def test_wrong_settings_are_refused() -> None:
    with pytest.raises(UsageError, match=r"clip_ratio_c=1\.0"):
        PolicyLossSettings(clip_ratio_c=1.0)
    with pytest.raises(UsageError, match="token_mean"):
        PolicyLossSettings(loss_agg_mode="token_mean")
    with pytest.raises(UsageError, match="clip_ratio_low"):
        PolicyLossSettings(clip_ratio_low=1.5)
    with pytest.raises(UsageError, match="batch_num_tokens, dp_size"):
        BatchCounts.from_meta_info({"global_batch_size": 4})
    with pytest.raises(UsageError, match="not one of"):
        agg_loss(torch.ones(1, 1), torch.ones(1, 1), "mean", BatchCounts(1, 1))


def test_a_registered_name_is_taken_once() -> None:
    assert get_policy_loss("vanilla") is policy_loss
    register_policy_loss("vanilla")(policy_loss)
    with pytest.raises(UsageError, match="already"):
        register_policy_loss("vanilla")(lambda *_: None)
    with pytest.raises(UsageError, match="did you mean 'vanilla'"):
        get_policy_loss("vanila")
