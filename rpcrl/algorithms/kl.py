"""How far is the policy from its reference, token by token, and how does that enter reward or loss?

The estimators are those of Schulman's note "Approximating KL Divergence" (2020) for samples of the policy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from rpcrl.algorithms.masked import keep, masked_mean
from rpcrl.errors import UsageError

__all__ = ["KL_PENALTIES", "AdaptiveKl", "FixedKl", "KlController", "kl_controller", "kl_in_reward", "kl_penalty"]

KL_PENALTIES = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3")
"""Each also with a trailing ``+`` (see ``kl_penalty``)."""

LOG_RATIO_LIMIT = 20.0
"""exp(20) is 4.9e8: beyond it a ratio says only "broken", and float32 overflows at 88."""
K3_LIMIT = 10.0


def kl_penalty(log_prob: Tensor, ref_log_prob: Tensor, kind: str) -> Tensor:
    """Return an estimate of KL(policy ‖ reference) per token, in the shape of ``log_prob`` (``[N, R]``).

    With d = log π − log π_ref: ``kl``/``k1`` d; ``abs`` |d|; ``mse``/``k2`` d²/2; ``low_var_kl``/``k3``
    exp(−d) + d − 1 (d limited to ±20, the result to ±10). A trailing ``+`` keeps the estimator's value and takes k2's
    gradient, which is the unbiased gradient of the KL (that of k1 is 0 in expectation, that of k3 biased).

    Raises UsageError for an unknown kind.
    """
    base = kind.removesuffix("+")
    difference = log_prob - ref_log_prob
    if base in ("kl", "k1"):
        value = difference
    elif base == "abs":
        value = difference.abs()
    elif base in ("mse", "k2"):
        value = 0.5 * difference.square()
    elif base in ("low_var_kl", "k3"):
        limited = difference.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        # expm1 keeps the small values that exp(-d) - 1 loses to cancellation near d = 0.
        value = (torch.expm1(-limited) + limited).clamp(-K3_LIMIT, K3_LIMIT)
    else:
        known = ", ".join(KL_PENALTIES)
        raise UsageError(f"KL estimator {kind!r} is not one of {known}, each optionally with a trailing '+'")
    if kind.endswith("+"):
        surrogate = 0.5 * difference.square()
        return surrogate + (value - surrogate).detach()
    return value


def kl_in_reward(
    token_level_scores: Tensor,
    old_log_prob: Tensor,
    ref_log_prob: Tensor,
    response_mask: Tensor,
    *,
    kl_coef: float,
    kind: str = "kl",
) -> tuple[Tensor, Tensor]:
    """Return ``(token_level_rewards [N, R], mean KL)``: scores less ``kl_coef`` times the KL of each token.

    All inputs are ``[N, R]``; the mean KL (a scalar) is the mean over sequences of each one's mean over its tokens.
    (Ziegler et al. 2019; InstructGPT, Ouyang et al. 2022.)
    """
    kl = keep(kl_penalty(old_log_prob, ref_log_prob, kind), response_mask)
    per_sequence = masked_mean(kl, response_mask, dim=-1)
    present = response_mask.bool().any(-1)
    return token_level_scores - kl_coef * kl, masked_mean(per_sequence, present)


class KlController(Protocol):
    """Chooses the weight of the KL in the reward."""

    coefficient: float
    """The weight of the next step."""

    def update(self, mean_kl: float, samples: int) -> None:
        """Hear the mean KL of a step of ``samples`` rows."""
        ...


@dataclass
class FixedKl:
    """The same weight in every step."""

    coefficient: float

    def update(self, mean_kl: float, samples: int) -> None:
        """Change nothing."""


@dataclass
class AdaptiveKl:
    """A weight that rises while the KL is above its target and falls while it is below.

    After a step of n samples it is multiplied by 1 + clip(KL / target − 1, ±0.2) · n / horizon.
    (Ziegler et al. 2019, section 2.2.) Raises UsageError for a horizon or a target that is not above 0.
    """

    coefficient: float
    target: float
    horizon: float

    def __post_init__(self) -> None:
        if self.target <= 0 or self.horizon <= 0:
            raise UsageError(
                f"kl_ctrl.target_kl={self.target} and kl_ctrl.horizon={self.horizon} must both be above 0: the KL is "
                "divided by the one, and the samples by the other"
            )

    def update(self, mean_kl: float, samples: int) -> None:
        """Move the weight by the step's mean KL."""
        error = min(max(mean_kl / self.target - 1.0, -ADAPTIVE_LIMIT), ADAPTIVE_LIMIT)
        self.coefficient *= 1.0 + error * samples / self.horizon


ADAPTIVE_LIMIT = 0.2


def kl_controller(kind: str, *, kl_coef: float, target_kl: float, horizon: float) -> KlController:
    """Return the controller that ``algorithm.kl_ctrl`` describes; ``kind`` is ``fixed`` or ``adaptive``.

    Raises UsageError for another kind.
    """
    if kind == "fixed":
        return FixedKl(kl_coef)
    if kind == "adaptive":
        return AdaptiveKl(kl_coef, target_kl, horizon)
    raise UsageError(f"kl_ctrl.type={kind!r} is not one of fixed, adaptive")
