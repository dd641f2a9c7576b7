"""Do the benchmarks still run? A quick look at each; the figures themselves are nobody's test."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.cluster


def _rows(script: str, tmp_path: Path) -> list[dict[str, object]]:
    result = tmp_path / "rows.json"
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / script), "--quick", "--json", str(result)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=110,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return list(json.loads(result.read_text(encoding="utf-8"))["rows"])


def test_dispatch_is_measured_beside_raw_zeromq(tmp_path: Path) -> None:
    rows = _rows("bench_dispatch.py", tmp_path)
    measured = {(row["system"], row["case"], row["variant"]) for row in rows}
    for system in ("raw zmq", "rpcrl"):
        assert (system, "ping", "") in measured
        assert (system, "scatter_gather", "untouched") in measured
        assert (system, "scatter_gather", "touched") in measured


def test_handing_over_a_buffer_is_measured_beside_a_copy_and_raw_zeromq(tmp_path: Path) -> None:
    rows = _rows("bench_shared_memory.py", tmp_path)
    measured = {(row["system"], row["case"], row["variant"]) for row in rows}
    assert measured == {
        (system, "hand over" if system != "memcpy" else "copy", variant)
        for system in ("memcpy", "raw zmq", "rpcrl")
        for variant in ("untouched", "touched")
    }


def test_start_up_is_measured(tmp_path: Path) -> None:
    cases = {row["case"] for row in _rows("bench_import.py", tmp_path)}
    assert {"start", "import rpcrl", "rpcrl --help"} <= cases


@pytest.mark.slow
def test_the_phases_of_a_step_are_measured(tmp_path: Path) -> None:
    cases = {row["case"] for row in _rows("bench_step.py", tmp_path)}
    assert {"step", "gen", "update_actor"} <= cases
