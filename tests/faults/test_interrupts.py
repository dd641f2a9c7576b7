"""Ctrl-C: the first ends a run in order, the second at once; in its start, in a call and in its end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

pytestmark = pytest.mark.cluster

ROOT = Path(__file__).parents[2]
ORDERLY_S = 6.0
"""Ends of workers that do not mind SIGTERM, and a busy machine."""
AT_ONCE_S = 2.0
"""Less than the 3 s and 60 s of grace in start and shutdown. The socket to a killed agent may linger for 1 s, so this
does not tell apart the call, whose orderly end takes 1.1 s."""

DRIVER = """
import sys
from rpcrl import Controller, ResourcePool, WorkerGroup
from tests.cluster.group_workers import Stubborn

if __name__ == "__main__":
    phase, folder = sys.argv[1:]
    with Controller(log_dir=folder + "/logs") as controller:
        print(controller._agent.pid, controller._run_dir, flush=True)
        group = WorkerGroup(ResourcePool([2]), Stubborn, folder, hang=phase == "start")
        if phase == "call":
            group.wait()
        if phase == "shutdown":
            open(folder + "/there", "w").close()
            group.close(grace_s=60)
"""


def wait_until(condition: Callable[[], bool], within_s: float) -> bool:
    deadline = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        os.sched_yield()
    return True


@contextmanager
def running(folder: Path, phase: str) -> Iterator[tuple[subprocess.Popen[str], list[psutil.Process], Path]]:
    """A driver that has come to ``phase``, the processes of its run, and the run's directory."""
    script = folder / "driver.py"
    script.write_text(DRIVER)
    command = [sys.executable, str(script), phase, str(folder)]
    driver = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        assert driver.stdout is not None
        agent, _, run_dir = driver.stdout.readline().strip().partition(" ")
        assert wait_until((folder / "there").exists, 30), "the driver did not come to its phase"
        if phase == "shutdown":
            assert wait_until((folder / "told").exists, 30), "the end of the group has not begun"
        processes = [psutil.Process(int(agent)), *psutil.Process(int(agent)).children(recursive=True)]
        assert len(processes) == 3
        yield driver, processes, Path(run_dir)
    finally:
        driver.kill()
        driver.communicate()


def interrupt(driver: subprocess.Popen[str]) -> float:
    """Press Ctrl-C: the whole foreground process group gets it."""
    os.killpg(driver.pid, signal.SIGINT)
    return time.monotonic()


def ends(driver: subprocess.Popen[str], processes: list[psutil.Process], run_dir: Path, since: float) -> float:
    """Wait for the end of the driver; return how long it took. Nothing of its run is there any more."""
    _, errors = driver.communicate(timeout=60)
    took_s = time.monotonic() - since
    assert "KeyboardInterrupt" in errors
    assert driver.returncode == -signal.SIGINT
    assert living(processes, within_s=0.5) == [], "the run has outlived its driver"
    assert not run_dir.exists()
    return took_s


def living(processes: list[psutil.Process], within_s: float) -> list[psutil.Process]:
    """Return who still lives after a while. A zombie does not: its end has come, and init has yet to note it."""

    def lives(process: psutil.Process) -> bool:
        try:
            return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
        except psutil.NoSuchProcess:
            return False

    wait_until(lambda: not any(map(lives, processes)), within_s)
    return [process for process in processes if lives(process)]


@pytest.mark.parametrize("phase", ["start", "call", "shutdown"])
def test_p25_one_ctrl_c_ends_a_run_in_order(tmp_path: Path, phase: str):
    with running(tmp_path, phase) as (driver, processes, run_dir):
        since = interrupt(driver)
        assert ends(driver, processes, run_dir, since) < ORDERLY_S
        assert (tmp_path / "told").exists(), "in order: the workers got SIGTERM first"


@pytest.mark.parametrize("phase", ["start", "call"])
def test_p25_a_second_ctrl_c_ends_it_at_once(tmp_path: Path, phase: str):
    with running(tmp_path, phase) as (driver, processes, run_dir):
        interrupt(driver)
        assert wait_until((tmp_path / "told").exists, 30), "the orderly end has not begun"
        assert ends(driver, processes, run_dir, interrupt(driver)) < AT_ONCE_S


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["start", "shutdown"])
def test_p24_sigterm_to_a_plain_script_leaves_nothing(tmp_path: Path, phase: str):
    with running(tmp_path, phase) as (driver, processes, run_dir):
        driver.send_signal(signal.SIGTERM)
        driver.communicate(timeout=30)
        assert driver.returncode == -signal.SIGTERM
        assert living(processes, within_s=8.0) == []
        assert not run_dir.exists()
