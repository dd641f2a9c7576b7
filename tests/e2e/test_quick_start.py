"""Does the quick start work on a machine without a GPU, from one command?"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ABOUT_A_MINUTE_S = 90.0

pytestmark = pytest.mark.cluster


def _launch(tmp_path: Path, *settings: str) -> tuple[subprocess.CompletedProcess[str], Path]:
    run_dir = tmp_path / "run"
    command = [sys.executable, "-m", "rpcrl.cli.main", "launch", "--mode", "colocate", "--run-dir", str(run_dir)]
    done = subprocess.run(
        [*command, *settings],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    return done, run_dir


def test_p42_the_quick_start_runs_without_a_gpu(tmp_path: Path) -> None:
    """Nobody has to say that there is no GPU: the default device is the CPU."""
    done, run_dir = _launch(tmp_path, "trainer.total_training_steps=2")
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))
    assert summary["mode"] == "colocate"
    assert summary["steps"] == 2
    assert 0.44 <= summary["heldout_accuracy"]["start"] <= 0.56


def _start(tmp_path: Path, save_freq: int) -> subprocess.Popen[str]:
    """Start a training without end, in ``tmp_path/run``."""
    settings = [
        "trainer.total_training_steps=100000",
        f"trainer.save_freq={save_freq}",
        "trainer.val_before_train=false",
    ]
    return subprocess.Popen(
        [sys.executable, "-u", "-m", "rpcrl.cli.main", "launch", "--run-dir", str(tmp_path / "run"), *settings],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _read_up_to(running: subprocess.Popen[str], start: str) -> None:
    assert running.stdout is not None
    for line in running.stdout:
        if line.startswith(start):
            return
    pytest.fail(f"the run has ended: {running.communicate()}")


@pytest.mark.parametrize(
    ("number", "save_freq"),
    [(signal.SIGTERM, 1), (signal.SIGHUP, -1), pytest.param(signal.SIGINT, 1, marks=pytest.mark.slow)],
)
def test_p24_p25_a_signal_ends_a_run_in_order_and_says_how_to_go_on(
    tmp_path: Path, number: int, save_freq: int
) -> None:
    run_dir = tmp_path / "run"
    running = _start(tmp_path, save_freq)
    _read_up_to(running, "step 1/")
    running.send_signal(number)
    _, told = running.communicate(timeout=60)
    assert running.returncode == 128 + number, told
    assert "interrupted in step " in told
    if save_freq == 1:
        assert f"last checkpoint: {run_dir}/checkpoints/global_step_" in told
        assert f"rpcrl launch --config {run_dir}/config.yaml --run-dir {run_dir} --resume" in told
    else:
        assert "there is no checkpoint to go on from: trainer.save_freq=-1 writes only the final one" in told


def test_p25_ctrl_c_while_a_run_starts(tmp_path: Path) -> None:
    running = _start(tmp_path, -1)
    until = time.monotonic() + 60
    while not list(tmp_path.glob("run/logs/*rank*.log")):
        assert time.monotonic() < until, running.poll()
        os.sched_yield()
    running.send_signal(signal.SIGINT)
    # it waits for the import of a library that may be under way, and for nothing else
    out, told = running.communicate(timeout=60)
    assert running.returncode == 130, told
    assert "interrupted in starting" in told
    assert "step 1/" not in out


@pytest.mark.slow
def test_p25_ctrl_c_twice_ends_a_run_at_once(tmp_path: Path) -> None:
    running = _start(tmp_path, -1)
    _read_up_to(running, "step 1/")
    running.send_signal(signal.SIGINT)
    running.send_signal(signal.SIGINT)
    sent_at = time.monotonic()
    _, told = running.communicate(timeout=60)
    assert running.returncode in (130, -signal.SIGINT), told
    assert time.monotonic() - sent_at < 5.0


@pytest.mark.slow
def test_p42_the_whole_default_job_learns_in_about_a_minute(tmp_path: Path) -> None:
    started = time.monotonic()
    done, run_dir = _launch(tmp_path, "trainer.device=cpu")
    took_s = time.monotonic() - started
    assert done.returncode == 0, done.stdout + done.stderr
    accuracy = json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))["heldout_accuracy"]
    assert 0.44 <= accuracy["start"] <= 0.56
    assert accuracy["end"] >= 0.93
    assert took_s < ABOUT_A_MINUTE_S
