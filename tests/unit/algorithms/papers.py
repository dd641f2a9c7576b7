"""The formulas of the papers as loops over Python floats: nothing here knows of tensors, dtypes or vectorised masks.

Rows are lists of (reward, value) of the tokens that count, in order; what is masked out is not there at all.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import numpy as np
import torch

Rows = list[list[float]]


def whitened(rows: Rows) -> Rows:
    everything = [value for row in rows for value in row]
    mean = statistics.fmean(everything) if everything else 0.0
    variance = statistics.variance(everything) if len(everything) > 1 else 0.0
    return [[(value - mean) / math.sqrt(variance + 1e-8) for value in row] for row in rows]


def gae(rewards: Rows, values: Rows, gamma: float, lam: float) -> tuple[Rows, Rows]:
    """Schulman et al. 2016, equation 16 as the sum that it is: Â_t = Σ_l (γλ)^l δ_{t+l}."""
    advantages = []
    for row, state_values in zip(rewards, values, strict=True):
        after = [*state_values, 0.0][1:]
        deltas = [r + gamma * nxt - v for r, nxt, v in zip(row, after, state_values, strict=True)]
        advantages.append(
            [sum((gamma * lam) ** k * delta for k, delta in enumerate(deltas[t:])) for t in range(len(row))]
        )
    returns = [[a + v for a, v in zip(*pair, strict=True)] for pair in zip(advantages, values, strict=True)]
    return whitened(advantages), returns


def reinforce_plus_plus(rewards: Rows, gamma: float) -> tuple[Rows, Rows]:
    """Hu 2025: the discounted return of each token, whitened over the batch."""
    returns = [[sum(gamma**k * r for k, r in enumerate(row[t:])) for t in range(len(row))] for row in rewards]
    return whitened(returns), returns


def others_of(scores: Sequence[float], uid: Sequence[object], row: int) -> list[float]:
    return [score for other, score in enumerate(scores) if uid[other] == uid[row] and other != row]


def grpo(scores: Sequence[float], uid: Sequence[object], by_std: bool) -> list[float]:
    """Shao et al. 2024: (R − mean) / std of the group; with one sample there is nothing to compare with."""
    result = []
    for row, score in enumerate(scores):
        group = [score, *others_of(scores, uid, row)]
        if len(group) == 1:
            mean, std = 0.0, 1.0
        else:
            mean, std = statistics.fmean(group), statistics.stdev(group)
        result.append((score - mean) / (std + 1e-6) if by_std else score - mean)
    return result


def rloo(scores: Sequence[float], uid: Sequence[object]) -> list[float]:
    """Ahmadian et al. 2024: the score less the mean of the others' scores."""
    return [
        score - (statistics.fmean(others) if (others := others_of(scores, uid, row)) else 0.0)
        for row, score in enumerate(scores)
    ]


def reinforce_plus_plus_baseline(scores: Sequence[float], uid: Sequence[object], lengths: Sequence[int]) -> Rows:
    """Hu 2025: the score less the group's mean on every token, whitened over the batch's tokens."""
    return whitened([[a] * n for a, n in zip(grpo(scores, uid, by_std=False), lengths, strict=True)])


def value_loss(values: Rows, old: Rows, returns: Rows, clip: float) -> Rows:
    """½·max((V − R)², (V_old + clip(V − V_old) − R)²) of each token."""
    return [
        [
            0.5 * max((v - target) ** 2, (v_old + min(max(v - v_old, -clip), clip) - target) ** 2)
            for v, v_old, target in zip(*row, strict=True)
        ]
        for row in zip(values, old, returns, strict=True)
    ]


def aggregate(losses: Rows, mode: str, scale: float) -> float:
    """The loss of a mini-batch from its tokens' losses; rows without a token do not count."""
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


def tokens(values: torch.Tensor, mask: torch.Tensor) -> Rows:
    """Return each row's unmasked values as floats."""
    return [values[i][mask[i].bool()].double().tolist() for i in range(mask.shape[0])]


def ragged_batch(
    seed: int, rows: int = 24, columns: int = 6, groups: int = 5, *, holes: bool = True, empty: bool = True
) -> dict[str, object]:
    """Return a batch of uneven rows: one alone in its group, one without a token, some with masked spans inside."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, columns + 1, (rows,), generator=generator)
    mask = (torch.arange(columns)[None] < lengths[:, None]).long()
    if holes:
        mask[::3, 1] = 0
        mask[1::4, 0] = 0
        mask[1::4, columns - 1] = 1
    if empty:
        mask[2] = 0
    rewards = torch.randn(rows, columns, generator=generator, dtype=torch.float64) * mask
    values = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
    uid = np.array([f"u{i % groups}" for i in range(rows - 1)] + ["alone"], dtype=object)
    return {"token_level_rewards": rewards, "response_mask": mask, "values": values, "uid": uid}
