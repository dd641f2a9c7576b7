"""How good was each response, compared with what?

An estimator gets rewards ``[N, R]``, the response mask ``[N, R]`` and the rows' prompts, and returns
``(advantages, returns)``, both ``[N, R]``, zero where the mask is 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from rpcrl.algorithms.masked import keep
from rpcrl.algorithms.registry import Registry
from rpcrl.errors import BatchError

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = [
    "AdvantageEstimator",
    "compute_grpo_outcome_advantage",
    "get_advantage",
    "group_mean_std",
    "register_advantage",
]

AdvantageEstimator = Callable[..., tuple[Tensor, Tensor]]
"""(token_level_rewards, response_mask, uid, **settings) → (advantages, returns)."""

_ESTIMATORS: Registry[AdvantageEstimator] = Registry("advantage estimator")
register_advantage = _ESTIMATORS.register


def get_advantage(name: str) -> AdvantageEstimator:
    """Return the estimator registered as ``name`` (``algorithm.adv_estimator``). Raises UsageError if unknown."""
    return _ESTIMATORS[name]


def group_mean_std(scores: Tensor, uid: Sequence[object] | NDArray[np.object_]) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``(mean, std, size)`` of each row's group, each ``[N]`` (float64, float64, int64).

    Rows with equal ``uid`` form a group; std divides by size − 1. A group of one has no spread to compare with and
    gets mean 0 and std 1, so that its score is kept. Raises BatchError when the lengths differ.
    """
    labels = np.asarray([str(label) for label in uid])
    if labels.shape[0] != scores.shape[0]:
        raise BatchError(f"uid names {labels.shape[0]} rows, but there are {scores.shape[0]} scores")
    _, inverse = np.unique(labels, return_inverse=True)
    group = torch.as_tensor(inverse.reshape(-1), dtype=torch.int64, device=scores.device)
    groups = int(group.max()) + 1 if group.numel() else 0
    values = scores.to(torch.float64)
    size = torch.zeros(groups, dtype=torch.float64, device=scores.device)
    size.index_add_(0, group, torch.ones_like(values))
    mean = torch.zeros_like(size).index_add_(0, group, values) / size
    squares = torch.zeros_like(size).index_add_(0, group, (values - mean[group]).square())
    std = (squares / (size - 1).clamp(min=1)).sqrt()
    single = size == 1
    mean = torch.where(single, torch.zeros_like(mean), mean)
    std = torch.where(single, torch.ones_like(std), std)
    return mean[group], std[group], size[group].to(torch.int64)


@register_advantage("grpo")
def compute_grpo_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    uid: Sequence[object] | NDArray[np.object_],
    *,
    norm_adv_by_std_in_grpo: bool = True,
    epsilon: float = 1e-6,
) -> tuple[Tensor, Tensor]:
    """Return GRPO's outcome advantages and returns (equal), ``[N, R]``.

    A row's score is the sum of its rewards; its advantage is (score − group mean) / (group std + epsilon), the same
    for every token of its mask. Groups are rows of one ``uid``; a group of one keeps its score (mean 0, std 1).
    Without ``norm_adv_by_std_in_grpo`` nothing is divided (Dr. GRPO, Liu et al. 2025). Statistics are float64, so
    that the order of the rows does not matter. (DeepSeekMath, Shao et al. 2024.)
    """
    scores = token_level_rewards.sum(-1, dtype=torch.float64)
    mean, std, _ = group_mean_std(scores, uid)
    advantage = scores - mean
    if norm_adv_by_std_in_grpo:
        advantage = advantage / (std + epsilon)
    spread = advantage.to(token_level_rewards.dtype).unsqueeze(-1).expand(response_mask.shape)
    advantages = keep(spread, response_mask)
    return advantages, advantages.clone()
