"""Runs of the trainer for tests: from overrides to a run directory, in this process and real workers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from rpcrl.config.load import load
from rpcrl.trainer.colocate import ColocateTrainer

SHORT = (
    "data.train_batch_size=8",
    "actor.ppo_mini_batch_size=4",
    "rollout.n=4",
    "trainer.total_training_steps=3",
    "trainer.test_freq=-1",
    "trainer.val_before_train=false",
    "data.val_max_samples=32",
)
"""B = 8, M = 4, n = 4: 2 updates a step."""

TIMES = ("timing_s/", "timing_per_token_ms/", "perf/time_per_step", "perf/throughput")


def configure(*overrides):
    given = any(text.startswith("trainer.mode=") for text in overrides)
    return load(None, list(overrides), None if given else "colocate")


def train(run_dir, *overrides, trainer=ColocateTrainer, observer=None):
    """Run a short job to its end; later overrides win. Returns the trainer."""
    merged = dict(text.split("=", 1) for text in (*SHORT, *overrides))
    if run_dir is not None:
        merged["trainer.default_local_dir"] = str(run_dir)
    job = trainer(configure(*(f"{key}={value}" for key, value in merged.items())), observer=observer)
    job.fit()
    return job


def metric_lines(run_dir):
    return [json.loads(line) for line in (Path(run_dir) / "metrics.jsonl").read_text().splitlines()]


def without_times(line):
    return {name: value for name, value in line.items() if not name.startswith(TIMES)}


def weights_of(run_dir):
    return (Path(run_dir) / "hf" / "model.safetensors").read_bytes()


def copy_up_to(run_dir, step, target):
    """Make the directory that a run would have left if it had been killed just after the checkpoint of ``step``."""
    source, target = Path(run_dir), Path(target)
    target.mkdir()
    shutil.copytree(source / "checkpoints" / f"global_step_{step}", target / "checkpoints" / f"global_step_{step}")
    (target / "checkpoints" / "latest_checkpointed_iteration.txt").write_text(f"{step}\n")
    shutil.copy(source / "metrics.jsonl", target / "metrics.jsonl")
    return target
