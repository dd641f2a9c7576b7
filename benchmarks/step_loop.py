"""What does a step cost without rpcrl around it? The same engine objects, called in a loop of one process."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from turns import Turns

from rpcrl.algorithms.advantages import compute_grpo_outcome_advantage
from rpcrl.batch.data_proto import DataProto
from rpcrl.config.load import load
from rpcrl.config.run import RunConfig
from rpcrl.engines.fsdp import FsdpEngine
from rpcrl.engines.hf_model import load_tokenizer
from rpcrl.engines.schedule import learning_rate
from rpcrl.engines.torch_rollout import TorchRolloutEngine
from rpcrl.roles.actor import actor_loss
from rpcrl.tasks.sort_digits import score
from rpcrl.trainer.samplings import training_sampling
from rpcrl.trainer.sources import model_folder, open_prompts, open_training


class Loop:
    """GRPO on the sort-by-word task as anybody would write it down; ``phases_s`` has the times of the last step."""

    def __init__(self, config: RunConfig, folder: Path, tokenizer: Any, sampling: Any) -> None:
        self.config, self.tokenizer, self.sampling = config, tokenizer, sampling
        self.policy = FsdpEngine(folder, betas=config.actor_rollout_ref.actor.optim.betas)
        self.rollout = TorchRolloutEngine(folder, load_weights=False)
        self.loss = actor_loss(config.actor_rollout_ref.actor)
        self.rollout.update_weights(self.policy.weights(bucket_bytes=1 << 28), version=0)
        self.phases_s: dict[str, float] = {}
        self.reward = 0.0

    @contextmanager
    def timed(self, phase: str) -> Any:
        began_s = perf_counter()
        yield
        self.phases_s[phase] = perf_counter() - began_s

    def step(self, prompts: DataProto, step: int, total_steps: int) -> Mapping[str, float]:
        """Do what the trainer's step does with the same prompts."""
        actor = self.config.actor_rollout_ref.actor
        n = self.sampling.n
        with self.timed("gen"):
            rows = prompts.repeat(n, interleave=True)
            index = np.array([row % n for row in range(len(rows))], dtype=object)
            columns = {"uid": rows.non_tensor_batch["uid"], "sample_index": index}
            batch = self.rollout.generate(DataProto(rows.batch, columns, self.sampling.meta_info(step)))
            self.rollout.sleep()
        tensors = batch.batch
        mask = tensors["response_mask"]
        with self.timed("reward"):
            lengths = mask.sum(-1).tolist()
            tokens = [row[:size] for row, size in zip(tensors["responses"].tolist(), lengths, strict=True)]
            texts = self.tokenizer.batch_decode(tokens, skip_special_tokens=True)
            truths, reasons = rows.non_tensor_batch["ground_truth"], batch.non_tensor_batch["finish_reason"]
            scores = [
                score("", text, truth, {"finish_reason": reason})
                for text, truth, reason in zip(texts, truths, reasons, strict=True)
            ]
        with self.timed("adv"):
            self.reward = sum(scores) / len(scores)
            rewards = torch.zeros(mask.shape)
            rewards[torch.arange(len(scores)), (mask.sum(-1) - 1).clamp(min=0)] = torch.tensor(scores)
            tensors["advantages"] = compute_grpo_outcome_advantage(rewards, mask, columns["uid"])[0]
            tensors["old_log_probs"] = tensors["rollout_log_probs"].clone()
        with self.timed("update_actor"):
            optim = actor.optim
            lr = learning_rate(step - 1, lr=optim.lr, total_steps=total_steps, warmup_steps=optim.lr_warmup_steps)
            minis = DataProto(tensors, {}, {}).split(actor.ppo_mini_batch_size * n)
            made = [self.policy.train_mini_batch(mini, self.loss, lr=lr) for mini in minis]
        with self.timed("update_weights"):
            self.rollout.wake_up()
            self.rollout.update_weights(self.policy.weights(bucket_bytes=1 << 28), version=step)
        return {"grad_norm": sum(figures["grad_norm"] for figures in made) / len(made)}


def main() -> None:
    """Make as many steps as the command line says, in turn with others: ``python step_loop.py STEPS``."""
    torch.set_num_threads(1)
    turns = Turns()
    steps = int(sys.argv[1])
    config = load(None, [f"trainer.total_training_steps={steps}", *sys.argv[2:]], "colocate")
    folder = model_folder(config)
    tokenizer = load_tokenizer(folder)
    loop = Loop(config, folder, tokenizer, training_sampling(config))
    prompts = open_training(config, open_prompts(config), tokenizer)
    for step in range(1, steps + 1):
        batch = prompts.next_batch()
        turns.wait()
        began_s = perf_counter()
        figures = loop.step(batch, step, steps)
        whole_s = perf_counter() - began_s
        phases = {f"phase/{name}": seconds for name, seconds in loop.phases_s.items()}
        turns.done(step=whole_s, grad_norm=figures["grad_norm"], reward=loop.reward, **phases)


if __name__ == "__main__":
    main()
