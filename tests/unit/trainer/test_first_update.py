"""Is the first update's loss the one of the papers, for every estimator? Samples, rewards and roles are the real ones.

The reference scores each unpadded row with the model in float64 and computes advantages and loss in loops.
"""

from __future__ import annotations

import pytest

from rpcrl.config.load import load
from rpcrl.engines.hf_model import load_tokenizer
from rpcrl.rewards.worker import RewardWorker
from rpcrl.roles.actor import ActorWorker
from rpcrl.roles.critic import CriticWorker
from rpcrl.roles.rollout import RolloutWorker
from rpcrl.tasks.sort_digits import base_checkpoint
from rpcrl.testing.engine_reference import Reference, rows_of
from rpcrl.trainer import steps
from rpcrl.trainer.sources import open_prompts, open_training
from tests.unit.algorithms import papers
from tests.unit.algorithms.test_advantages import expected
from tests.unit.algorithms.test_losses import loop_token_loss
from tests.unit.roles.local_group import local_groups

JOB = ("data.train_batch_size=6", "actor.ppo_mini_batch_size=6", "rollout.n=4", "trainer.n_gpus_per_node=1")
CASES = {
    "grpo": (),
    "dr_grpo": ("actor.loss_agg_mode=seq-mean-token-sum-norm",),
    "rloo": ("actor.loss_agg_mode=seq-mean-token-mean",),
    "reinforce_plus_plus": ("algorithm.gamma=0.9",),
    "reinforce_plus_plus_baseline": (),
    "gae": ("algorithm.gamma=0.97", "algorithm.lam=0.9", "critic.optim.lr=1e-2"),
}


@pytest.mark.parametrize("name", CASES)
def test_loss_of_the_first_update_equals_the_float64_reference(name: str) -> None:
    config = load(None, [*JOB, f"algorithm.adv_estimator={name}", *CASES[name]], "colocate")
    common = {"model_path": str(base_checkpoint()), "device": "cpu", "threads": 1}
    roles = config.actor_rollout_ref
    classes = {
        "actor": (ActorWorker, (roles,), {**common, "seed": 0}),
        "rollout": (RolloutWorker, (roles,), common),
        "reward": (RewardWorker, ("rpcrl.tasks.sort_digits:score",), {}),
    }
    if name == "gae":
        classes["critic"] = (CriticWorker, (config.critic,), {**common, "policy": roles, "seed": 0})
    tokenizer = load_tokenizer(base_checkpoint())
    with local_groups(classes) as groups:
        steps.update_weights(groups["rollout"], version=0)
        prompts = open_training(config, open_prompts(config), tokenizer).next_batch()
        sampling = steps.Sampling(n=4, do_sample=True, temperature=1.0, top_p=1.0, top_k=-1, response_length=8, seed=0)

        def scored(step):
            batch = steps.generate(groups["rollout"], prompts, sampling, step=step)
            batch = steps.reward(groups["reward"], batch, tokenizer)
            batch = steps.old_log_prob(groups["actor"], batch, recompute=False)
            if "critic" in groups:
                batch = steps.values(groups["critic"], batch)
            return steps.advantage(batch, config.algorithm)[0]

        if "critic" in groups:  # which expects nothing yet
            steps.update_critic(groups["critic"], scored(0), mini_batch_rows=6, epochs=2, lr=1e-2)
        batch = scored(1)
        if "critic" in groups:
            of_critic = steps.update_critic(groups["critic"], batch, mini_batch_rows=24, epochs=1, lr=1e-3)
        figures = steps.update_actor(groups["actor"], batch, mini_batch_rows=24, epochs=1, lr=1e-3, temperature=1.0)
    columns = {
        "token_level_rewards": batch.batch["token_level_scores"],
        "response_mask": batch.batch["response_mask"],
        "uid": batch.non_tensor_batch["uid"],
    }
    if name == "gae":
        columns["values"] = batch.batch["values"]
        assert float(columns["values"].abs().max()) > 0.01
    advantages, returns = expected(name, columns, gamma=config.algorithm.gamma, lam=config.algorithm.lam)
    assert any(value != 0 for row in advantages for value in row)
    old = papers.tokens(batch.batch["old_log_probs"], batch.batch["response_mask"])
    reference = Reference(base_checkpoint())
    losses = [
        [loop_token_loss(*token, 0.2, 0.2, 3.0) for token in zip(was, now, worth, strict=True)]
        for was, now, worth in zip(
            old, (reference.log_probs(row).tolist() for row in rows_of(batch)), advantages, strict=True
        )
    ]
    loss = papers.aggregate(losses, roles.actor.loss_agg_mode, scale=8.0)
    assert figures["actor/pg_loss"] == pytest.approx(loss, rel=1e-4, abs=2e-6)
    assert figures["actor/grad_norm"] > 0
    if name == "gae":
        values = papers.tokens(columns["values"], columns["response_mask"])
        squares = papers.value_loss(values, values, returns, clip=0.5)
        assert of_critic["critic/vf_loss"] == pytest.approx(papers.aggregate(squares, "token-mean", 0), rel=1e-4)
