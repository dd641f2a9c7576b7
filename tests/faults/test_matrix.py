"""A worker fails: in each phase of its life, in each way. What is the driver told, how soon, and is anything left?

Every cell is a group of two real processes, of which rank 1 fails, and asserts that the fault has happened. All of them
run in ``make test``.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from rpcrl import Controller, ResourcePool, WorkerGroup
from rpcrl.errors import RemoteError, RpcrlError, StartError, WorkerExit, WorkerLostError
from rpcrl.runtime.controller import STOP_GRACE_S
from tests.faults import fault
from tests.faults.faulty_worker import Bomb, Faulty

pytestmark = pytest.mark.cluster

PHASES = ("before hello", "idle", "scatter", "compute", "collective", "collect", "shutdown")
FAULTS = ("exception", "exit", "SIGKILL", "SIGSTOP")

HEARTBEAT_S = 0.5
START_S = 3.0
SLACK_S = 1.0
"""A busy machine's share in every bound."""
GRACE_S = 1.0
"""Between SIGTERM and SIGKILL, when a group is closed."""

ENDS = {
    "exit": "exited with code 17",
    "SIGKILL": "killed by SIGKILL",
    "SIGSTOP": "no heartbeat for",
}

EARLY = """
import os, sys

class Hook:
    def find_spec(self, name, path=None, target=None):
        if name == "rpcrl.runtime.worker_main":
            sys.meta_path.remove(self)
            from tests.faults import fault
            if fault.is_here():
                fault.happen({how!r}, {folder!r})

sys.meta_path.insert(0, Hook())
"""


@dataclass
class Story:
    """What the driver was told."""

    error: RpcrlError | None = None
    told_at: float = 0.0
    ends: list[WorkerExit] = field(default_factory=list)


@pytest.fixture(scope="module")
def controller(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Controller]:
    with Controller(log_dir=tmp_path_factory.mktemp("matrix"), heartbeat_s=HEARTBEAT_S) as opened:
        yield opened


@pytest.mark.parametrize("how", FAULTS)
@pytest.mark.parametrize("phase", PHASES)
def test_a_fault_is_told_in_time_and_leaves_nothing(controller: Controller, tmp_path: Path, phase: str, how: str):
    story = (
        before_hello(controller, tmp_path, how) if phase == "before hello" else later(controller, tmp_path, phase, how)
    )
    happened = tmp_path / "happened"
    assert happened.exists(), "the fault did not happen: this cell shows nothing"
    took_s = story.told_at - float(happened.read_text())
    assert took_s < bound_s(phase, how), f"told after {took_s:.2f} s"
    check_error(story, phase, how)
    if phase != "before hello":
        check_ends(story, phase, how)
    left = psutil.Process(controller._agent.pid).children(recursive=True)
    assert left == [], "a group that has failed and is closed leaves no process"


def before_hello(controller: Controller, folder: Path, how: str) -> Story:
    (folder / "early").mkdir()
    (folder / "early" / "sitecustomize.py").write_text(EARLY.format(how=how, folder=str(folder)))
    path = os.pathsep.join([str(folder / "early"), os.environ["PYTHONPATH"]])
    usual_s, controller.start_timeout_s = controller.start_timeout_s, START_S
    try:
        with pytest.raises(StartError) as caught:
            WorkerGroup(
                ResourcePool([2]), Faulty, "", how, str(folder), environment={"PYTHONPATH": path}, controller=controller
            )
    finally:
        controller.start_timeout_s = usual_s
    return Story(caught.value, time.monotonic())


def later(controller: Controller, folder: Path, phase: str, how: str) -> Story:
    group = WorkerGroup(ResourcePool([2]), Faulty, phase, how, str(folder), controller=controller)
    story = Story()
    try:
        if phase != "shutdown":
            run(group, Bomb(phase, how, str(folder)))
    except RpcrlError as error:
        story.error = error
    story.told_at = time.monotonic()
    story.ends = group.close(grace_s=GRACE_S)
    if phase == "shutdown":
        story.told_at = time.monotonic()
    return story


def run(group: WorkerGroup, bomb: Bomb) -> None:
    if bomb.phase == "idle":
        group.arm()
        Path(bomb.folder, "go").touch()
        until = time.monotonic() + 20
        while not Path(bomb.folder, "happened").exists():
            assert time.monotonic() < until
            os.sched_yield()
        if bomb.how == "exception":
            assert group.ping() == [0, 1], "an exception in a thread of its own ends no worker"
        while bomb.how != "exception":
            group.ping()
    elif bomb.phase == "collective":
        group.reduce(bomb)
    else:
        group.work(bomb)


def bound_s(phase: str, how: str) -> float:
    if phase == "shutdown":
        return GRACE_S + SLACK_S
    if how == "SIGSTOP":
        return SLACK_S + (START_S + STOP_GRACE_S if phase == "before hello" else 3 * HEARTBEAT_S)
    return 1.0 + SLACK_S


def check_error(story: Story, phase: str, how: str) -> None:
    if phase == "shutdown" or (phase, how) == ("idle", "exception"):
        assert story.error is None
        return
    text = str(story.error)
    assert "rank 1" in text.splitlines()[0] or phase == "before hello"
    if phase == "before hello":
        assert isinstance(story.error, StartError)
        expected = ENDS | {"exception": "cannot be imported: RuntimeError", "SIGSTOP": "has not said hello"}
        assert re.search(rf"rank 1\b.*{expected[how]}", text)
        assert ("the process is stopped" in text) == (how == "SIGSTOP")
        assert (fault.TEXT in text) == (how == "exception")
    elif how == "exception":
        assert isinstance(story.error, RemoteError)
        assert fault.TEXT in text
        assert story.error.ranks == (1,)
        assert story.error.still_running == ((0,) if phase in ("compute", "collective") else ())
    else:
        assert isinstance(story.error, WorkerLostError)
        assert story.error.rank == 1
        assert ENDS[how] in text.splitlines()[0]
        assert ("the process is stopped" in text) == (how == "SIGSTOP")


def check_ends(story: Story, phase: str, how: str) -> None:
    ends = {end.rank: end for end in story.ends}
    assert set(ends) == {0, 1}, "both are reaped, and each is told once"
    end = ends[1]
    if how == "exception":
        assert (end.exit_code, end.signal) == (128 + signal.SIGTERM, None), (
            "the worker lives on until it is told to end"
        )
        assert (fault.TEXT in "\n".join(end.last_lines)) == (phase in ("idle", "shutdown")), "nobody else would tell it"
    elif how == "exit":
        assert (end.exit_code, end.signal) == (17, None)
    else:
        assert end.signal == "SIGKILL", "what is stopped is killed in the end"
    assert (end.silent_s is not None) == (how == "SIGSTOP" and phase != "shutdown")
