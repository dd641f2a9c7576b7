"""Are the advantages those of the papers, at the edges too?"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from rpcrl.algorithms.advantages import (
    compute_dr_grpo_outcome_advantage,
    compute_gae_advantage_return,
    compute_grpo_outcome_advantage,
    compute_reinforce_plus_plus_baseline_outcome_advantage,
    compute_reinforce_plus_plus_outcome_advantage,
    compute_rloo_outcome_advantage,
    estimate_advantages,
    get_advantage,
    group_mean_std,
)
from rpcrl.config.functions import needed_arguments
from rpcrl.config.registry import ADVANTAGES
from rpcrl.errors import BatchError, ConfigError, UsageError
from tests.unit.algorithms import papers

SETTINGS = {"gamma": 0.9, "lam": 0.8, "norm_adv_by_std_in_grpo": True}


def expected(name: str, batch: dict[str, Any], gamma: float, lam: float) -> tuple[papers.Rows, papers.Rows]:
    rewards, mask, uid = batch["token_level_rewards"], batch["response_mask"], list(batch["uid"])
    scores = [float(row.double().sum()) for row in rewards]
    lengths = [int(row.sum()) for row in mask]
    if name == "gae":
        return papers.gae(papers.tokens(rewards, mask), papers.tokens(batch["values"], mask), gamma, lam)
    if name == "reinforce_plus_plus":
        return papers.reinforce_plus_plus(papers.tokens(rewards, mask), gamma)
    if name == "reinforce_plus_plus_baseline":
        rows = papers.reinforce_plus_plus_baseline(scores, uid, lengths)
        return rows, rows
    outcome = papers.rloo(scores, uid) if name == "rloo" else papers.grpo(scores, uid, by_std=name == "grpo")
    rows = [[value] * length for value, length in zip(outcome, lengths, strict=True)]
    return rows, rows


@pytest.mark.parametrize("name", ADVANTAGES.built_in)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_equals_the_loop_from_the_paper(name: str, seed: int, dtype: torch.dtype) -> None:
    batch: dict[str, Any] = papers.ragged_batch(seed)
    for column in ("token_level_rewards", "values"):
        batch[column] = batch[column].to(dtype)
    found = estimate_advantages(get_advantage(name), {**batch, **SETTINGS})
    mask = batch["response_mask"].bool()
    for tensor, rows in zip(found, expected(name, batch, gamma=0.9, lam=0.8), strict=True):
        assert tensor.dtype is dtype
        flat = torch.tensor([value for row in rows for value in row], dtype=torch.float64)
        exact = dtype is torch.float64
        torch.testing.assert_close(
            tensor[mask].double(), flat, rtol=1e-9 if exact else 1e-5, atol=1e-11 if exact else 1e-6
        )
        assert not tensor[~mask].any()
    assert found[0].data_ptr() != found[1].data_ptr()


def test_dr_grpo_is_grpo_without_the_deviation() -> None:
    batch: Any = papers.ragged_batch(0)
    rewards, mask, uid = (batch[name] for name in ("token_level_rewards", "response_mask", "uid"))
    plain, _ = compute_grpo_outcome_advantage(rewards, mask, uid, norm_adv_by_std_in_grpo=False)
    assert torch.equal(plain, compute_dr_grpo_outcome_advantage(rewards, mask, uid)[0])
    assert not torch.equal(plain, compute_grpo_outcome_advantage(rewards, mask, uid)[0])


def test_a_group_of_equal_scores_gets_zero() -> None:
    rewards, mask, uid = torch.full((6, 1), 0.1), torch.ones(6, 1), ["a"] * 6
    for estimator in (compute_grpo_outcome_advantage, compute_rloo_outcome_advantage):
        advantages, _ = estimator(rewards, mask, uid)
        assert float(advantages.abs().max()) < 1e-8


def test_a_single_sample_keeps_its_score() -> None:
    rewards, mask = torch.tensor([[0.0, 0.7]]), torch.tensor([[1, 1]])
    assert compute_grpo_outcome_advantage(rewards, mask, ["x"])[0][0].tolist() == pytest.approx([0.7 / (1 + 1e-6)] * 2)
    for estimator in (compute_rloo_outcome_advantage, compute_dr_grpo_outcome_advantage):
        assert estimator(rewards, mask, ["x"])[0][0].tolist() == pytest.approx([0.7] * 2)


def test_scores_of_single_samples_are_compared_over_the_batch_by_the_baseline_form() -> None:
    rewards = torch.tensor([[1.0], [0.0], [0.0], [1.0]])
    advantages, _ = compute_reinforce_plus_plus_baseline_outcome_advantage(rewards, torch.ones(4, 1), list("abcd"))
    assert advantages[:, 0].tolist() == pytest.approx([0.75**0.5, -(0.75**0.5), -(0.75**0.5), 0.75**0.5])


def test_a_response_without_a_token_takes_part_in_its_group_and_gets_nothing() -> None:
    rewards = torch.tensor([[1.0, 0.0], [0.0, 0.0]])
    mask = torch.tensor([[0, 0], [1, 1]])
    for estimator in (compute_grpo_outcome_advantage, compute_rloo_outcome_advantage):
        advantages, _ = estimator(rewards, mask, ["a", "a"])
        assert advantages[0].tolist() == [0.0, 0.0]
        assert float(advantages[1, 0]) < -0.5


def test_a_batch_without_any_token_gives_zeros() -> None:
    batch: Any = papers.ragged_batch(1)
    batch["response_mask"] = torch.zeros_like(batch["response_mask"])
    for name in ADVANTAGES.built_in:
        for tensor in estimate_advantages(get_advantage(name), {**batch, **SETTINGS}):
            assert not tensor.any()


def test_what_stands_in_masked_places_is_never_read() -> None:
    batch: Any = papers.ragged_batch(2)
    off = batch["response_mask"] == 0
    changed = {**batch, "values": batch["values"].masked_fill(off, math.nan)}
    for name in ADVANTAGES.built_in:
        estimator = get_advantage(name)
        if name in ("gae", "reinforce_plus_plus"):
            changed["token_level_rewards"] = batch["token_level_rewards"].masked_fill(off, math.nan)
        else:
            changed["token_level_rewards"] = batch["token_level_rewards"]
        for one, other in zip(
            estimate_advantages(estimator, {**batch, **SETTINGS}),
            estimate_advantages(estimator, {**changed, **SETTINGS}),
            strict=True,
        ):
            assert torch.equal(one, other)


def test_gae_skips_a_span_of_observations() -> None:
    rewards = torch.tensor([[0.5, 9.0, 0.0, 1.0]], dtype=torch.float64)
    values = torch.tensor([[0.1, 7.0, 0.2, 0.3]], dtype=torch.float64)
    mask = torch.tensor([[1, 0, 1, 1]])
    advantages, returns = compute_gae_advantage_return(rewards, mask, values, gamma=0.9, lam=0.8)
    kept = torch.tensor([[True, False, True, True]])
    closed = compute_gae_advantage_return(rewards[kept][None], torch.ones(1, 3), values[kept][None], gamma=0.9, lam=0.8)
    torch.testing.assert_close(advantages[kept][None], closed[0])
    torch.testing.assert_close(returns[kept][None], closed[1])


def test_returns_of_reinforce_plus_plus_are_discounted_and_not_whitened() -> None:
    rewards = torch.tensor([[0.0, 0.0, 1.0], [0.0, 2.0, 5.0]])
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
    _, returns = compute_reinforce_plus_plus_outcome_advantage(rewards, mask, gamma=0.5)
    assert returns.tolist() == [[0.25, 0.5, 1.0], [1.0, 2.0, 0.0]]


def test_group_sizes_and_a_wrong_length() -> None:
    mean, std, size = group_mean_std(torch.tensor([1.0, 3.0, 5.0]), ["a", "b", "a"])
    assert mean.tolist() == [3.0, 0.0, 3.0]
    assert std.tolist() == pytest.approx([8.0**0.5, 1.0, 8.0**0.5])
    assert size.tolist() == [2, 1, 2]
    with pytest.raises(BatchError, match="2 rows, but there are 3 scores"):
        group_mean_std(torch.zeros(3), ["a", "b"])


# ---------------------------------------------------------------- names and calls


def test_estimators_are_found_by_name_and_by_path() -> None:
    assert get_advantage("grpo") is compute_grpo_outcome_advantage
    assert get_advantage("rpcrl.algorithms.advantages:compute_rloo_outcome_advantage") is compute_rloo_outcome_advantage
    with pytest.raises(UsageError, match="did you mean 'grpo'"):
        get_advantage("gpro")
    with pytest.raises(ConfigError, match="has no function 'compute_rloo'"):
        get_advantage("rpcrl.algorithms.advantages:compute_rloo")


def test_an_estimator_gets_what_its_signature_names() -> None:
    batch: Any = papers.ragged_batch(0)
    seen = {}

    def own(response_mask, *, old_log_probs, gamma, unset=7):
        seen.update(old_log_probs=old_log_probs, gamma=gamma, unset=unset)
        return response_mask.double(), response_mask.double()

    assert needed_arguments(own) == ["response_mask", "old_log_probs", "gamma"]
    estimate_advantages(own, {**batch, **SETTINGS, "old_log_probs": "column"})
    assert seen == {"old_log_probs": "column", "gamma": 0.9, "unset": 7}
    estimate_advantages(lambda **everything: own(everything["response_mask"], old_log_probs=1, gamma=1), batch)


def test_what_is_missing_or_wrong_is_named() -> None:
    batch: Any = papers.ragged_batch(0)
    del batch["values"]
    with pytest.raises(UsageError, match=r"needs values \(values need a critic: set critic.enable=true\)"):
        estimate_advantages(compute_gae_advantage_return, {**batch, **SETTINGS})
    with pytest.raises(UsageError, match=r"both tensors of shape \[24, 6\]; it returned \[\[24, 6\], 'NoneType'\]"):
        estimate_advantages(lambda response_mask: (response_mask, None), batch)
    with pytest.raises(UsageError, match=r"it returned \[\[24, 6\]\]"):
        estimate_advantages(lambda response_mask: response_mask, batch)
