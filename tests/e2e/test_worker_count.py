"""Do tokens, losses and gradients depend on how many workers there are? Not beyond float32's rounding.

The judge is a loop in this file: one process, float64, the model's own forward pass, the loss written out.
"""

import pytest
import tensorboardX  # noqa: F401  (sets an environment variable when it is first imported)
import torch

from rpcrl.trainer import steps
from rpcrl.trainer.colocate import ColocateTrainer
from tests.e2e.jobs import train

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]


ENTROPY_COEFF = 0.1
# Without the entropy the first loss is 0: ratios are 1, and a group's advantages sum to 0.
JOB = ("trainer.total_training_steps=1", f"actor.entropy_coeff={ENTROPY_COEFF}")


class Recording(ColocateTrainer):
    """Keeps the batch of the first step and the figures of each of its optimizer steps."""

    def update_actor(self, batch, step, meanwhile=None):
        self.batch = batch
        self.updates = []
        group = self.groups.actor

        class Spy:
            world_size = group.world_size

            def update_actor(_, batch):
                per_rank = group.update_actor(batch)
                self.updates.extend(zip(*per_rank, strict=True))
                return per_rank

        actor = self.config.actor_rollout_ref.actor
        return steps.update_actor(
            Spy(), batch, mini_batch_rows=4 * 4, epochs=actor.ppo_epochs, lr=5e-4, temperature=1.0
        )


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    root = tmp_path_factory.mktemp("counts")
    made = {}
    for name, *overrides in (
        (1, "trainer.n_gpus_per_node=1"),
        (2, "trainer.n_gpus_per_node=2", "actor.strategy=fsdp2"),
        (4, "trainer.n_gpus_per_node=4", "actor.strategy=auto"),
        (
            "2, micro-batches of 4",
            "trainer.n_gpus_per_node=2",
            "actor.strategy=fsdp2",
            "actor.ppo_micro_batch_size_per_gpu=4",
        ),
        (
            "2, packed by tokens and balanced, replicas",
            "trainer.n_gpus_per_node=2",
            "actor.use_dynamic_bsz=true",
            "actor.ppo_max_token_len_per_gpu=40",
            "model.use_remove_padding=true",
            "model.enable_gradient_checkpointing=true",
            "actor.strategy=ddp",
            "trainer.balance_batch=true",
            "algorithm.recompute_old_log_prob=true",
        ),
    ):
        job = train(root / f"run{len(made)}", *JOB, *overrides, trainer=Recording)
        made[name] = (job.batch, job.updates, job.config, job.run.path)
    return made


def reference(batch):
    """Return loss and gradient norm of each update, in float64 and one process, by AdamW at the same rate."""
    from transformers import AutoModelForCausalLM

    from rpcrl.tasks.sort_digits import base_checkpoint

    model = AutoModelForCausalLM.from_pretrained(base_checkpoint(), dtype=torch.float64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, betas=(0.9, 0.99), weight_decay=0.0)
    figures = []
    for start in (0, 16):
        rows = batch[start : start + 16].batch
        length = rows["responses"].shape[1]
        logits = model(
            input_ids=rows["input_ids"], attention_mask=rows["attention_mask"], position_ids=rows["position_ids"]
        ).logits[:, -length - 1 : -1]
        every = logits.log_softmax(-1)
        log_prob = every.gather(-1, rows["responses"].unsqueeze(-1)).squeeze(-1)
        mask = rows["response_mask"].double()
        ratio = (log_prob - rows["rollout_log_probs"].double()).exp()
        advantages = rows["advantages"].double()
        per_token = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
        per_token = per_token + ENTROPY_COEFF * (every.exp() * every).sum(-1)
        loss = (per_token * mask).sum() / mask.sum()
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        figures.append((loss.item(), norm.item()))
    return figures


def mean(per_rank, name):
    return sum(part[name] for part in per_rank) / len(per_rank)


def test_the_sampled_tokens_are_the_same(jobs):
    tokens = {name: batch.batch["responses"] for name, (batch, *_) in jobs.items()}
    for name, other in tokens.items():
        assert torch.equal(other, tokens[1]), f"{name} workers"
    assert len(torch.unique(tokens[1], dim=0)) > 8, "it does sample"


def test_losses_and_gradients_are_those_of_the_float64_loop(jobs):
    expected = reference(jobs[1][0])
    assert abs(expected[0][0]) > 1e-3, "a loss of nothing would agree with anything"
    for name, (_, updates, *_) in jobs.items():
        assert len(updates) == 2
        for number, (per_rank, (loss, norm)) in enumerate(zip(updates, expected, strict=True)):
            tolerance = 1e-5 if number == 0 else 1e-4
            assert mean(per_rank, "loss") == pytest.approx(loss, rel=tolerance), f"{name} workers, update {number}"
            assert mean(per_rank, "grad_norm") == pytest.approx(norm, rel=1e-4), f"{name} workers, update {number}"
