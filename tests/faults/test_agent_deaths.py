"""Is anything left when the driver, the agent or a worker is killed? Each worker has started a process of its own."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rpcrl.leftovers import find_processes, remove_run_dir, start_ticks, sweep_processes, sweep_stale_runs
from tests.cluster.fake_controller import FakeController

pytestmark = pytest.mark.cluster


class Driver:
    """A driver in a process of its own, with an agent, two workers and two grandchildren; one is deaf to SIGTERM."""

    def __init__(self, tmp_path: Path, mode: str) -> None:
        self.run_dir = tmp_path / "rpcrl-run"
        self.log_dir = tmp_path / "logs"
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.cluster.fake_controller", str(self.run_dir), str(self.log_dir), mode],
            stdout=subprocess.PIPE,
        )
        assert self.process.stdout is not None
        facts = json.loads(self.process.stdout.readline())
        self.run_id: str = facts["run_id"]
        self.agent: int = facts["agent"]
        self.holder: list[int] = facts["holder"]
        self.workers: list[int] = facts["workers"]
        self.grandchildren: list[int] = facts["grandchildren"]
        self.handles = {
            pid: os.pidfd_open(pid) for pid in (self.agent, *self.holder, *self.workers, *self.grandchildren)
        }

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def wait_gone(self, pids: list[int], within_s: float = 5.0) -> None:
        """Wait for the end of each of these processes, without looking again and again."""
        deadline = time.monotonic() + within_s
        for pid in pids:
            left_s = max(0.0, deadline - time.monotonic())
            assert select.select([self.handles[pid]], [], [], left_s)[0], f"process {pid} still runs"

    def close(self) -> None:
        for handle in self.handles.values():
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(handle, signal.SIGKILL)
            os.close(handle)
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def driver(tmp_path: Path) -> Iterator[Callable[[str], Driver]]:
    made: list[Driver] = []

    def make(mode: str) -> Driver:
        made.append(Driver(tmp_path, mode))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.mark.parametrize("mode", ["normal", "pipe", "held"])
def test_p21_when_the_driver_is_killed_everything_goes(driver: Callable[[str], Driver], mode: str) -> None:
    run = driver(mode)
    assert len(find_processes(run.run_id)) == 5
    run.kill()
    run.wait_gone([run.agent, *run.workers, *run.grandchildren])
    assert find_processes(run.run_id) == []
    assert not run.run_dir.exists()
    assert (run.log_dir / "g.rank0.log").read_text().endswith("up\n")
    # A process that the driver itself had started, outside the run, is nobody's business here.
    assert all(start_ticks(pid) is not None for pid in run.holder)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGABRT], ids=str)
def test_p21_other_deaths_of_the_driver_are_no_different(driver: Callable[[str], Driver], number: int) -> None:
    run = driver("normal")
    run.process.send_signal(number)
    run.process.wait()
    run.wait_gone([run.agent, *run.workers, *run.grandchildren])
    assert not run.run_dir.exists()


def test_p21_when_the_agent_is_killed_its_workers_die_and_the_driver_sweeps_the_rest(
    driver: Callable[[str], Driver],
) -> None:
    run = driver("normal")
    os.kill(run.agent, signal.SIGKILL)
    run.wait_gone(run.workers, within_s=2.0)
    # What the driver does when it sees its agent gone:
    assert sorted(sweep_processes(run.run_id)) == sorted(run.grandchildren)
    assert remove_run_dir(run.run_dir, keep=(run.log_dir,))
    run.wait_gone(run.grandchildren, within_s=1.0)


def test_p21_when_driver_and_agent_are_killed_together_the_next_start_sweeps(
    driver: Callable[[str], Driver], tmp_path: Path
) -> None:
    run = driver("normal")
    # Stopped first, so that it cannot see the driver's end.
    os.kill(run.agent, signal.SIGSTOP)
    run.kill()
    os.kill(run.agent, signal.SIGKILL)
    run.wait_gone([run.agent, *run.workers], within_s=2.0)
    assert run.run_dir.exists()
    assert sorted(find_processes(run.run_id)) == sorted(run.grandchildren)
    assert [owner.run_id for owner in sweep_stale_runs(tmp_path)] == [run.run_id]
    run.wait_gone(run.grandchildren, within_s=1.0)
    assert not run.run_dir.exists()


@pytest.fixture
def controller(tmp_path: Path) -> Iterator[FakeController]:
    controller = FakeController(None, tmp_path, console="all")
    yield controller
    controller.close()
    assert find_processes(controller.run_id) == []
    assert not controller.run_dir.exists()


@pytest.mark.parametrize("how", ["plain", "session"])
def test_p09_p36_a_killed_worker_is_reported_within_a_second_and_its_processes_are_gone(
    controller: FakeController, how: str
) -> None:
    controller.start([["print", "last words"], ["grandchild", how], ["wait"]], [["print", "up"], ["wait"]])
    controller.until(lambda: controller.grandchildren() and controller.lines("g-1"))
    before = time.monotonic()
    os.kill(controller.started()["g-0"], signal.SIGKILL)
    controller.until(controller.exits)
    assert time.monotonic() - before < 1.0
    exit_ = controller.exits()["g-0"]
    assert (exit_.signal, exit_.exit_code, exit_.pid) == ("SIGKILL", None, controller.started()["g-0"])
    assert exit_.last_lines[0] == "last words"
    assert exit_.peak_rss_bytes > 1 << 20
    assert start_ticks(controller.grandchildren()[0]) is None
    assert start_ticks(controller.started()["g-1"]) is not None


def test_a_stopped_worker_is_ended_with_the_run(controller: FakeController) -> None:
    controller.start([["ignore_sigterm"], ["print", "up"], ["wait"]])
    controller.until(controller.lines)
    os.kill(controller.started()["g-0"], signal.SIGSTOP)
    assert controller.close() == 0
    assert controller.exits()["g-0"].signal == "SIGKILL"


def test_an_agent_whose_controller_speaks_another_protocol_ends_everything(controller: FakeController) -> None:
    controller.start([["grandchild", "session"], ["wait"]])
    controller.until(controller.grandchildren)
    controller.listener.send(controller.identity, [b"\x92\xcd\x27\x0f\x09"])
    assert controller.process.wait(timeout=10) == 1
    assert start_ticks(controller.grandchildren()[0]) is None
    assert start_ticks(controller.started()["g-0"]) is None
