"""The driver ends, by itself or by any signal: nothing of its run is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

pytestmark = pytest.mark.cluster

ROOT = Path(__file__).parents[2]

DRIVER = """
import json, sys
from rpcrl import Controller, ResourcePool, WorkerGroup
from tests.cluster.group_workers import Toy

if __name__ == "__main__":
    folder, how = sys.argv[1:]
    with Controller(log_dir=folder + "/logs") as controller:
        group = WorkerGroup(ResourcePool([2]), Toy)
        pids = [seat["pid"] for seat in group.where()] + group.spawn_child()
        pids.append(controller._agent.pid)
        facts = {"pids": pids, "run_dir": str(controller._run_dir), "run_id": controller.run_id}
        with open(folder + "/facts.tmp", "w") as file:
            json.dump(facts, file)
        import os
        os.rename(folder + "/facts.tmp", folder + "/facts.json")
        if how == "raise":
            raise RuntimeError("the driver fails on purpose")
        if how == "exit":
            sys.exit(5)
        group.die(-1, "", folder + "/never")
"""


def wait_until(condition: Callable[[], bool], within_s: float) -> bool:
    deadline = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        os.sched_yield()
    return True


def start(tmp_path: Path, how: str) -> tuple[subprocess.Popen[str], dict[str, object]]:
    script = tmp_path / "driver.py"
    script.write_text(DRIVER)
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    driver = subprocess.Popen(
        [sys.executable, str(script), str(tmp_path), how],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    facts_file = tmp_path / "facts.json"
    assert wait_until(lambda: facts_file.exists() or driver.poll() is not None, 60), "the driver did not come up"
    assert facts_file.exists(), driver.communicate()
    return driver, json.loads(facts_file.read_text())


def living(pids: list[int]) -> list[int]:
    return [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE]


def assert_nothing_left(facts: dict[str, object], within_s: float = 8.0) -> None:
    pids: list[int] = facts["pids"]  # type: ignore[assignment]
    assert wait_until(lambda: not living(pids), within_s), f"still alive: {living(pids)}"
    run_dir = Path(str(facts["run_dir"]))
    assert wait_until(lambda: not run_dir.exists(), within_s), list(run_dir.iterdir())
    assert [path for path in Path("/dev/shm").iterdir() if str(facts["run_id"]) in path.name] == []


@pytest.mark.parametrize(("how", "status"), [("raise", 1), ("exit", 5)])
def test_p21_after_an_exception_or_exit(tmp_path: Path, how: str, status: int):
    driver, facts = start(tmp_path, how)
    _, errors = driver.communicate(timeout=30)
    assert driver.returncode == status
    assert ("the driver fails on purpose" in errors) == (how == "raise")
    assert_nothing_left(facts)


def test_p21_after_ctrl_c(tmp_path: Path):
    driver, facts = start(tmp_path, "wait")
    os.killpg(driver.pid, signal.SIGINT)
    _, errors = driver.communicate(timeout=30)
    assert "KeyboardInterrupt" in errors
    assert driver.returncode != 0
    assert_nothing_left(facts)


@pytest.mark.parametrize("name", ["SIGKILL", "SIGTERM", "SIGHUP", "SIGABRT"])
def test_p21_after_a_signal(tmp_path: Path, name: str):
    driver, facts = start(tmp_path, "wait")
    driver.send_signal(getattr(signal, name))
    driver.communicate(timeout=30)
    assert driver.returncode == -getattr(signal, name)
    assert_nothing_left(facts)


def test_all_killed_together_the_next_start_cleans_up(tmp_path: Path):
    driver, facts = start(tmp_path, "wait")
    run_dir = Path(str(facts["run_dir"]))
    agent = facts["pids"][-1]  # type: ignore[index]
    driver.send_signal(signal.SIGSTOP)
    os.kill(agent, signal.SIGSTOP)
    os.kill(agent, signal.SIGKILL)
    driver.send_signal(signal.SIGKILL)
    driver.communicate(timeout=30)
    assert run_dir.exists(), "somebody survived to clean up: this test must kill all of them"
    from rpcrl import Controller

    with Controller(log_dir=tmp_path / "next"):
        assert not run_dir.exists()
    assert_nothing_left(facts)
