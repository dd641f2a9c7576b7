"""Where does the time of a training step go? Runs the default job through the command line and reads its own record.

Nothing is measured by this script itself: ``metrics.jsonl`` holds the seconds of each phase of each step, and
``summary.json`` the totals. The first steps are left out (caches fill, the optimizer's state is made).
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


def main() -> None:
    chosen = options(__doc__ or "")
    steps = 10 if chosen.quick else 100
    rows: list[Row] = []
    more: dict[str, object] = {}
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
