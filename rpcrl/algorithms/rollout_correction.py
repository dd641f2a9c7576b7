"""By how much does the policy that sampled differ from the one that is trained, and how is that corrected?

Truncated importance sampling: a token's loss is weighted by ρ = π_old / π_rollout, where π_old are the log-probs that
the trainer's model gives the samples and π_rollout those that the sampler had. (Espeholt et al. 2018, IMPALA; for LLMs
Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training"; the decoupled objective, in
which PPO's ratio is taken to π_old and ρ corrects the rest, is that of Fu et al. 2025, AReaL, section 5.2.)

All tensors are ``[N, R]``; what the mask leaves out enters nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rpcrl.algorithms.kl import LOG_RATIO_LIMIT
from rpcrl.algorithms.masked import keep, masked_mean, masked_sum, masked_var
from rpcrl.config.rollout_threshold import bounds_of
from rpcrl.errors import UsageError

__all__ = ["importance_weights", "rollout_metrics"]


def importance_weights(
    old_log_prob: Tensor,
    rollout_log_prob: Tensor,
    response_mask: Tensor,
    *,
    level: str,
    threshold: float | str,
    batch_normalize: bool = False,
) -> tuple[Tensor, dict[str, float]]:
    """Return each token's weight (0 where the mask is) and ``rollout_corr/rollout_is_*``.

    ``level``: ``token`` weighs each token by its own ρ, ``sequence`` all tokens of a row by the product of theirs. Log
    ratios are limited to ±20. ``batch_normalize`` divides by the mean weight. The weights carry no gradient.
    """
    if level not in ("token", "sequence"):
        raise UsageError(f"rollout_is={level!r} must be token or sequence")
    lower, upper = bounds_of(threshold)
    log_ratio = keep(old_log_prob - rollout_log_prob, response_mask).detach()
    if level == "sequence":
        log_ratio = log_ratio.sum(-1, keepdim=True).expand_as(log_ratio)
    raw = keep(log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp(), response_mask)
    if lower is None:
        weights = raw.clamp(max=upper)
    else:
        weights = torch.where((raw >= lower) & (raw <= upper), raw, torch.zeros_like(raw))
    weights = keep(weights, response_mask)
    metrics = _weight_metrics(raw, weights, response_mask, lower, upper)
    if batch_normalize:
        mean = float(masked_mean(weights, response_mask))
        metrics["rollout_corr/rollout_is_batch_norm_factor"] = mean
        weights = weights / mean if mean > 0.0 else weights
    return weights, metrics


def _weight_metrics(raw: Tensor, weights: Tensor, mask: Tensor, lower: float | None, upper: float) -> dict[str, float]:
    selected = mask.bool()
    if not bool(selected.any()):
        return {}
    kept = weights[selected].double()
    floor = 1.0 / upper if lower is None else lower
    square = float(kept.square().sum())
    return {
        "rollout_corr/rollout_is_mean": float(kept.mean()),
        "rollout_corr/rollout_is_max": float(raw[selected].max()),
        "rollout_corr/rollout_is_min": float(raw[selected].min()),
        "rollout_corr/rollout_is_std": float(masked_var(weights.double(), mask).sqrt()),
        # Kish 1965: how many equally weighted tokens, as a share, would say as much
        "rollout_corr/rollout_is_eff_sample_size": float(kept.sum()) ** 2 / square / kept.numel() if square else 0.0,
        "rollout_corr/rollout_is_ratio_fraction_high": float((raw[selected] > upper).double().mean()),
        "rollout_corr/rollout_is_ratio_fraction_low": float((raw[selected] < floor).double().mean()),
    }


def rollout_metrics(old_log_prob: Tensor, rollout_log_prob: Tensor, response_mask: Tensor) -> dict[str, float]:
    """Return ``rollout_corr/*``: how far the trainer's log-probs of the samples are from the sampler's.

    ``kl`` estimates KL(π_rollout ‖ π_old) by its samples, ``k3_kl`` by Schulman's third estimator; ``chi2_token`` is
    E[ρ²] − 1 over tokens, ``chi2_seq`` over rows; ``*_ppl`` are perplexities of rows, averaged. Empty for a batch
    without response tokens.
    """
    if not bool(response_mask.any()):
        return {}
    mask = response_mask
    old, rollout = keep(old_log_prob, mask).double(), keep(rollout_log_prob, mask).double()
    log_ratio = (old - rollout).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    ratio = log_ratio.exp()
    rows = mask.bool().any(-1)
    old_log_ppl = -masked_mean(old, mask, -1)[rows]
    rollout_log_ppl = -masked_mean(rollout, mask, -1)[rows]
    difference = old_log_ppl - rollout_log_ppl
    sequence = masked_sum(log_ratio, mask, -1)[rows].clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    figures = {
        "kl": masked_mean(-log_ratio, mask),
        "k3_kl": masked_mean(ratio - 1.0 - log_ratio, mask),
        "training_log_ppl": old_log_ppl.mean(),
        "training_ppl": old_log_ppl.exp().mean(),
        "rollout_log_ppl": rollout_log_ppl.mean(),
        "rollout_ppl": rollout_log_ppl.exp().mean(),
        "log_ppl_diff": difference.mean(),
        "log_ppl_abs_diff": difference.abs().mean(),
        "log_ppl_diff_max": difference.max(),
        "log_ppl_diff_min": difference.min(),
        "ppl_ratio": difference.exp().mean(),
        "chi2_token": masked_mean(ratio.square(), mask) - 1.0,
        "chi2_seq": (2.0 * sequence).exp().mean() - 1.0,
    }
    return {f"rollout_corr/{name}": float(value) for name, value in figures.items()}
