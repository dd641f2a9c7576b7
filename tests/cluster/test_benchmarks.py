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


def _bench(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "rpcrl.cli.main", "bench", "dispatch", *arguments],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=110,
    )


def test_dispatch_is_measured_beside_raw_zeromq_and_memcpy(tmp_path: Path) -> None:
    few = ("--quick", "--rivals", "none", "--rounds", "3", "--budget", "0.2")
    done = _bench(tmp_path, *few, "--json", "rows.json", "--picture", "rows.svg")
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads((tmp_path / "rows.json").read_text(encoding="utf-8"))
    measured = {(row["system"], row["case"], row["variant"]) for row in document["rows"]}
    for system in ("raw_zmq", "rpcrl"):
        assert (system, "ping", "") in measured
        assert (system, "in_flight", "") in measured
        assert (system, "cold_start", "") in measured
        for case in ("scatter_gather", "broadcast"):
            assert {(system, case, "untouched"), (system, case, "touched")} <= measured
    assert {("rpcrl", "reference_chain", "touched"), ("rpcrl", "peer_call", "")} <= measured
    assert {
        ("memcpy", "copy", ""),
        ("memcpy", "broadcast", "touched"),
        ("raw_zmq", "ping_same_threads", ""),
    } <= measured
    assert "ray: not asked for" in done.stdout
    assert all(row["p50_s"] > 0 and row["n"] >= 1 for row in document["rows"])
    assert (tmp_path / "rows.svg").read_text(encoding="utf-8").startswith("<svg")


def test_tcp_is_measured_with_curve(tmp_path: Path) -> None:
    arguments = ("--quick", "--rivals", "none", "--transport", "tcp", "--cases", "ping", "--json", "rows.json")
    done = _bench(tmp_path, *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "rows.json").read_text(encoding="utf-8"))["rows"]
    assert {(row["system"], row["transport"]) for row in rows} == {("rpcrl", "tcp+curve"), ("raw_zmq", "tcp")}


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--workers", "100000"), "--workers 100000: from 1 to"),
        (("--workers", "two"), "whole numbers"),
        (("--rivals", "monarch", "--rivals-dir", "nowhere"), "--rivals monarch: not installed"),
        (("--cases", "pong"), "known are ping"),
        (("--json", "no/such/folder/rows.json"), "there is no folder"),
    ],
)
def test_a_wrong_request_is_refused_before_anything_starts(
    tmp_path: Path, arguments: tuple[str, ...], told: str
) -> None:
    done = _bench(tmp_path, *arguments)
    assert done.returncode == 2
    assert told in done.stderr
    assert done.stdout == ""


def test_handing_over_a_buffer_is_measured_beside_a_copy_and_raw_zeromq(tmp_path: Path) -> None:
    rows = _rows("bench_shared_memory.py", tmp_path)
    measured = {(row["system"], row["case"], row["variant"]) for row in rows}
    assert measured == {
        (system, "hand over" if system != "memcpy" else "copy", variant)
        for system in ("memcpy", "raw_zmq", "rpcrl")
        for variant in ("untouched", "touched")
    }


def test_start_up_is_measured(tmp_path: Path) -> None:
    cases = {row["case"] for row in _rows("bench_import.py", tmp_path)}
    assert {"start", "import rpcrl", "rpcrl --help"} <= cases


@pytest.mark.slow
def test_the_phases_of_a_step_are_measured(tmp_path: Path) -> None:
    cases = {(row["system"], row["case"]) for row in _rows("bench_step.py", tmp_path)}
    systems = ("rpcrl", "recompute", "loop", "hand")
    assert {(system, case) for system in systems for case in ("step", "gen", "update_actor")} <= cases


@pytest.mark.slow
def test_asynchronous_training_is_measured_beside_colocate(tmp_path: Path) -> None:
    measured = {(row["system"], row["case"], row["variant"]) for row in _rows("bench_async.py", tmp_path)}
    modes, variants = ("colocate", "separate-async"), ("waits", "no waits")
    assert measured == {(mode, case, v) for mode in modes for case in ("step", "gen", "the rest") for v in variants}


def test_the_picture_of_staleness_is_made_of_the_results_that_are_kept(tmp_path: Path) -> None:
    results, picture = ROOT / "benchmarks" / "results" / "staleness.json", tmp_path / "staleness.svg"
    script = str(ROOT / "benchmarks" / "staleness_picture.py")
    subprocess.run([sys.executable, script, str(results), str(picture)], check=True)
    assert picture.read_text(encoding="utf-8") == (ROOT / "docs" / "staleness.svg").read_text(encoding="utf-8")
