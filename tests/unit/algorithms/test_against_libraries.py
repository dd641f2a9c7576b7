"""Do torchrl and TRL compute the same from the same samples? Skipped where they are not installed."""

from __future__ import annotations

import contextlib
import inspect
import re
import textwrap
import types
from collections import defaultdict
from typing import Any

import pytest
import torch

from rpcrl.algorithms.advantages import (
    compute_gae_advantage_return,
    compute_grpo_outcome_advantage,
    compute_reinforce_plus_plus_outcome_advantage,
    compute_rloo_outcome_advantage,
)
from rpcrl.algorithms.aggregate import BatchCounts, agg_loss
from rpcrl.algorithms.kl import kl_penalty
from rpcrl.algorithms.logits import entropy_from_logits, log_prob_and_entropy
from rpcrl.algorithms.losses import PolicyLossSettings, policy_loss, value_loss
from rpcrl.algorithms.masked import masked_whiten
from tests.unit.algorithms import papers

with contextlib.suppress(ImportError):
    import torchrl  # noqa: F401  (sets an environment variable when it is first imported)

ROWS, COLUMNS = 12, 7


def contiguous(seed: int) -> dict[str, Any]:
    """Rows whose tokens stand side by side from the first column on: what those libraries expect."""
    return papers.ragged_batch(seed, rows=ROWS, columns=COLUMNS, holes=False, empty=False)


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (1.0, 0.95), (0.9, 0.8)])
def test_gae_equals_torchrls(gamma: float, lam: float) -> None:
    functional = pytest.importorskip("torchrl.objectives.value.functional", exc_type=ImportError)
    batch = contiguous(0)
    mask, rewards, values = (batch[name] for name in ("response_mask", "token_level_rewards", "values"))
    kept = values * mask
    done = torch.zeros_like(mask, dtype=torch.bool)
    done[torch.arange(ROWS), mask.sum(-1) - 1] = True
    after = torch.cat([kept[:, 1:], torch.zeros(ROWS, 1, dtype=kept.dtype)], dim=1)
    columns = [column.unsqueeze(-1) for column in (kept, after, rewards, done)]
    advantages, targets = functional.generalized_advantage_estimate(gamma, lam, *columns)
    ours, returns = compute_gae_advantage_return(rewards, mask, values, gamma=gamma, lam=lam)
    # torchrl's discounts are float32
    torch.testing.assert_close(ours, masked_whiten(advantages.squeeze(-1), mask), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(returns, targets.squeeze(-1) * mask, rtol=1e-5, atol=1e-6)


def test_discounted_returns_equal_torchrls() -> None:
    functional = pytest.importorskip("torchrl.objectives.value.functional", exc_type=ImportError)
    batch = contiguous(1)
    mask, rewards = batch["response_mask"], batch["token_level_rewards"]
    done = torch.zeros_like(mask, dtype=torch.bool)
    done[torch.arange(ROWS), mask.sum(-1) - 1] = True
    done[:, -1] = True
    theirs = functional.reward2go(rewards.unsqueeze(-1), done.unsqueeze(-1), 0.9).squeeze(-1)
    _, returns = compute_reinforce_plus_plus_outcome_advantage(rewards, mask, gamma=0.9)
    torch.testing.assert_close(returns, theirs * mask)


def test_group_deviations_equal_trls() -> None:
    utils = pytest.importorskip("trl.trainer.utils", exc_type=ImportError)
    rewards = torch.randn(6, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    theirs = (rewards - rewards.mean(1, keepdim=True)) / (utils.nanstd(rewards, dim=1, keepdim=True) + 1e-6)
    uid = [f"u{i}" for i in range(6) for _ in range(4)]
    ours, _ = compute_grpo_outcome_advantage(rewards.reshape(-1, 1), torch.ones(24, 1), uid)
    torch.testing.assert_close(ours, theirs.reshape(-1, 1))


def test_leave_one_out_advantages_equal_trls() -> None:
    """TRL computes them in the middle of a method: its own lines are taken from there and run."""
    trainer = pytest.importorskip("trl.trainer.rloo_trainer", exc_type=ImportError)
    source = textwrap.dedent(inspect.getsource(trainer.RLOOTrainer._generate_and_score_completions))
    (lines,) = re.findall(r"( *scorable_counts = .*?)\n *# Normalize advantages", source, flags=re.DOTALL)
    rewards = torch.randn(6, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    found: dict[str, Any] = {
        "torch": torch,
        "grouped_rewards": rewards,
        "rewards": rewards.reshape(-1),
        "num_generations": 4,
    }
    exec(textwrap.dedent(lines), found)
    uid = [f"u{i}" for i in range(6) for _ in range(4)]
    ours, _ = compute_rloo_outcome_advantage(rewards.reshape(-1, 1), torch.ones(24, 1), uid)
    torch.testing.assert_close(ours, found["advantages"].reshape(-1, 1))


@pytest.mark.parametrize("clip", [0.1, 0.5, 100.0])
def test_value_losses_and_their_gradients_equal_torchrls(clip: float) -> None:
    utils = pytest.importorskip("torchrl.objectives.utils", exc_type=ImportError)
    batch = contiguous(3)
    mask, old, targets = (batch[name] for name in ("response_mask", "values", "token_level_rewards"))
    noise = torch.randn(mask.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    found = []
    for ours in (True, False):
        new = (old + noise).requires_grad_()
        if ours:
            loss, _ = value_loss(new, old, targets, mask, BatchCounts.of(mask), cliprange_value=clip)
        else:
            plain = utils.distance_loss(targets, new, loss_function="l2")
            theirs, _ = utils._clip_value_loss(old, new, torch.tensor(clip, dtype=old.dtype), targets, plain, "l2")
            # the half of PPO's squared error is torchrl's critic coefficient
            loss = 0.5 * (theirs * mask).sum() / mask.sum()
        loss.backward()
        assert new.grad is not None
        found.append((loss.detach(), new.grad))
    torch.testing.assert_close(*found)


def test_log_probs_and_entropies_equal_trls() -> None:
    utils = pytest.importorskip("trl.trainer.utils", exc_type=ImportError)
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 5, 11, generator=generator)
    tokens = torch.randint(0, 11, (3, 5), generator=generator)
    log_probs, _ = log_prob_and_entropy(logits, tokens)
    torch.testing.assert_close(log_probs, utils.selective_log_softmax(logits, tokens))
    torch.testing.assert_close(entropy_from_logits(logits), utils.entropy_from_logits(logits))


class Alone:
    """One process of accelerate's, as far as a loss asks."""

    num_processes = 1
    sync_gradients = True

    @staticmethod
    def gather(tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    @staticmethod
    def reduce(tensor: torch.Tensor, reduction: str) -> torch.Tensor:
        return tensor


def trls_loss(trainer_class: Any, batch: dict[str, torch.Tensor], loss_type: str, **settings: Any) -> torch.Tensor:
    """Call the loss of TRL's GRPO trainer on given log-probs: everything but the model's forward pass is TRL's."""
    trainer = types.SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (batch["new"], torch.zeros_like(batch["new"]), None),
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        importance_sampling_level="token",
        beta=settings.get("beta", 0.0),
        loss_type=loss_type,
        epsilon_low=settings["low"],
        epsilon_high=settings["high"],
        args=types.SimpleNamespace(delta=settings["delta"], use_bias_correction_kl=False, steps_per_generation=1),
        use_vllm=False,
        model=types.SimpleNamespace(training=True),
        current_gradient_accumulation_steps=1,
        max_completion_length=COLUMNS,
        accelerator=Alone(),
        _entropy_bonus_enabled=False,
        _metrics={"train": defaultdict(list)},
    )
    inputs = {
        "prompt_ids": torch.zeros(ROWS, 1, dtype=torch.int64),
        "prompt_mask": torch.ones(ROWS, 1, dtype=torch.int64),
        "completion_ids": torch.zeros(ROWS, COLUMNS, dtype=torch.int64),
        "completion_mask": batch["mask"],
        "advantages": batch["advantages"],
        "old_per_token_logps": batch["old"],
        "ref_per_token_logps": batch["reference"],
        "num_items_in_batch": batch["mask"].sum(),
    }
    loss: torch.Tensor = trainer_class._compute_loss(trainer, None, inputs)
    return loss


@pytest.mark.parametrize(
    ("loss_type", "mode"),
    [
        ("grpo", "seq-mean-token-mean"),
        ("bnpo", "token-mean"),
        ("dapo", "token-mean"),
        ("dr_grpo", "seq-mean-token-sum-norm"),
    ],
)
@pytest.mark.parametrize(("low", "high", "delta"), [(0.2, 0.2, 3.0), (0.2, 0.28, 1.5), (0.1, 0.5, 10.0)])
def test_clipped_losses_and_their_gradients_equal_trls(
    loss_type: str, mode: str, low: float, high: float, delta: float
) -> None:
    grpo = pytest.importorskip("trl.trainer.grpo_trainer", exc_type=ImportError)
    batch = contiguous(2)
    generator = torch.Generator().manual_seed(5)
    noise = [torch.randn(ROWS, COLUMNS, generator=generator, dtype=torch.float64) for _ in range(4)]
    mask = batch["response_mask"]
    columns = {"mask": mask, "old": -2 + 0.1 * noise[0], "advantages": noise[1], "reference": -2 + noise[2]}
    gradients, losses = [], []
    for ours in (True, False):
        new = (columns["old"] + 0.7 * noise[3]).requires_grad_()
        if ours:
            settings = PolicyLossSettings(
                clip_ratio_low=low, clip_ratio_high=high, clip_ratio_c=delta, loss_agg_mode=mode
            )
            counts = BatchCounts.of(mask)
            loss, _ = policy_loss(columns["old"], new, columns["advantages"], mask, settings, counts)
            kl = kl_penalty(new, columns["reference"], "k3")
            loss = loss + 0.05 * agg_loss(kl, mask, mode, counts)
        else:
            loss = trls_loss(
                grpo.GRPOTrainer, {**columns, "new": new}, loss_type, low=low, high=high, delta=delta, beta=0.05
            )
        loss.backward()
        losses.append(float(loss.detach()))
        gradients.append(new.grad)
    assert losses[0] == pytest.approx(losses[1], rel=1e-10)
    torch.testing.assert_close(*gradients)
