"""Are KL estimators, entropies and masked statistics right, at the edges too?"""

from __future__ import annotations

import math

import pytest
import torch

from rpcrl.algorithms.kl import kl_controller, kl_in_reward, kl_penalty
from rpcrl.algorithms.logits import entropy_from_logits, log_prob_and_entropy
from rpcrl.algorithms.masked import masked_mean, masked_sum, masked_var, masked_whiten
from rpcrl.errors import UsageError

D = torch.tensor([-1.5, -1e-3, 0.0, 0.3, 2.0], dtype=torch.float64)

FORMULAS = {
    "kl": lambda d: d,
    "k1": lambda d: d,
    "abs": abs,
    "mse": lambda d: d * d / 2,
    "k2": lambda d: d * d / 2,
    "low_var_kl": lambda d: math.exp(-d) + d - 1,
    "k3": lambda d: math.exp(-d) + d - 1,
}


@pytest.mark.parametrize("kind", FORMULAS)
@pytest.mark.parametrize("suffix", ["", "+"])
def test_estimators_equal_their_formulas(kind: str, suffix: str) -> None:
    values = kl_penalty(D - 3.0, torch.full_like(D, -3.0), kind + suffix)
    assert values.tolist() == pytest.approx([FORMULAS[kind](float(d)) for d in D], rel=1e-9, abs=1e-15)


@pytest.mark.parametrize("kind", FORMULAS)
def test_straight_through_has_the_gradient_of_k2(kind: str) -> None:
    log_prob = D.clone().requires_grad_()
    kl_penalty(log_prob, torch.zeros_like(D), kind + "+").sum().backward()
    assert log_prob.grad is not None
    assert log_prob.grad.tolist() == pytest.approx(D.tolist())


def test_k3_is_unbiased_under_the_policy_and_never_negative() -> None:
    logits = torch.randn(2, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    policy, reference = logits.log_softmax(-1)
    expected = float((policy.exp() * (policy - reference)).sum())
    for kind in ("k1", "k3"):
        assert float((policy.exp() * kl_penalty(policy, reference, kind)).sum()) == pytest.approx(expected)
    assert bool((kl_penalty(policy, reference, "k3") >= 0).all())


def test_k3_limits_far_values() -> None:
    far = torch.tensor([-1000.0, 1000.0])
    assert kl_penalty(far, torch.zeros(2), "k3").tolist() == [10.0, 10.0]


def test_an_unknown_estimator_is_refused() -> None:
    with pytest.raises(UsageError, match="'full'"):
        kl_penalty(D, D, "full")


def test_kl_in_reward_takes_tokens_and_ignores_padding() -> None:
    scores = torch.tensor([[0.0, 1.0, 0.0], [0.5, 0.0, 0.0], [0.0, 0.0, 0.0]])
    mask = torch.tensor([[1, 1, 0], [1, 0, 0], [0, 0, 0]])
    old = torch.tensor([[-1.0, -2.0, math.nan], [-1.0, math.nan, math.nan], [math.nan] * 3])
    reference = torch.tensor([[-1.5, -2.0, math.nan], [-3.0, math.nan, math.nan], [math.nan] * 3])
    rewards, kl = kl_in_reward(scores, old, reference, mask, kl_coef=0.1)
    expected = torch.tensor([[-0.05, 1.0, 0.0], [0.3, 0.0, 0.0], [0.0, 0.0, 0.0]])
    torch.testing.assert_close(rewards, expected)
    assert float(kl) == pytest.approx((0.25 + 2.0) / 2)


def test_entropy_and_log_prob_of_known_distributions() -> None:
    logits = torch.tensor([[0.0] * 8, [0.0] + [-math.inf] * 7])
    assert entropy_from_logits(logits).tolist() == pytest.approx([math.log(8), 0.0])
    values = torch.tensor([[1.0, 2.0, 4.0]])
    chosen, entropy = log_prob_and_entropy(values, torch.tensor([2]), temperature=2.0)
    probabilities = torch.softmax(values[0].double() / 2, -1)
    assert float(chosen) == pytest.approx(math.log(float(probabilities[2])), rel=1e-6)
    assert float(entropy) == pytest.approx(-sum(float(p) * math.log(float(p)) for p in probabilities), rel=1e-6)
    assert chosen.dtype == entropy.dtype == torch.float32


def test_masked_statistics_skip_what_is_masked_out() -> None:
    values = torch.tensor([[1.0, 2.0, math.nan], [6.0, math.inf, math.nan]])
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    assert float(masked_sum(values, mask)) == 9.0
    assert masked_mean(values, mask, dim=-1).tolist() == [1.5, 6.0]
    assert float(masked_var(values, mask)) == pytest.approx(7.0)
    whitened = masked_whiten(values, mask)
    assert float(masked_mean(whitened, mask)) == pytest.approx(0.0, abs=1e-6)
    assert float(masked_var(whitened, mask)) == pytest.approx(1.0)
    assert whitened[mask == 0].tolist() == [0.0, 0.0, 0.0]
    assert float(masked_mean(masked_whiten(values, mask, shift_mean=False), mask)) == pytest.approx(3.0)


@pytest.mark.parametrize("count", [0, 1])
def test_masks_of_none_or_one_give_zeros(count: int) -> None:
    values = torch.tensor([3.0, 4.0])
    mask = torch.tensor([1, 0]) * count
    assert float(masked_mean(values, mask)) == 3.0 * count
    assert float(masked_var(values, mask)) == 0.0
    assert masked_whiten(values, mask).tolist() == [0.0, 0.0]


def adaptive(**changes: float):
    return kl_controller("adaptive", **{"kl_coef": 0.2, "target_kl": 6.0, "horizon": 10_000.0, **changes})


def test_a_fixed_weight_stays() -> None:
    fixed = kl_controller("fixed", kl_coef=0.2, target_kl=6.0, horizon=10.0)
    fixed.update(100.0, 256)
    assert fixed.coefficient == 0.2


@pytest.mark.parametrize(
    ("mean_kl", "error"), [(6.0, 0.0), (6.6, 0.1), (5.7, -0.05), (60.0, 0.2), (0.0, -0.2), (-3.0, -0.2)]
)
def test_an_adaptive_weight_follows_the_papers_rule(mean_kl: float, error: float) -> None:
    control = adaptive()
    control.update(mean_kl, 256)
    assert control.coefficient == pytest.approx(0.2 * (1 + error * 256 / 10_000))
    control.update(mean_kl, 64)
    assert control.coefficient == pytest.approx(0.2 * (1 + error * 256 / 10_000) * (1 + error * 64 / 10_000))


def test_controllers_without_a_target_or_a_horizon_are_refused() -> None:
    for changes in ({"target_kl": 0.0}, {"horizon": 0.0}):
        with pytest.raises(UsageError, match="must both be above 0"):
            adaptive(**changes)
    with pytest.raises(UsageError, match=r"kl_ctrl\.type='linear' is not one of fixed, adaptive"):
        kl_controller("linear", kl_coef=0.2, target_kl=6.0, horizon=10.0)
