"""Where does the time of a training step go, and what of it is rpcrl's own?

- The default job through the command line: ``metrics.jsonl`` holds the seconds of each phase of each step, and
  ``summary.json`` the totals.
- The default job with one worker beside the same engine objects in a loop of one process (``step_loop``), step by step
  in the same run: the difference is what processes, calls and batches cost.
- With ``--large``: a model of 9.6 million parameters on one worker and on two, run by run in turn.

The first steps are left out (caches fill, the optimizer's state is made).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from report import ROOT, options, report

from rpcrl.bench.measure import Case, Row, row_of

LEFT_OUT_STEPS = 3


def train(run_dir: Path, *settings: str) -> float:
    """Run the default job with ``settings`` into ``run_dir``; returns the wall seconds of the whole command."""
    command = [
        sys.executable,
        "-m",
        "rpcrl.cli.main",
        "launch",
        "--mode",
        "colocate",
        "--run-dir",
        str(run_dir),
        *settings,
    ]
    started = time.perf_counter()
    done = subprocess.run(
        command,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    wall_s = time.perf_counter() - started
    if done.returncode != 0:
        raise SystemExit(f"the job failed with exit code {done.returncode}:\n{done.stdout}{done.stderr}")
    return wall_s


def rows_of(run_dir: Path, *, variant: str, workers: int) -> tuple[list[Row], float]:
    """Return a row per phase from the run's record, and the median tokens per second of a step."""
    lines = (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    steps = [entry for entry in map(json.loads, lines) if "timing_s/step" in entry][LEFT_OUT_STEPS:]
    if not steps:
        raise SystemExit(f"{run_dir}/metrics.jsonl has no step after the first {LEFT_OUT_STEPS}")
    phases = sorted({name for entry in steps for name in entry if name.startswith("timing_s/")})
    rows = []
    for phase in phases:
        samples = [entry[phase] for entry in steps if phase in entry]
        case = Case("rpcrl", phase.removeprefix("timing_s/"), lambda _: [], variant=variant, workers=workers)
        rows.append(row_of(case, samples))
    rates = sorted(entry["perf/total_num_tokens"] / entry["timing_s/step"] for entry in steps)
    return rows, rates[len(rates) // 2]


def against_loop(steps: int) -> tuple[list[Row], dict[str, object]]:
    """Run the default job with one worker, each step followed by the loop's; returns rows and the ratio of a step."""
    from step_loop import interleaved

    from rpcrl.config.load import load
    from rpcrl.trainer.colocate import ColocateTrainer

    samples: dict[tuple[str, str], list[float]] = {}

    def record(system: str, phase: str, seconds: float) -> None:
        samples.setdefault((system, phase), []).append(seconds)

    settings = [f"trainer.total_training_steps={steps + LEFT_OUT_STEPS}", "trainer.n_gpus_per_node=1"]
    settings += ["trainer.val_before_train=false", "trainer.test_freq=-1"]
    with tempfile.TemporaryDirectory(prefix="rpcrl-bench-") as folder:
        trainer = interleaved(ColocateTrainer, record)(load(None, settings, "colocate"), run_dir=Path(folder) / "run")
        trainer.fit()
    ours, theirs = trainer.last_figures
    if abs(ours["actor/grad_norm"] - theirs["grad_norm"]) > 0.5 * theirs["grad_norm"]:
        raise SystemExit(f"the loop does not do what the trainer does: {ours} {theirs}")
    rows = [
        row_of(
            Case(system, phase, lambda: None, variant="1 process" if system == "loop" else "in turn", workers=1), times
        )
        for (system, phase), every in sorted(samples.items(), key=lambda item: item[0][::-1])
        if (times := every[LEFT_OUT_STEPS:])
    ]
    step = {row.system: row.p50_s for row in rows if row.case == "step"}
    return rows, {"step_against_loop": round(step["rpcrl"] / step["loop"], 3)}


def large(steps: int, repeats: int) -> tuple[list[Row], dict[str, object]]:
    """Train a model of 9.6 million parameters on one worker and on two, in turn; returns rows and the speed-up."""
    from rpcrl.engines.hf_model import copy_tokenizer, load_config
    from rpcrl.tasks.sort_digits import base_checkpoint
    from rpcrl.testing.tiny_model import write_tiny_llama

    vocabulary = load_config(base_checkpoint()).vocab_size
    times: dict[int, list[float]] = {1: [], 2: []}
    with tempfile.TemporaryDirectory(prefix="rpcrl-bench-") as folder:
        shape = {"hidden_size": 256, "intermediate_size": 800, "num_hidden_layers": 11, "initializer_range": 0.02}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 64}
        model = write_tiny_llama(Path(folder) / "model", vocabulary=vocabulary, **heads, **shape)
        copy_tokenizer(base_checkpoint(), model)
        for number in range(repeats):
            for workers in (1, 2) if number % 2 == 0 else (2, 1):
                run_dir = Path(folder) / f"run-{number}-{workers}"
                settings = [f"trainer.total_training_steps={steps + LEFT_OUT_STEPS}", f"model.path={model}"]
                settings += [
                    f"trainer.n_gpus_per_node={workers}",
                    "trainer.val_before_train=false",
                    "trainer.test_freq=-1",
                ]
                train(run_dir, *settings)
                lines = (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
                times[workers] += [entry["timing_s/step"] for entry in map(json.loads, lines)][LEFT_OUT_STEPS:]
    rows = [
        row_of(Case("rpcrl", "step", lambda: None, variant="9.6M model", workers=workers), every)
        for workers, every in times.items()
    ]
    return rows, {"two_workers_speed_up": round(rows[0].p50_s / rows[1].p50_s, 3)}


def main() -> None:
    wants_large = "--large" in sys.argv
    sys.argv = [argument for argument in sys.argv if argument != "--large"]
    chosen = options(__doc__ or "")
    steps = 10 if chosen.quick else 100
    rows, more = against_loop(steps)
    if wants_large:
        found, speed_up = large(3 if chosen.quick else 10, 1 if chosen.quick else 3)
        rows += found
        more.update(speed_up)
    for workers in (2,) if chosen.quick else (1, 2):
        with tempfile.TemporaryDirectory(prefix="rpcrl-bench-") as folder:
            run_dir = Path(folder) / "run"
            settings = [f"trainer.total_training_steps={steps}", f"trainer.n_gpus_per_node={workers}"]
            wall_s = train(run_dir, *settings)
            found, tokens_per_s = rows_of(run_dir, variant=f"{steps} steps", workers=workers)
            summary = json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))
        rows += found
        more[f"workers={workers}"] = {
            "tokens_per_s": round(tokens_per_s),
            "command_s": round(wall_s, 2),
            "heldout_accuracy": summary["heldout_accuracy"],
        }
    report("bench_step: the default job, by phase", rows, chosen.json, **more)


if __name__ == "__main__":
    main()
