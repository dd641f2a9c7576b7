"""The default job's steps in turn with others: ``python step_ours.py STEPS [key=value …]``."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from time import perf_counter
from typing import Any

from turns import Turns

from rpcrl.config.load import load
from rpcrl.trainer.colocate import ColocateTrainer


class InTurn(ColocateTrainer):
    """Waits for its turn before each step."""

    turns = Turns()

    def step(self, step: int, timer: Any) -> dict[str, float]:
        """Make a step when it is this trainer's turn."""
        self.turns.wait()
        began_s = perf_counter()
        metrics = super().step(step, timer)
        whole_s = perf_counter() - began_s
        figures = {"grad_norm": metrics["actor/grad_norm"], "reward": metrics["critic/score/mean"]}
        self.turns.done(step=whole_s, **figures, **{f"phase/{name}": value for name, value in timer.seconds.items()})
        return metrics


def main() -> None:
    """Train for as many steps as the command line says."""
    settings = [f"trainer.total_training_steps={sys.argv[1]}", "trainer.n_gpus_per_node=1"]
    settings += ["trainer.val_before_train=false", "trainer.test_freq=-1", "data.val_max_samples=2", *sys.argv[2:]]
    with tempfile.TemporaryDirectory(prefix="rpcrl-bench-") as folder:
        InTurn(load(None, settings, "colocate"), run_dir=Path(folder) / "run").fit()


if __name__ == "__main__":
    main()
