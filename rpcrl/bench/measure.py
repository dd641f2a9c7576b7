"""How is a time taken? Warm up, run the systems turn by turn, report medians and the 99th percentile.

Turn by turn (round-robin), because a machine's speed drifts by more than the systems differ: each round gives every
case one turn under the same conditions, and a different one goes first. No means: one slow call is not a slow system.
"""

from __future__ import annotations

import gc
import importlib.metadata
import math
import os
import platform
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rpcrl import env

__all__ = ["Case", "Row", "duration", "environment", "measure", "percentile", "row_of", "timed"]

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("pyzmq", "msgpack", "numpy", "torch", "tensordict", "transformers")
TURN_S = 0.02
"""Short calls are made several times a turn, so that a turn is about as long as this."""
MAX_CALLS_A_TURN = 50
MIN_ROUNDS = 3


@dataclass(frozen=True)
class Case:
    """One thing to time: ``sample(n)`` does it n times and returns the seconds of each."""

    system: str
    case: str
    sample: Callable[[int], list[float]]
    variant: str = ""
    workers: int = 0
    mib: float = 0.0
    transport: str = ""


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
    transport: str = ""
    p25_s: float = field(default=0.0, compare=False)
    p75_s: float = field(default=0.0, compare=False)
    """Half of all samples lie between these two; on the terminal only."""

    @property
    def spread(self) -> float:
        """Distance of the quartiles as a share of the median."""
        return (self.p75_s - self.p25_s) / self.p50_s if self.p50_s else 0.0

    def plain(self) -> dict[str, object]:
        """Return what a result file holds of it."""
        return {name: value for name, value in asdict(self).items() if name not in ("p25_s", "p75_s")}


def percentile(samples: Sequence[float], share: float) -> float:
    """Return the smallest sample that at least ``share`` of the samples do not exceed; 0 of none."""
    ordered = sorted(samples)
    if not ordered:
        return 0.0
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def row_of(case: Case, samples: Sequence[float]) -> Row:
    """Return the row of a case from its times in seconds."""
    p25_s, p50_s, p75_s, p99_s = (percentile(samples, share) for share in (0.25, 0.5, 0.75, 0.99))
    where = (case.system, case.case, case.variant, case.workers, case.mib)
    return Row(*where, p50_s, p99_s, len(samples), case.transport, p25_s, p75_s)


def timed(call: Callable[[], object]) -> Callable[[int], list[float]]:
    """Return what times a call of this process."""

    def sample(count: int) -> list[float]:
        samples = []
        for _ in range(count):
            started = time.perf_counter()
            call()
            samples.append(time.perf_counter() - started)
        return samples

    return sample


def measure(
    cases: Sequence[Case], *, rounds: int, warm_up: int = 3, budget_s: float = 60.0, per_turn: int | None = None
) -> list[Row]:
    """Time ``cases`` against each other: ``rounds`` rounds, fewer when ``budget_s`` is used up, three at least.

    ``per_turn``: calls of a case in each round; by default as many as take ``TURN_S``, 50 at most. A case that gave no
    sample has a row with ``n == 0``.
    """
    warm = [case.sample(warm_up) if warm_up else [] for case in cases]
    counts = [per_turn or _calls_a_turn(seconds) for seconds in warm]
    samples: list[list[float]] = [[] for _ in cases]
    deadline = time.monotonic() + budget_s
    gc.collect()
    gc.disable()
    try:
        for number in range(rounds):
            # A different one goes first each round: none gets the warm cache every time.
            for offset in range(len(cases)):
                index = (number + offset) % len(cases)
                samples[index] += cases[index].sample(counts[index])
            if number + 1 >= MIN_ROUNDS and time.monotonic() > deadline:
                break
    finally:
        gc.enable()
    return [row_of(case, times) for case, times in zip(cases, samples, strict=True)]


def _calls_a_turn(warm: Sequence[float]) -> int:
    quickest = min(warm, default=TURN_S)
    return max(1, min(MAX_CALLS_A_TURN, int(TURN_S / max(quickest, 1e-7))))


def environment() -> dict[str, object]:
    """Return what a reader needs to judge the numbers: machine, versions, commit, load at the start."""
    return {
        "time_utc": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "commit": _commit(),
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "load_1min": round(os.getloadavg()[0], 2),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": platform.platform(),
        "python": platform.python_version(),
        "omp_num_threads": env.get("OMP_NUM_THREADS", ""),
        "packages": {name: _version(name) for name in PACKAGES},
    }


def duration(seconds: float) -> str:
    """Return a time in the unit that fits it."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.1f} µs"
    if seconds < 1:
        return f"{seconds * 1e3:.2f} ms"
    return f"{seconds:.2f} s"


def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty"]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    except OSError:  # no git here
        return ""
    return done.stdout.strip()


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
