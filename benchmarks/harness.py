"""How is a time taken? Warm up, run the rivals turn by turn in one process, report medians and the 99th percentile.

Turn by turn (round-robin), because a machine's speed drifts by more than the systems differ: each round gives every
case one sample under the same conditions. A row says ``system, case, variant, workers, mib, p50_s, p99_s, n``.
"""

from __future__ import annotations

import argparse
import gc
import importlib.metadata
import json
import math
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("pyzmq", "msgpack", "numpy", "torch", "tensordict", "transformers")


@dataclass(frozen=True)
class Case:
    """One thing to time: ``call`` does it once and returns when its result is there."""

    system: str
    case: str
    call: Callable[[], object]
    variant: str = ""
    workers: int = 0
    mib: float = 0.0


@dataclass(frozen=True)
class Row:
    """One line of a result file."""

    system: str
    case: str
    variant: str
    workers: int
    mib: float
    p50_s: float
    p99_s: float
    n: int


def percentile(samples: Sequence[float], share: float) -> float:
    """Return the smallest sample that at least ``share`` of the samples do not exceed."""
    ordered = sorted(samples)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def row_of(case: Case, samples: Sequence[float]) -> Row:
    """Return the row of a case from its times in seconds."""
    return Row(
        case.system,
        case.case,
        case.variant,
        case.workers,
        case.mib,
        percentile(samples, 0.5),
        percentile(samples, 0.99),
        len(samples),
    )


def measure(cases: Sequence[Case], *, rounds: int, warm_up: int = 3, budget_s: float = 60.0) -> list[Row]:
    """Time ``cases`` against each other: ``rounds`` rounds, fewer when ``budget_s`` is used up, three at least."""
    for case in cases:
        for _ in range(warm_up):
            case.call()
    samples: list[list[float]] = [[] for _ in cases]
    deadline = time.monotonic() + budget_s
    gc.collect()
    gc.disable()
    try:
        for number in range(rounds):
            # A different one goes first each round: none gets the warm cache every time.
            for offset in range(len(cases)):
                index = (number + offset) % len(cases)
                call = cases[index].call
                started = time.perf_counter()
                call()
                samples[index].append(time.perf_counter() - started)
            if number >= 2 and time.monotonic() > deadline:
                break
    finally:
        gc.enable()
    return [row_of(case, times) for case, times in zip(cases, samples, strict=True)]


def environment() -> dict[str, object]:
    """Return what a reader needs to judge the numbers: machine, versions, commit, load at the start."""
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return {
        "time_utc": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "commit": commit.stdout.strip(),
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "load_1min": round(os.getloadavg()[0], 2),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": platform.platform(),
        "python": platform.python_version(),
        "omp_num_threads": os.environ.get("OMP_NUM_THREADS", ""),
        "packages": {name: _version(name) for name in PACKAGES},
    }


def options(description: str) -> argparse.Namespace:
    """Parse the options that every benchmark has; also sets one OpenMP thread where nothing else is asked for."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="few repetitions: does it run, roughly how fast")
    parser.add_argument("--json", metavar="FILE", help="write rows and environment to FILE as well")
    chosen = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    return chosen


def report(title: str, rows: Sequence[Row], json_path: str | None, **more: object) -> None:
    """Print a table, and write the JSON file when one is named."""
    surroundings = environment()
    print(f"\n{title}")
    print(
        f"  {surroundings['cpu']}, {surroundings['cores']} cores, load {surroundings['load_1min']}, "
        f"Python {surroundings['python']}, commit {surroundings['commit']}"
    )
    header = f"  {'system':<10} {'case':<16} {'variant':<12} {'workers':>7} {'MiB':>6} {'p50':>10} {'p99':>10} {'n':>6}"
    print(header)
    for row in rows:
        print(
            f"  {row.system:<10} {row.case:<16} {row.variant:<12} {row.workers:>7} {row.mib:>6g} "
            f"{duration(row.p50_s):>10} {duration(row.p99_s):>10} {row.n:>6}"
        )
    for name, value in more.items():
        print(f"  {name}: {value}")
    if json_path is not None:
        document = {"benchmark": title, "environment": surroundings, "rows": [asdict(row) for row in rows], **more}
        Path(json_path).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        print(f"  written to {json_path}")
    sys.stdout.flush()


def duration(seconds: float) -> str:
    """Return a time in the unit that fits it."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.1f} µs"
    if seconds < 1:
        return f"{seconds * 1e3:.2f} ms"
    return f"{seconds:.2f} s"


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""
