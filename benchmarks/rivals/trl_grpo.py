"""What does the same GRPO step cost in TRL's GRPOTrainer? Same model, task, batch, updates and rates, on one thread.

``python trl_grpo.py STEPS``, by an interpreter that has trl. A step is a generation and the UPDATES optimizer steps on
it, from the moment before TRL generates to the end of the last of them. TRL recomputes the old policy's log-probs.
"""

from __future__ import annotations

import sys
import tempfile
import warnings
from time import perf_counter
from typing import Any

from turns import Turns

TURNS = Turns()
warnings.filterwarnings("ignore")

import torch  # noqa: E402
from datasets import Dataset  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback  # noqa: E402
from trl import GRPOConfig, GRPOTrainer  # noqa: E402

from rpcrl.tasks.sort_digits import base_checkpoint, train_row  # noqa: E402

PROMPTS, SAMPLES, UPDATES, LENGTH = 32, 8, 4, 8
RATE, WARMUP = 5e-4, 5

seen: list[float] = []


def reward(completions: list[Any], ground_truth: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Return 1 for a right answer that has ended."""
    texts = [each[0]["content"] if isinstance(each, list) else each for each in completions]
    scores = [
        float(text == truth and len(ids) < LENGTH + 1)
        for text, truth, ids in zip(texts, ground_truth, completion_ids, strict=True)
    ]
    seen.append(sum(scores) / len(scores))
    return scores


class InTurn(TrainerCallback):  # type: ignore[misc]
    """Waits for the turn before each generation, and tells the time after its last update."""

    began_s = 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Wait, where a generation comes next."""
        if state.global_step % UPDATES == 0:
            TURNS.wait()
            self.began_s = perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Tell, where that was the last update of a generation."""
        if state.global_step % UPDATES == 0:
            TURNS.done(step=perf_counter() - self.began_s, reward=seen[-1])


def main() -> None:
    """Train for as many steps as the command line says."""
    torch.set_num_threads(1)
    steps = int(sys.argv[1])
    rows = [train_row(0, index) for index in range(PROMPTS * steps)]
    data = Dataset.from_list(
        [{"prompt": row["prompt"], "ground_truth": row["reward_model"]["ground_truth"]} for row in rows]  # type: ignore[index]
    )
    with tempfile.TemporaryDirectory(prefix="trl-bench-") as folder:
        config = GRPOConfig(
            output_dir=folder,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            per_device_train_batch_size=PROMPTS * SAMPLES // UPDATES,
            gradient_accumulation_steps=1,
            steps_per_generation=UPDATES,
            num_generations=SAMPLES,
            num_iterations=1,
            max_completion_length=LENGTH,
            max_steps=steps * UPDATES,
            learning_rate=RATE,
            lr_scheduler_type="linear",
            warmup_steps=WARMUP * UPDATES,
            adam_beta2=0.99,
            weight_decay=0.0,
            max_grad_norm=1.0,
            beta=0.0,
            epsilon=0.2,
            loss_type="bnpo",
            scale_rewards="group",
            temperature=1.0,
            shuffle_dataset=False,
            save_strategy="no",
            logging_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(base_checkpoint(), dtype=torch.float32),
            reward_funcs=reward,
            args=config,
            train_dataset=data,
            processing_class=AutoTokenizer.from_pretrained(base_checkpoint(), padding_side="left"),
            callbacks=[InTurn()],
        )
        trainer.train()


if __name__ == "__main__":
    main()
