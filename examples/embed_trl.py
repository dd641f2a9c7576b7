"""How does a GRPO script of TRL move its rewards to worker processes of rpcrl? By a few added lines.

``trl_plain.py`` is a script of TRL alone: a tiny model that sorts digits learns what *ascending* and *descending* mean.
``embed_trl.py`` is the same file, this text included, with the lines that are marked at their end.

Needs ``pip install trl``; takes about half a minute on a CPU, with nothing from the network.
"""

from __future__ import annotations

import random
import tempfile
from pathlib import Path

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from rpcrl import Controller, DataProto, Dispatch, ResourcePool, Worker, WorkerGroup, register  # added

BASE = Path(__file__).resolve().parents[1] / "rpcrl" / "tasks" / "sort_digits" / "base"


def sorted_digits(completions: list[str], answer: list[str], **_: object) -> list[float]:
    """Give 1 for exactly the right answer and 0 for any other."""
    return [float(text.strip() == wanted) for text, wanted in zip(completions, answer, strict=True)]


def rows(count: int) -> Dataset:
    """Return ``count`` prompts such as ``descending 5 2 9 =`` with their answers."""
    draw = random.Random(0)
    found = []
    for _ in range(count):
        word, digits = draw.choice(["ascending", "descending"]), draw.sample("0123456789", draw.randint(3, 6))
        answer = " ".join(sorted(digits, reverse=word == "descending"))
        found.append({"prompt": f"{word} {' '.join(digits)} =", "answer": answer})
    return Dataset.from_list(found)


class Judge(Worker):  # added
    @register(Dispatch.DP_COMPUTE_METRIC)  # added
    def score(self, rows: DataProto) -> list[float]:  # added
        return sorted_digits(**rows.non_tensor_batch)  # added


def main(folder: str) -> None:
    """Train, and print the mean reward of the first and the last ten steps."""
    rewards = [sorted_digits]
    judges = WorkerGroup(ResourcePool([2], device=None), Judge, controller=Controller())  # added

    def served(completions: list[str], answer: list[str], **_: object) -> list[float]:  # added
        rows = DataProto.from_dict(non_tensors={"completions": completions, "answer": answer})  # added
        return [score for scores in judges.score(rows) for score in scores]  # added

    rewards = [served]  # added
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(BASE, dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(BASE),
        reward_funcs=rewards,
        train_dataset=rows(2048),
        args=GRPOConfig(
            output_dir=folder,
            max_steps=60,
            per_device_train_batch_size=256,
            num_generations=8,
            max_completion_length=8,
            learning_rate=1e-3,
            lr_scheduler_type="constant",
            logging_steps=10,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
            bf16=False,
        ),
    )
    trainer.train()
    reward = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    print(f"mean reward {reward[0]:.2f} in the first ten steps, {reward[-1]:.2f} in the last ten")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        main(temporary)
