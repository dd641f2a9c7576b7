"""Who dies, whoever survives: nothing of the run is left in shared memory, with messages and leases in flight."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from rpcrl import Controller, ResourcePool, WorkerGroup
from rpcrl.leftovers import sweep_stale_runs
from rpcrl.testing.proxy import FaultProxy
from rpcrl.wire.messages import Call, Result
from tests.cluster.memory_workers import Memory

pytestmark = pytest.mark.cluster

ROOT = Path(__file__).parents[2]
FLOATS = 1 << 18

DRIVER = """
import json, os, sys, threading
import torch
from rpcrl import Controller, ResourcePool, WorkerGroup
from tests.cluster.memory_workers import Memory

if __name__ == "__main__":
    folder = sys.argv[1]
    controller = Controller(log_dir=folder + "/logs", console="off")
    group = WorkerGroup(ResourcePool([2], device=None), Memory, torch.ones(1 << 18))
    x = torch.ones(1 << 18)
    group.keep(x)
    kept = [group.echo(x)]
    members = controller._hub._membership.groups[group.name].members
    facts = {"run_id": controller.run_id, "run_dir": str(controller._run_dir), "agent": controller._agent.pid,
             "workers": [member.pid for member in members], "driver": os.getpid()}
    with open(folder + "/facts.tmp", "w") as file:
        json.dump(facts, file)
    os.rename(folder + "/facts.tmp", folder + "/facts.json")
    try:
        while True:
            kept = [future.result() for future in [group.echo.submit(x) for _ in range(4)]]
    finally:
        try:
            controller.close()
        except BaseException:
            pass
"""


def wait_until(condition: Callable[[], bool], what: str, within_s: float) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {within_s} s: {what}"
        os.sched_yield()


def files_of(run_id: str) -> list[str]:
    return [path.name for path in Path("/dev/shm").iterdir() if run_id in path.name]


def lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def kill(facts: dict[str, Any], who: str) -> None:
    victims = {
        "driver": [facts["driver"]],
        "agent": [facts["agent"]],
        "worker": facts["workers"][:1],
        "all": [facts["driver"], facts["agent"], *facts["workers"]],
    }[who]
    if who == "all":
        for pid in victims:  # so that none has the time to clear up after another
            os.kill(pid, signal.SIGSTOP)
    for pid in victims:
        os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("who", ["driver", "agent", "worker", "all"])
def test_p21_nothing_is_left_in_shared_memory(tmp_path: Path, who: str):
    script = tmp_path / "driver.py"
    script.write_text(DRIVER)
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    with subprocess.Popen(
        [sys.executable, str(script), str(tmp_path)],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    ) as driver:
        facts_file = tmp_path / "facts.json"
        wait_until(lambda: facts_file.exists() or driver.poll() is not None, "the driver comes up", 60)
        facts = json.loads(facts_file.read_text())
        try:
            assert len(files_of(facts["run_id"])) > 6
            kill(facts, who)
            driver.wait(30)
        finally:
            driver.kill()
    pids = [facts["agent"], *facts["workers"]]
    wait_until(lambda: not any(map(lives, pids)), "all processes end", 15)
    if who == "all":
        sweep_stale_runs()  # as the next run does that starts here
    wait_until(lambda: not files_of(facts["run_id"]), "no file is left", 15)
    wait_until(lambda: not Path(facts["run_dir"]).exists(), "no directory is left", 15)


def test_p64_lost_and_repeated_messages_with_shared_memory(tmp_path: Path):
    with (
        Controller(log_dir=tmp_path / "logs", console="off") as controller,
        FaultProxy(controller.address, f"ipc://{controller._run_dir}/proxy.sock") as proxy,
    ):
        controller.worker_address = proxy.address
        group = WorkerGroup(ResourcePool([1], device=None), Memory)

        def is_echo(message: object) -> bool:
            return isinstance(message, Call) and message.method == "echo"

        def echo(number: float) -> float:
            return float(group.echo.submit(torch.full((FLOATS,), number)).result(30).sum()) / FLOATS

        faults = [proxy.drop(lambda message: isinstance(message, Result), count=1)]
        assert echo(1.0) == 1.0
        faults.append(proxy.drop(is_echo, count=1))
        assert echo(2.0) == 2.0
        faults.append(proxy.duplicate(is_echo, count=1))
        assert echo(3.0) == 3.0
        faults.append(proxy.duplicate(lambda message: isinstance(message, Result), count=1))
        assert [echo(4.0), echo(5.0)] == [4.0, 5.0]
        assert [fault.num_matched for fault in faults] == [1, 1, 1, 1]
        group.close()
