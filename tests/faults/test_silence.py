"""A worker is alive and does not run: noticed within three heartbeats. What only looks like it is left alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from rpcrl import Controller, ResourcePool, WorkerGroup
from rpcrl.errors import UsageError, WorkerLostError
from tests.cluster.group_workers import Slow, Toy

pytestmark = pytest.mark.cluster

HEARTBEAT_S = 0.5
BOUND_S = 3 * HEARTBEAT_S
STOPPED = (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE)


@pytest.fixture
def ipc(tmp_path: Path) -> Iterator[Controller]:
    with Controller(log_dir=tmp_path / "logs", heartbeat_s=HEARTBEAT_S) as opened:
        yield opened


@pytest.fixture(params=["ipc", "tcp"])
def controller(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Controller]:
    with Controller(transport=request.param, log_dir=tmp_path / "logs", heartbeat_s=HEARTBEAT_S) as opened:
        yield opened


def stop(processes: list[psutil.Process]) -> None:
    """Stop processes; returns when all of them are: the signal is delivered a moment later."""
    for process in processes:
        process.suspend()
    until = time.monotonic() + 10
    while not all(process.status() in STOPPED for process in processes):
        assert time.monotonic() < until, [process.status() for process in processes]
        os.sched_yield()


def test_p02_a_stopped_worker_fails_the_call_within_three_heartbeats(controller: Controller, tmp_path: Path):
    group = WorkerGroup(ResourcePool([3]), Toy, name="actor")
    pids = [seat["pid"] for seat in group.where()]
    future = group.die.submit(-1, "", str(tmp_path / "never"))
    started = time.monotonic()
    os.kill(pids[1], signal.SIGSTOP)
    with pytest.raises(WorkerLostError, match=r"rank 1 of group 'actor' .*: no heartbeat for \d\.\d s") as caught:
        future.result(30)
    took_s = time.monotonic() - started
    assert took_s < BOUND_S + 0.5, f"the silence was noticed after {took_s:.2f} s"
    assert "the process is stopped (SIGSTOP" in str(caught.value)
    assert "during: actor.die on group" in str(caught.value)
    assert [end.rank for end in caught.value.exits] == [1], "the others were ended because of it"
    with pytest.raises(WorkerLostError, match="the group stays broken"):
        group.inc()
    ends = {end.rank: end for end in group.close()}
    assert (ends[1].signal, ends[1].silent_s is not None) == ("SIGKILL", True)
    assert (ends[0].silent_s, ends[2].silent_s) == (None, None)
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_a_worker_that_is_stopped_while_idle_breaks_its_group_and_no_other(ipc: Controller):
    group, other = WorkerGroup(ResourcePool([2]), Toy), WorkerGroup(ResourcePool([1]), Toy)
    stopped = psutil.Process(group.where()[0]["pid"])
    stopped.suspend()
    stopped.wait(BOUND_S + 3.0)  # the agent has ended it
    with pytest.raises(WorkerLostError, match="no heartbeat"):
        group.inc()
    assert other.inc() == [1]


def test_p15_bulk_and_the_interpreter_lock_are_no_silence(controller: Controller):
    """256 MiB arrive while nobody in the worker can read them: its only method holds the interpreter lock."""
    group = WorkerGroup(ResourcePool([1]), Slow)
    held = group.hold_the_lock.submit(BOUND_S + HEARTBEAT_S)
    sent = group.size.submit(bytes(1 << 20) * 256)
    assert held.result(60) == [0]
    assert sent.result(60) == [256 << 20]


def test_p19_a_long_call_without_a_deadline_is_no_silence(ipc: Controller):
    group = WorkerGroup(ResourcePool([2]), Slow)
    assert group.rest(BOUND_S * 3) == [0, 1]


def test_a_worker_that_is_stopped_for_a_moment_lives_on(ipc: Controller):
    group = WorkerGroup(ResourcePool([1]), Toy)
    process = psutil.Process(group.where()[0]["pid"])
    stop([process])
    threading.Event().wait(HEARTBEAT_S * 0.8)
    process.resume()
    assert group.inc() == [1]
    process.suspend()
    process.wait(BOUND_S + 3.0)  # it is still watched


def test_an_exit_is_not_reported_as_silence(ipc: Controller):
    group = WorkerGroup(ResourcePool([2]), Toy)
    with pytest.raises(WorkerLostError) as caught:
        group.die(1, "SIGKILL", "/never/there")
    assert caught.value.exits[0].signal == "SIGKILL"
    threading.Event().wait(BOUND_S + HEARTBEAT_S)
    with pytest.raises(WorkerLostError) as later:
        group.inc()
    assert [end.silent_s for end in later.value.exits] == [None] * len(later.value.exits)


def test_without_heartbeats_a_stopped_worker_is_waited_for(tmp_path: Path):
    with Controller(log_dir=tmp_path / "logs", heartbeat_s=None) as controller:
        group = WorkerGroup(ResourcePool([1]), Toy, controller=controller)
        process = psutil.Process(group.where()[0]["pid"])
        process.suspend()
        future = group.inc.submit()
        threading.Event().wait(BOUND_S + HEARTBEAT_S)
        assert not future.done()
        process.resume()
        assert future.result(20) == [1]


def test_a_heartbeat_has_a_smallest_pace():
    with pytest.raises(UsageError, match=r"heartbeat_s=0\.01"):
        Controller(heartbeat_s=0.01)


DRIVER = """
import sys
from rpcrl import Controller, ResourcePool, WorkerGroup
from tests.cluster.group_workers import Toy

if __name__ == "__main__":
    with Controller(heartbeat_s=0.5, log_dir=sys.argv[1]) as controller:
        group = WorkerGroup(ResourcePool([2]), Toy)
        group.inc()
        print("ready", flush=True)
        sys.stdin.readline()
        print(group.inc(), flush=True)
"""


@pytest.mark.parametrize("workers_too", [False, True], ids=["driver", "driver and workers"])
def test_the_drivers_own_pause_kills_nobody(tmp_path: Path, workers_too: bool):
    """As when a laptop sleeps, or a debugger stops the driver: at the end all go on."""
    script = tmp_path / "driver.py"
    script.write_text(DRIVER)
    command = [sys.executable, str(script), str(tmp_path / "logs")]
    driver = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert driver.stdin is not None
    assert driver.stdout is not None
    try:
        assert driver.stdout.readline() == "ready\n"
        watched = psutil.Process(driver.pid)
        paused = [*watched.children(recursive=True), watched] if workers_too else [watched]
        assert len(watched.children(recursive=True)) >= 3
        # In the middle of a heartbeat or not: more than once.
        for _ in range(3):
            stop(paused)
            threading.Event().wait(BOUND_S)
            for process in reversed(paused):
                process.resume()
            threading.Event().wait(HEARTBEAT_S * 1.3)
        out, _ = driver.communicate("\n", timeout=30)
        assert out == "[2, 2]\n"
    finally:
        driver.kill()
        driver.communicate()
