"""Which options do the smaller benchmarks have, and how do they report? Times are taken by ``rpcrl.bench.measure``."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rpcrl.bench.measure import Row, duration, environment

ROOT = Path(__file__).resolve().parents[1]


def options(description: str, *more: tuple[str, dict[str, Any]]) -> argparse.Namespace:
    """Parse the options that every benchmark has, and ``more``; sets one OpenMP thread where nothing else is."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="few repetitions: does it run, roughly how fast")
    parser.add_argument("--json", metavar="FILE", help="write rows and environment to FILE as well")
    for name, settings in more:
        parser.add_argument(name, **settings)
    chosen = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    return chosen


def report(title: str, rows: Sequence[Row], json_path: str | None, **more: object) -> None:
    """Print a table, and write the JSON file when one is named."""
    machine = environment()
    print(f"\n{title}")
    print(
        f"  {machine['cpu']}, {machine['cores']} cores, load {machine['load_1min']}, "
        f"Python {machine['python']}, commit {machine['commit']}"
    )
    print(f"  {'system':<10} {'case':<16} {'variant':<12} {'workers':>7} {'MiB':>6} {'p50':>10} {'p99':>10} {'n':>6}")
    for row in rows:
        print(
            f"  {row.system:<10} {row.case:<16} {row.variant:<12} {row.workers:>7} {row.mib:>6g} "
            f"{duration(row.p50_s):>10} {duration(row.p99_s):>10} {row.n:>6}"
        )
    for name, value in more.items():
        print(f"  {name}: {value}")
    if json_path is not None:
        document = {"benchmark": title, "environment": machine, "rows": [row.plain() for row in rows], **more}
        Path(json_path).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        print(f"  written to {json_path}")
    sys.stdout.flush()
