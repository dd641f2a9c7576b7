"""How does rpcrl go into a trainer that somebody already has? As worker groups that a plain loop calls.

A policy over four answers learns from reward alone which answer each of eight questions wants (REINFORCE). The policy
is replicated on two workers that average their gradients over gloo; a second pool of two processes without a device
gives the rewards. The loop below is the whole driver: no configuration, no base class of a trainer.

Run it with ``python examples/embed_plain.py``; it takes a few seconds and prints the mean reward every ten steps.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from rpcrl import Controller, DataProto, Dispatch, ResourcePool, Worker, WorkerGroup, register

NUM_QUESTIONS, NUM_ANSWERS, SAMPLES_PER_QUESTION = 8, 4, 16


class Policy(Worker):
    """A table of preferences ``[questions, answers]``, equal on every rank."""

    def __init__(self, lr: float) -> None:
        self.init_process_group()
        self.table = torch.zeros(NUM_QUESTIONS, NUM_ANSWERS, requires_grad=True)
        self.optimizer = torch.optim.SGD([self.table], lr=lr)
        self.generator = torch.Generator().manual_seed(self.rank)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def answer(self, questions: DataProto) -> DataProto:
        """Sample one answer per row."""
        asked = questions.batch["question"]
        probabilities = self.table.detach()[asked].softmax(-1)
        answers = torch.multinomial(probabilities, 1, generator=self.generator).squeeze(-1)
        return DataProto.from_dict(tensors={"question": asked, "answer": answers})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC)
    def update(self, batch: DataProto) -> float:
        """Make one step on this rank's rows; the gradient is the mean over all ranks."""
        log_probs = self.table[batch.batch["question"]].log_softmax(-1)
        chosen = log_probs.gather(-1, batch.batch["answer"].unsqueeze(-1)).squeeze(-1)
        loss = -(chosen * batch.batch["advantage"]).mean()
        self.optimizer.zero_grad()
        (loss / self.world_size).backward()
        dist.all_reduce(self.table.grad)
        self.optimizer.step()
        return loss.item()


class Judge(Worker):
    """Knows the wanted answers; needs no device and no model."""

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def score(self, batch: DataProto) -> DataProto:
        """Give 1 for the wanted answer and 0 for any other."""
        wanted = (batch.batch["question"] * 5 + 3) % NUM_ANSWERS
        return DataProto.from_dict(tensors={"reward": (batch.batch["answer"] == wanted).float()})


def train(num_steps: int = 40) -> float:
    """Run the loop and return the mean reward of the last step."""
    questions = DataProto.from_dict(tensors={"question": torch.arange(NUM_QUESTIONS)})
    with Controller():
        policy = WorkerGroup(ResourcePool([2], name="policy"), Policy, lr=8.0)
        judge = WorkerGroup(ResourcePool([2], device=None, name="judges"), Judge)
        mean = 0.0
        for step in range(1, num_steps + 1):
            answers = policy.answer(questions.repeat(SAMPLES_PER_QUESTION))
            rewards = judge.score(answers).batch["reward"]
            mean = rewards.mean().item()
            advantage = DataProto.from_dict(tensors={"advantage": rewards - mean})
            policy.update(answers.union(advantage))
            if step % 10 == 0:
                print(f"step {step:3d}  mean reward {mean:.2f}")
        return mean


if __name__ == "__main__":
    train()
