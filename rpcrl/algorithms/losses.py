"""Which loss moves the policy towards its better responses, and the critic towards what they were worth?

A policy loss gets the micro-batch's ``[n, R]`` tensors, its settings and the counts of the whole mini-batch, and
returns a scalar and metrics. Both scale alike: summed over micro-batches and averaged over dp ranks they are the
mini-batch's values.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from rpcrl.algorithms.aggregate import LOSS_AGG_MODES, BatchCounts, agg_loss
from rpcrl.algorithms.kl import LOG_RATIO_LIMIT
from rpcrl.algorithms.masked import keep
from rpcrl.config.registry import POLICY_LOSSES, register_policy_loss
from rpcrl.errors import UsageError

__all__ = ["PolicyLoss", "PolicyLossSettings", "get_policy_loss", "policy_loss", "value_loss"]


@dataclass(frozen=True)
class PolicyLossSettings:
    """The settings of ``actor_rollout_ref.actor`` that a policy loss reads."""

    clip_ratio: float = 0.2
    clip_ratio_low: float | None = None
    """None: ``clip_ratio``."""
    clip_ratio_high: float | None = None
    """None: ``clip_ratio``. Above ``clip_ratio_low`` it is DAPO's clip-higher."""
    clip_ratio_c: float = 3.0
    """Bound of the loss of a bad token, dual clip; above 1."""
    loss_agg_mode: str = "token-mean"
    loss_scale_factor: float | None = None

    def __post_init__(self) -> None:
        if self.clip_ratio_c <= 1.0:
            raise UsageError(f"clip_ratio_c={self.clip_ratio_c} must be above 1 (dual clip bounds ratios above 1)")
        if not 0.0 <= self.low <= 1.0 or self.high < 0.0:
            raise UsageError(
                f"clip range [1 - {self.low}, 1 + {self.high}]: clip_ratio_low must lie in [0, 1] and clip_ratio_high "
                "be 0 or more"
            )
        if self.loss_agg_mode not in LOSS_AGG_MODES:
            raise UsageError(f"loss_agg_mode={self.loss_agg_mode!r} is not one of {', '.join(LOSS_AGG_MODES)}")

    @property
    def low(self) -> float:
        """How far below 1 the ratio may go."""
        return self.clip_ratio if self.clip_ratio_low is None else self.clip_ratio_low

    @property
    def high(self) -> float:
        """How far above 1 the ratio may go."""
        return self.clip_ratio if self.clip_ratio_high is None else self.clip_ratio_high


PolicyLoss = Callable[..., tuple[Tensor, dict[str, Tensor]]]
"""(old_log_prob, log_prob, advantages, response_mask, settings, counts, rollout_is_weights=None) → (loss, metrics)."""


def get_policy_loss(name: str) -> PolicyLoss:
    """Return the loss that ``actor.policy_loss.loss_mode`` names, by its name or import path.

    Raises UsageError or ConfigError if there is none.
    """
    return POLICY_LOSSES[name]


@register_policy_loss("vanilla")
def policy_loss(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    settings: PolicyLossSettings,
    counts: BatchCounts,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return PPO's clipped loss and its metrics; all inputs are ``[n, R]``.

    With ρ = π/π_old (log-ratio limited to ±20) a token's loss is max(−Aρ, −A·clip(ρ, 1 − low, 1 + high)), and for
    A < 0 at most −A·c. (PPO, Schulman et al. 2017, equation 7; dual clip, Ye et al. 2020,
    equation 5; clip-higher, DAPO, Yu et al. 2025, section 3.1.)
    Metrics, means over tokens: ``pg_clipfrac`` (the clip was active), ``pg_clipfrac_lower`` (the dual clip was),
    ``ppo_kl`` (−log ρ).
    """
    log_ratio = keep(log_prob - old_log_prob, response_mask).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    ratio = log_ratio.exp()
    advantage = keep(advantages, response_mask)
    unclipped = -advantage * ratio
    clipped = -advantage * ratio.clamp(1.0 - settings.low, 1.0 + settings.high)
    pessimistic = torch.maximum(unclipped, clipped)
    bound = -advantage * settings.clip_ratio_c
    negative = advantage < 0
    losses = torch.where(negative, torch.minimum(pessimistic, bound), pessimistic)
    if rollout_is_weights is not None:
        losses = losses * keep(rollout_is_weights, response_mask)
    loss = agg_loss(losses, response_mask, settings.loss_agg_mode, counts, loss_scale_factor=settings.loss_scale_factor)
    with torch.no_grad():
        fractions = {
            "pg_clipfrac": (clipped > unclipped).to(losses.dtype),
            "pg_clipfrac_lower": ((pessimistic > bound) & negative).to(losses.dtype),
            "ppo_kl": -log_ratio,
        }
        metrics = {name: agg_loss(value, response_mask, "token-mean", counts) for name, value in fractions.items()}
    return loss, metrics


def value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    response_mask: Tensor,
    counts: BatchCounts,
    *,
    cliprange_value: float = 0.5,
    loss_agg_mode: str = "token-mean",
    loss_scale_factor: float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the critic's clipped loss and its metrics; all inputs are ``[n, R]``.

    A token's loss is ½·max((V − ret)², (clip(V, V_old ± cliprange_value) − ret)²): a value gains nothing by moving
    further than the range from what it was when the samples were drawn. (Schulman et al. 2016; in this form in
    OpenAI's baselines, see Huang et al. 2022, "The 37 Implementation Details of PPO", detail 9.)
    Metrics, means over tokens: ``vf_clipfrac`` (the clipped term was the larger one), ``vpred_mean``.
    """
    new = keep(values, response_mask)
    old, target = keep(old_values, response_mask), keep(returns, response_mask)
    clipped = torch.clamp(new, old - cliprange_value, old + cliprange_value)
    plain_loss, clipped_loss = (new - target).square(), (clipped - target).square()
    losses = 0.5 * torch.maximum(plain_loss, clipped_loss)
    loss = agg_loss(losses, response_mask, loss_agg_mode, counts, loss_scale_factor=loss_scale_factor)
    with torch.no_grad():
        figures = {"vf_clipfrac": (clipped_loss > plain_loss).to(losses.dtype), "vpred_mean": new}
        metrics = {name: agg_loss(value, response_mask, "token-mean", counts) for name, value in figures.items()}
    return loss, metrics
