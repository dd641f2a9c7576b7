"""Are GRPO's advantages those of the paper, whatever the order and padding of the rows?"""

from __future__ import annotations

import statistics

import numpy as np
import pytest
import torch

from rpcrl.algorithms.advantages import compute_grpo_outcome_advantage, get_advantage, group_mean_std
from rpcrl.errors import BatchError, UsageError


def sample(rows: int = 24, columns: int = 5, groups: int = 5) -> tuple[torch.Tensor, torch.Tensor, np.ndarray]:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, columns + 1, (rows,), generator=generator)
    mask = (torch.arange(columns)[None] < lengths[:, None]).long()
    rewards = torch.zeros(rows, columns)
    rewards[torch.arange(rows), lengths - 1] = torch.rand(rows, generator=generator)
    uid = np.array([f"u{i % groups}" for i in range(rows - 1)] + ["alone"], dtype=object)
    return rewards, mask, uid


@pytest.mark.parametrize("by_std", [True, False])
def test_equals_the_loop_from_the_paper(by_std: bool) -> None:
    rewards, mask, uid = sample()
    advantages, returns = compute_grpo_outcome_advantage(rewards, mask, uid, norm_adv_by_std_in_grpo=by_std)
    scores = [float(row.double().sum()) for row in rewards]
    for i, label in enumerate(uid):
        group = [score for score, other in zip(scores, uid, strict=True) if other == label]
        mean, std = (0.0, 1.0) if len(group) == 1 else (statistics.fmean(group), statistics.stdev(group))
        expected = scores[i] - mean
        if by_std:
            expected /= std + 1e-6
        for t in range(mask.shape[1]):
            assert float(advantages[i, t]) == pytest.approx(expected if mask[i, t] else 0.0, rel=1e-6, abs=1e-7)
    assert torch.equal(advantages, returns)
    assert advantages.data_ptr() != returns.data_ptr()


def test_row_order_and_padding_do_not_matter() -> None:
    rewards, mask, uid = sample()
    expected, _ = compute_grpo_outcome_advantage(rewards, mask, uid)
    order = torch.randperm(len(uid), generator=torch.Generator().manual_seed(3))
    permuted, _ = compute_grpo_outcome_advantage(rewards[order], mask[order], uid[order.numpy()])
    torch.testing.assert_close(permuted, expected[order], rtol=0, atol=0)
    wide = torch.nn.functional.pad
    padded, _ = compute_grpo_outcome_advantage(wide(rewards, (0, 4)), wide(mask, (0, 4)), uid)
    assert torch.equal(padded[:, :5], expected)
    assert not padded[:, 5:].any()


def test_a_group_of_equal_scores_gets_zero() -> None:
    rewards = torch.full((6, 1), 0.1)
    advantages, _ = compute_grpo_outcome_advantage(rewards, torch.ones(6, 1), ["a"] * 6)
    assert float(advantages.abs().max()) < 1e-8


def test_a_single_sample_keeps_its_score() -> None:
    advantages, _ = compute_grpo_outcome_advantage(torch.tensor([[0.0, 0.7]]), torch.tensor([[1, 1]]), ["x"])
    assert advantages[0].tolist() == pytest.approx([0.7 / (1 + 1e-6)] * 2)


def test_group_sizes_and_a_wrong_length() -> None:
    mean, std, size = group_mean_std(torch.tensor([1.0, 3.0, 5.0]), ["a", "b", "a"])
    assert mean.tolist() == [3.0, 0.0, 3.0]
    assert std.tolist() == pytest.approx([8.0**0.5, 1.0, 8.0**0.5])
    assert size.tolist() == [2, 1, 2]
    with pytest.raises(BatchError, match="2 rows, but there are 3 scores"):
        group_mean_std(torch.zeros(3), ["a", "b"])


def test_estimators_are_found_by_name() -> None:
    assert get_advantage("grpo") is compute_grpo_outcome_advantage
    with pytest.raises(UsageError, match="did you mean 'grpo'"):
        get_advantage("gpro")
