"""How good was each response, compared with what?

An estimator is called with those of these keyword arguments that its signature names, and returns
``(advantages, returns)``, both ``[N, R]``, zero where the mask is 0:

- ``token_level_rewards`` ``[N, R]``, ``response_mask`` ``[N, R]``, ``uid`` (the prompt of each of the N rows);
- ``gamma``, ``lam``, ``norm_adv_by_std_in_grpo``: the settings of ``algorithm``;
- ``values`` ``[N, R]``, where there is a critic, and every other column of the batch by its name, e.g.
  ``old_log_probs``.

A score is the sum of a row's rewards; groups are rows of one ``uid``. Statistics are float64, so that the order of the
rows does not matter.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from rpcrl.algorithms.masked import keep, masked_whiten
from rpcrl.config.functions import needed_arguments
from rpcrl.config.registry import ADVANTAGES, register_advantage
from rpcrl.errors import BatchError, UsageError

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = [
    "AdvantageEstimator",
    "compute_dr_grpo_outcome_advantage",
    "compute_gae_advantage_return",
    "compute_grpo_outcome_advantage",
    "compute_reinforce_plus_plus_baseline_outcome_advantage",
    "compute_reinforce_plus_plus_outcome_advantage",
    "compute_rloo_outcome_advantage",
    "estimate_advantages",
    "get_advantage",
    "group_mean_std",
]

AdvantageEstimator = Callable[..., tuple[Tensor, Tensor]]


def get_advantage(name: str) -> AdvantageEstimator:
    """Return the estimator that ``algorithm.adv_estimator`` names, by its name or import path.

    Raises UsageError or ConfigError if there is none.
    """
    return ADVANTAGES[name]


def estimate_advantages(estimator: AdvantageEstimator, available: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """Call ``estimator`` with what it asks for of ``available`` and return its ``(advantages, returns)``, ``[N, R]``.

    Raises UsageError naming the arguments that are not there, or what is wrong with the result.
    """
    missing = [name for name in needed_arguments(estimator) if name not in available]
    if missing:
        hint = " (values need a critic: set critic.enable=true)" if "values" in missing else ""
        raise UsageError(
            f"{_name(estimator)} needs {', '.join(missing)}{hint}; there are {', '.join(sorted(available))}"
        )
    parameters = inspect.signature(estimator).parameters
    takes_all = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    result: Any = estimator(**{name: value for name, value in available.items() if takes_all or name in parameters})
    shape = available["response_mask"].shape
    if (
        not isinstance(result, tuple)
        or len(result) != 2
        or not all(isinstance(part, Tensor) and part.shape == shape for part in result)
    ):
        found = [list(part.shape) if isinstance(part, Tensor) else type(part).__name__ for part in _parts(result)]
        raise UsageError(
            f"{_name(estimator)} must return (advantages, returns), both tensors of shape {list(shape)}; it returned "
            f"{found}"
        )
    advantages, returns = result
    return advantages, returns


def _parts(result: Any) -> Sequence[Any]:
    return result if isinstance(result, tuple | list) else [result]


def _name(estimator: AdvantageEstimator) -> str:
    return f"the advantage estimator {estimator.__module__}.{estimator.__qualname__}"


# ---------------------------------------------------------------- groups


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


def _scores(token_level_rewards: Tensor) -> Tensor:
    return token_level_rewards.sum(-1, dtype=torch.float64)


def _spread(per_row: Tensor, like: Tensor, response_mask: Tensor) -> Tensor:
    """Give every token of a row's mask the row's value, in the dtype of ``like``."""
    return keep(per_row.to(like.dtype).unsqueeze(-1).expand(response_mask.shape), response_mask)


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

    A row's advantage is (score − group mean) / (group std + epsilon), the same for every token of its mask; a group
    of one keeps its score (mean 0, std 1). Without ``norm_adv_by_std_in_grpo`` nothing is divided.
    (DeepSeekMath, Shao et al. 2024, section 4.1.2.)
    """
    scores = _scores(token_level_rewards)
    mean, std, _ = group_mean_std(scores, uid)
    advantage = scores - mean
    if norm_adv_by_std_in_grpo:
        advantage = advantage / (std + epsilon)
    advantages = _spread(advantage, token_level_rewards, response_mask)
    return advantages, advantages.clone()


@register_advantage("dr_grpo")
def compute_dr_grpo_outcome_advantage(
    token_level_rewards: Tensor, response_mask: Tensor, uid: Sequence[object] | NDArray[np.object_]
) -> tuple[Tensor, Tensor]:
    """Return Dr. GRPO's outcome advantages and returns (equal), ``[N, R]``: score − group mean, divided by nothing.

    The paper's other half, the loss without the response's length, is ``loss_agg_mode=seq-mean-token-sum-norm``.
    (Understanding R1-Zero-Like Training, Liu et al. 2025, section 3.)
    """
    return compute_grpo_outcome_advantage(token_level_rewards, response_mask, uid, norm_adv_by_std_in_grpo=False)


@register_advantage("rloo")
def compute_rloo_outcome_advantage(
    token_level_rewards: Tensor, response_mask: Tensor, uid: Sequence[object] | NDArray[np.object_]
) -> tuple[Tensor, Tensor]:
    """Return leave-one-out advantages and returns (equal), ``[N, R]``.

    A row's advantage is its score less the mean score of the *other* rows of its group, which is
    n/(n − 1) · (score − group mean); a group of one keeps its score.
    (Back to Basics, Ahmadian et al. 2024, section 3; Kool et al. 2019.)
    """
    scores = _scores(token_level_rewards)
    mean, _, count = group_mean_std(scores, uid)
    size = count.to(torch.float64)
    factor = size / (size - 1).clamp(min=1)
    advantages = _spread(factor * (scores - mean), token_level_rewards, response_mask)
    return advantages, advantages.clone()


@register_advantage("reinforce_plus_plus_baseline")
def compute_reinforce_plus_plus_baseline_outcome_advantage(
    token_level_rewards: Tensor, response_mask: Tensor, uid: Sequence[object] | NDArray[np.object_]
) -> tuple[Tensor, Tensor]:
    """Return REINFORCE++-baseline's advantages and returns (equal), ``[N, R]``.

    score − group mean (a group of one: its score) on every token, then whitened over all tokens of the batch.
    (REINFORCE++, Hu 2025, section 3.2.)
    """
    scores = _scores(token_level_rewards)
    mean, _, _ = group_mean_std(scores, uid)
    centred = (scores - mean).unsqueeze(-1).expand(response_mask.shape)
    advantages = masked_whiten(centred, response_mask).to(token_level_rewards.dtype)
    return advantages, advantages.clone()


# ---------------------------------------------------------------- token by token


@register_advantage("reinforce_plus_plus")
def compute_reinforce_plus_plus_outcome_advantage(
    token_level_rewards: Tensor, response_mask: Tensor, *, gamma: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Return REINFORCE++'s advantages and discounted returns, ``[N, R]``.

    The return of a token is Σ_k γ^k · reward over the tokens of its mask from it on; tokens outside of the mask are
    skipped and discount nothing. Advantages are the returns whitened over all tokens of the batch.
    (REINFORCE++, Hu 2025, section 3.1; the KL of its reward is ``algorithm.use_kl_in_reward``.)
    """
    rewards = keep(token_level_rewards, response_mask).to(torch.float64)
    returns = _backwards(rewards, response_mask, gamma)
    advantages = masked_whiten(returns, response_mask).to(token_level_rewards.dtype)
    return advantages, returns.to(token_level_rewards.dtype)


@register_advantage("gae")
def compute_gae_advantage_return(
    token_level_rewards: Tensor, response_mask: Tensor, values: Tensor, *, gamma: float = 1.0, lam: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Return whitened GAE(γ, λ) advantages and the value function's targets, ``[N, R]``.

    ``values`` ``[N, R]`` are V before each token. δ_t = r_t + γ·V_{t+1} − V_t and A_t = δ_t + γλ·A_{t+1}, with V and A
    0 beyond the last token; tokens outside of the mask are skipped: the one before is followed by the one after.
    returns = A + V; then A is whitened over all tokens of the batch.
    (Schulman et al. 2016, "High-Dimensional Continuous Control Using GAE", equations 11 and 16.)
    """
    dtype = token_level_rewards.dtype
    rewards = keep(token_level_rewards, response_mask).to(torch.float64)
    state_values = keep(values, response_mask).to(torch.float64)
    following = torch.zeros_like(state_values)
    carried = torch.zeros_like(state_values[:, 0])
    mask = response_mask.bool()
    for column in reversed(range(state_values.shape[1])):
        following[:, column] = carried
        carried = torch.where(mask[:, column], state_values[:, column], carried)
    deltas = keep(rewards + gamma * following - state_values, response_mask)
    advantages = _backwards(deltas, response_mask, gamma * lam)
    returns = advantages + state_values
    return masked_whiten(advantages, response_mask).to(dtype), returns.to(dtype)


def _backwards(terms: Tensor, response_mask: Tensor, discount: float) -> Tensor:
    """Return s with s_t = terms_t + discount · s_{t+1} over the tokens of the mask, ``[N, R]``; zero elsewhere."""
    mask = response_mask.bool()
    sums = torch.zeros_like(terms)
    carried = torch.zeros_like(terms[:, 0])
    for column in reversed(range(terms.shape[1])):
        here = terms[:, column] + discount * carried
        carried = torch.where(mask[:, column], here, carried)
        sums[:, column] = torch.where(mask[:, column], here, torch.zeros_like(here))
    return sums
