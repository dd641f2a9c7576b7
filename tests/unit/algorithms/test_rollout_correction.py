"""Are the weights and figures of rollout correction what their definitions say, in float64 and token by token?"""

from __future__ import annotations

import math

import pytest
import torch

from rpcrl.algorithms.rollout_correction import importance_weights, rollout_metrics
from rpcrl.errors import UsageError


def tensors(seed=0, rows=5, length=7, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    rollout = -torch.rand(rows, length, generator=generator, dtype=torch.float64) * 3
    old = rollout + 0.7 * torch.randn(rows, length, generator=generator, dtype=torch.float64)
    lengths = torch.randint(1, length + 1, (rows,), generator=generator)
    mask = (torch.arange(length) < lengths.unsqueeze(1)).long()
    return old.to(dtype), rollout.to(dtype), mask


def rows_of(old, rollout, mask):
    """Yield each row's (old, rollout) log-probs as plain numbers."""
    for row in range(mask.shape[0]):
        count = int(mask[row].sum())
        yield old[row, :count].tolist(), rollout[row, :count].tolist()


def reference_weights(old, rollout, mask, level, lower, upper):
    expected = torch.zeros_like(old, dtype=torch.float64)
    for row, (olds, rollouts) in enumerate(rows_of(old, rollout, mask)):
        logs = [a - b for a, b in zip(olds, rollouts, strict=True)]
        for position, log in enumerate(logs):
            ratio = math.exp(max(-20.0, min(20.0, sum(logs) if level == "sequence" else log)))
            if lower is None:
                expected[row, position] = min(ratio, upper)
            else:
                expected[row, position] = ratio if lower <= ratio <= upper else 0.0
    return expected


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize(
    ("threshold", "lower", "upper"), [(1.5, None, 1.5), ("0.5_2.0", 0.5, 2.0), (100.0, None, 100.0)]
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_weights_are_the_references(level, threshold, lower, upper, dtype):
    old, rollout, mask = tensors(dtype=dtype)
    weights, metrics = importance_weights(old, rollout, mask, level=level, threshold=threshold)
    expected = reference_weights(old, rollout, mask, level, lower, upper)
    torch.testing.assert_close(weights.double(), expected, rtol=1e-5 if dtype is torch.float32 else 1e-12, atol=1e-6)
    chosen = expected[mask.bool()]
    raw = reference_weights(old, rollout, mask, level, None, math.inf)[mask.bool()]
    assert metrics["rollout_corr/rollout_is_mean"] == pytest.approx(float(chosen.mean()), rel=1e-5)
    assert metrics["rollout_corr/rollout_is_std"] == pytest.approx(float(chosen.std()), rel=1e-4)
    assert metrics["rollout_corr/rollout_is_max"] == pytest.approx(float(raw.max()), rel=1e-5)
    assert metrics["rollout_corr/rollout_is_min"] == pytest.approx(float(raw.min()), rel=1e-5)
    size = float(chosen.sum()) ** 2 / float((chosen**2).sum()) / len(chosen)
    assert metrics["rollout_corr/rollout_is_eff_sample_size"] == pytest.approx(size, rel=1e-5)
    high = float((raw > upper).double().mean())
    low = float((raw < (1 / upper if lower is None else lower)).double().mean())
    assert metrics["rollout_corr/rollout_is_ratio_fraction_high"] == pytest.approx(high)
    assert metrics["rollout_corr/rollout_is_ratio_fraction_low"] == pytest.approx(low)


def test_normalised_weights_have_mean_one():
    old, rollout, mask = tensors()
    plain, _ = importance_weights(old, rollout, mask, level="token", threshold=2.0)
    weights, metrics = importance_weights(old, rollout, mask, level="token", threshold=2.0, batch_normalize=True)
    factor = metrics["rollout_corr/rollout_is_batch_norm_factor"]
    assert float(weights[mask.bool()].mean()) == pytest.approx(1.0)
    torch.testing.assert_close(weights * factor, plain)


def test_equal_policies_have_weight_one_and_what_is_masked_enters_nothing():
    old, _, mask = tensors()
    poisoned = torch.where(mask.bool(), old, torch.full_like(old, math.nan))
    weights, metrics = importance_weights(poisoned, old, mask, level="sequence", threshold=2.0)
    torch.testing.assert_close(weights, mask.double())
    assert metrics["rollout_corr/rollout_is_eff_sample_size"] == pytest.approx(1.0)
    figures = rollout_metrics(poisoned, old, mask)
    for name in ("kl", "k3_kl", "log_ppl_diff", "chi2_token", "chi2_seq"):
        assert figures[f"rollout_corr/{name}"] == pytest.approx(0.0, abs=1e-12)
    assert figures["rollout_corr/ppl_ratio"] == pytest.approx(1.0)


def test_weights_carry_no_gradient():
    old, rollout, mask = tensors()
    weights, _ = importance_weights(old.requires_grad_(True), rollout, mask, level="token", threshold=2.0)
    assert not weights.requires_grad


def test_extreme_ratios_are_limited():
    mask = torch.ones(1, 2, dtype=torch.long)
    old, rollout = torch.tensor([[0.0, -500.0]]), torch.tensor([[-500.0, 0.0]])
    weights, _ = importance_weights(old, rollout, mask, level="token", threshold=float("inf"))
    assert weights[0].tolist() == pytest.approx([math.exp(20.0), math.exp(-20.0)], rel=1e-5)


def test_figures_are_the_references():
    old, rollout, mask = tensors(seed=3)
    logs, row_sums, old_ppl, rollout_ppl = [], [], [], []
    for olds, rollouts in rows_of(old, rollout, mask):
        difference = [a - b for a, b in zip(olds, rollouts, strict=True)]
        logs += difference
        row_sums.append(sum(difference))
        old_ppl.append(-sum(olds) / len(olds))
        rollout_ppl.append(-sum(rollouts) / len(rollouts))

    def mean(values):
        return sum(values) / len(values)

    gaps = [a - b for a, b in zip(old_ppl, rollout_ppl, strict=True)]
    expected = {
        "kl": -mean(logs),
        "k3_kl": mean([math.exp(log) - 1 - log for log in logs]),
        "training_log_ppl": mean(old_ppl),
        "training_ppl": mean([math.exp(value) for value in old_ppl]),
        "rollout_log_ppl": mean(rollout_ppl),
        "rollout_ppl": mean([math.exp(value) for value in rollout_ppl]),
        "log_ppl_diff": mean(gaps),
        "log_ppl_abs_diff": mean([abs(gap) for gap in gaps]),
        "log_ppl_diff_max": max(gaps),
        "log_ppl_diff_min": min(gaps),
        "ppl_ratio": mean([math.exp(gap) for gap in gaps]),
        "chi2_token": mean([math.exp(2 * log) for log in logs]) - 1,
        "chi2_seq": mean([math.exp(2 * total) for total in row_sums]) - 1,
    }
    figures = rollout_metrics(old, rollout, mask)
    assert set(figures) == {f"rollout_corr/{name}" for name in expected}
    for name, value in expected.items():
        assert figures[f"rollout_corr/{name}"] == pytest.approx(value, rel=1e-9), name


def test_a_batch_without_a_token_has_no_figures():
    old, rollout, _ = tensors()
    nothing = torch.zeros_like(old, dtype=torch.long)
    assert rollout_metrics(old, rollout, nothing) == {}
    weights, metrics = importance_weights(old, rollout, nothing, level="token", threshold=2.0, batch_normalize=True)
    assert float(weights.abs().sum()) == 0.0
    assert metrics == {"rollout_corr/rollout_is_batch_norm_factor": 0.0}


def test_an_unknown_level_is_refused():
    with pytest.raises(UsageError, match="token or sequence"):
        importance_weights(*tensors(), level="word", threshold=2.0)
