"""What does it win to generate while the trainer works, and what does the age of samples cost?

- Overlap: the default job in ``colocate`` (generate, then train: a step takes their sum) and ``separate-async`` (one
  worker each; a step takes the longer of the two), with a wait per token in both engines that uses no CPU, so that
  generation and update take about as long as one another; and without it, where the update dominates on a CPU.
- ``--staleness``: the default job in ``separate-async`` with samples of 0, 1, 2, 4 and 8 weight versions, with the
  sampler's log-probs as those of the old policy and with the decoupled objective; held-out accuracy at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from report import report

from rpcrl.bench.measure import Case, Row, row_of
from rpcrl.config.load import load
from rpcrl.trainer.modes import trainer_of

LEFT_OUT_STEPS = 5
LAGS = (0, 1, 2, 4, 8)
DECOUPLED = ("algorithm.recompute_old_log_prob=true", "algorithm.rollout_correction.rollout_is=token")


def run(mode: str, folder: Path, *settings: str) -> tuple[list[dict[str, float]], dict[str, Any]]:
    """Run the default job; returns the lines of its steps and its summary."""
    config = load(None, [*settings, "trainer.log_train_generations=0"], mode)
    summary = trainer_of(mode)(config, run_dir=folder, console="off").fit()
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [line for line in lines if "timing_s/step" in line], dict(summary)


def overlap(steps: int, *, waits: bool) -> tuple[list[Row], dict[str, object]]:
    """Run both modes; returns a row for each measured time, and the ratios."""
    import waiting_workers

    import rpcrl.roles.actor
    import rpcrl.roles.rollout

    variant = "waits" if waits else "no waits"
    plain = (rpcrl.roles.actor.ActorWorker, rpcrl.roles.rollout.RolloutWorker)
    if waits:
        rpcrl.roles.actor.ActorWorker = waiting_workers.WaitingActor  # type: ignore[misc]
        rpcrl.roles.rollout.RolloutWorker = waiting_workers.WaitingRollout  # type: ignore[misc]
    job = (f"trainer.total_training_steps={steps}", "trainer.val_before_train=false", "trainer.test_freq=-1",
           "data.val_max_samples=8", "trainer.n_gpus_per_node=1")  # fmt: skip
    found: dict[tuple[str, str], list[float]] = {}
    try:
        with tempfile.TemporaryDirectory() as folder:
            for mode in ("colocate", "separate-async"):
                lines, _ = run(mode, Path(folder) / mode, *job)
                lines = lines[LEFT_OUT_STEPS:]
                found[mode, "step"] = [line["timing_s/step"] for line in lines]
                found[mode, "gen"] = [line["timing_s/gen"] for line in lines]
                found[mode, "the rest"] = [line["timing_s/step"] - line["timing_s/gen"] for line in lines]
    finally:
        rpcrl.roles.actor.ActorWorker, rpcrl.roles.rollout.RolloutWorker = plain  # type: ignore[misc]
    rows = [
        row_of(Case(mode, phase, lambda _: [], variant=variant, workers=1), samples)
        for (mode, phase), samples in found.items()
    ]
    median = {key: statistics.median(samples) for key, samples in found.items()}
    longer = max(median["colocate", "gen"], median["colocate", "the rest"])
    return rows, {
        f"separate-async step / longer of generate and the rest in colocate ({variant})": round(
            median["separate-async", "step"] / longer, 3
        ),
        f"separate-async step / colocate step ({variant})": round(
            median["separate-async", "step"] / median["colocate", "step"], 3
        ),
    }


def staleness(seeds: int) -> list[dict[str, object]]:
    """Run the default job with samples of each age; returns one entry a run."""
    found: list[dict[str, object]] = []
    for lag in LAGS:
        for objective, settings in (("sampler", ()), ("decoupled", DECOUPLED)):
            for seed in range(seeds):
                with tempfile.TemporaryDirectory() as folder:
                    age = (f"trainer.max_staleness={lag}", f"trainer.v1.separate_async.num_warmup_batches={lag}")
                    more = (f"trainer.seed={seed}", "trainer.test_freq=-1")
                    lines, summary = run("separate-async", Path(folder) / "run", *age, *settings, *more)
                entry = {
                    "staleness": lag,
                    "objective": objective,
                    "seed": seed,
                    "heldout_accuracy": summary["heldout_accuracy"]["end"],
                    "reward_last_10": statistics.mean(line["critic/score/mean"] for line in lines[-10:]),
                    "worst_staleness_mean": statistics.mean(
                        line["training/off_policy/trajectory_staleness_worst/mean"] for line in lines
                    ),
                }
                found.append(entry)
                print(json.dumps(entry), flush=True)
    return found


def main() -> None:
    """Measure, print, and write what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few steps: does it run, roughly how fast")
    parser.add_argument("--json", metavar="FILE", help="write rows and environment to FILE as well")
    parser.add_argument("--staleness", type=int, metavar="SEEDS", default=0, help="learn by samples of each age")
    chosen = parser.parse_args()
    rows: list[Row] = []
    more: dict[str, object] = {}
    for waits in (True, False):
        some, ratios = overlap(12 if chosen.quick else 40, waits=waits)
        rows += some
        more.update(ratios)
    if chosen.staleness:
        more["staleness"] = staleness(chosen.staleness)
    report("asynchronous training", rows, chosen.json, **more)


if __name__ == "__main__":
    main()
