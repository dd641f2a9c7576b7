"""Many things go wrong at once: the one that went wrong first is told first, with what the reader needs."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from rpcrl import Controller, ResourcePool, WorkerGroup
from rpcrl.errors import CallTimeoutError, RemoteError, StartError, UsageError, WorkerLostError
from rpcrl.topology import ResourcePoolManager
from tests.cluster.group_workers import FailsToBuild, Hungry, Meeting, StopsInBuild, Toy

pytestmark = pytest.mark.cluster

BOUND_S = 2.0
"""From a failure to the failed call, on a busy machine: a death is told in one second, and so is an exception."""


@pytest.fixture
def controller(tmp_path: Path) -> Iterator[Controller]:
    with Controller(log_dir=tmp_path / "logs") as opened:
        yield opened


def wait_for_files(*paths: Path, within_s: float = 30.0) -> None:
    until = time.monotonic() + within_s
    while not all(path.exists() for path in paths):
        assert time.monotonic() < until, paths
        os.sched_yield()


def test_p01_a_rank_is_killed_while_the_others_reduce(controller: Controller, tmp_path: Path):
    group = WorkerGroup(ResourcePool([4]), Meeting, name="actor")
    pids = group.join()
    future = group.reduce.submit(str(tmp_path), 2, "ignore")
    wait_for_files(*[tmp_path / str(rank) for rank in (0, 1, 3)])
    started = time.monotonic()
    os.kill(pids[2], signal.SIGKILL)
    with pytest.raises(WorkerLostError) as caught:
        future.result(30)
    assert time.monotonic() - started < BOUND_S
    assert (caught.value.rank, caught.value.exits[0].signal) == (2, "SIGKILL")
    assert "rank 2 of group 'actor'" in str(caught.value).splitlines()[0]
    with pytest.raises(WorkerLostError, match="the group stays broken"):
        group.join()
    assert len(group.close()) == 4
    assert not any(psutil.pid_exists(pid) for pid in pids), "the survivors' collective has ended with them"


def test_p08_what_was_raised_first_is_on_top_and_who_waits_for_it_is_named(controller: Controller, tmp_path: Path):
    group = WorkerGroup(ResourcePool([4]), Meeting)
    pids = group.join()
    started = time.monotonic()
    with pytest.raises(ValueError, match="the reason why nobody else gets on") as caught:
        group.reduce(str(tmp_path), 3, "raise")
    assert time.monotonic() - started < BOUND_S
    assert isinstance(caught.value, RemoteError)
    assert (caught.value.rank, caught.value.still_running) == (3, (0, 1, 2))
    assert "ranks 0–2 had not ended" in str(caught.value)
    assert len(group.close(grace_s=0.5)) == 4, "whoever waited for it is ended"
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_p08_a_dead_rank_is_the_cause_and_its_peers_complaints_are_consequences(
    controller: Controller, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Which of the two is heard first depends on the machine, so the rank dies only when both complaints are there."""
    monkeypatch.setattr("rpcrl.runtime.failed_calls.GRACE_S", 30.0)
    group = WorkerGroup(ResourcePool([3]), Meeting)
    group.join()
    future = group.reduce.submit(str(tmp_path), 1, "leave")
    held_back = controller._hub._caller._failed._failed
    until = time.monotonic() + 20.0
    while not any(len(failed.errors) == 2 for failed in list(held_back.values())):
        assert time.monotonic() < until, "both survivors complain that the connection was closed"
        os.sched_yield()
    (tmp_path / "go").touch()
    with pytest.raises(WorkerLostError) as caught:
        future.result(20)
    text = str(caught.value)
    assert "rank 1 " in text.splitlines()[0]
    assert "exited with code 17" in text.splitlines()[0]
    assert text.index("exited with code 17") < text.index("consequences")
    complaints = [error for error in caught.value.raised if {0, 2} & set(error.ranks)]
    assert complaints, "gloo tells the survivors that a peer is gone"
    assert "Connection closed by peer" in text.partition("consequences")[2]


def test_p09_four_ends_have_four_messages(controller: Controller):
    texts = {}
    for how in ("exit", "SIGSEGV", "SIGKILL"):
        group = WorkerGroup(ResourcePool([2]), Toy)
        for number in range(60):
            group.say(f"line {number}")
        with pytest.raises(WorkerLostError) as lost:
            group.die(1, how)
        texts[how] = str(lost.value)
        assert re.search(r"peak memory \d{2,} MiB", texts[how])
        assert "line 59" in texts[how]
        assert len(lost.value.exits[0].last_lines) == 50
        group.close()
    group = WorkerGroup(ResourcePool([2]), Hungry)
    with pytest.raises(MemoryError) as caught:
        group.eat(1, 1 << 30)
    texts["memory"] = str(caught.value)
    assert group.eat(1, 1 << 10) == [0, 1 << 10], "the worker lives on"
    assert "exited with code 17" in texts["exit"]
    assert "killed by SIGSEGV" in texts["SIGSEGV"]
    assert "Fatal Python error: Segmentation fault" in texts["SIGSEGV"]
    assert "in die" in texts["SIGSEGV"], "the stack at the fault"
    assert "killed by SIGKILL; SIGKILL often means" in texts["SIGKILL"]
    assert "raised MemoryError on rank 1" in texts["memory"]


@pytest.mark.parametrize("victim", ["the small one", "the large one"])
def test_p65_when_a_worker_is_killed_the_largest_of_its_machine_is_named(controller: Controller, victim: str):
    """The kernel that runs out of memory takes the one it likes: the reader learns who has the memory."""
    judge = WorkerGroup(ResourcePool([2]), Hungry, name="judge")
    actor = WorkerGroup(ResourcePool([1]), Hungry, name="actor")
    (small, _), (large, held) = judge.hold(1, 256 << 20)
    ((other, _),) = actor.hold(0, 0)
    assert held == 256 << 20
    group, rank, pid = (actor, 0, other) if victim == "the small one" else (judge, 1, large)
    with pytest.raises(WorkerLostError) as caught:
        group.die(rank)
    told = next(line for line in str(caught.value).splitlines() if "killed by SIGKILL" in line)
    assert f"rank {rank} of group {group.name!r}" in told
    assert f"pid {pid} " in told
    if victim == "the small one":
        found = re.search(
            rf"; the largest worker on \S+ is rank 1 of group 'judge' \(.*pid {large}\) with (\d+) MiB", told
        )
        assert "which was not killed" in told
        assert found is not None, told
        assert int(found[1]) > 256
    else:
        found = re.search(
            r"it was the largest worker on \S+; the next is rank 0 of group '(judge|actor)' .*pid (\d+)", told
        )
        assert found is not None, told
        assert int(found[2]) in (small, other)


def test_p34_a_constructors_traceback_is_in_the_message_and_in_the_log(controller: Controller):
    with pytest.raises(StartError) as caught:
        WorkerGroup(ResourcePool([3]), FailsToBuild, [1], name="loader")
    text = str(caught.value)
    assert "rank 1 (log of the first: " in text
    assert "in __init__" in text
    assert "RuntimeError: no such weights: /nowhere" in text
    logs = {path.name: path.read_text() for path in controller.log_dir.rglob("*") if path.is_file()}
    told = [name for name, content in logs.items() if "no such weights: /nowhere" in content]
    assert len(told) == 1, logs.keys()
    assert "in __init__" in logs[told[0]]
    assert told[0] in text


def test_p35_identical_errors_are_told_once_with_their_ranks(controller: Controller):
    group = WorkerGroup(ResourcePool([4]), Toy)
    with pytest.raises(ValueError, match="bad value on purpose") as caught:
        group.boom_on([1, 2, 3])
    assert isinstance(caught.value, RemoteError)
    assert set(caught.value.ranks) == {1, 2, 3}
    assert "raised ValueError on ranks 1–3 of group" in str(caught.value)
    assert caught.value.others == ()
    assert group.inc() == [1] * 4


def test_p35_different_errors_of_all_ranks_are_told(controller: Controller):
    group = WorkerGroup(ResourcePool([3]), Toy)
    with pytest.raises(RemoteError) as caught:
        group.boom_on([0, 1, 2], ["ValueError", "AttributeError", "ValueError"])
    told = [caught.value, *caught.value.others]
    assert {(error.type_name, tuple(sorted(error.ranks))) for error in told} == {
        ("ValueError", (0, 2)),
        ("AttributeError", (1,)),
    }


def test_p04_more_than_there_is_fails_in_seconds_and_says_what_is_missing(environment: dict[str, str], tmp_path: Path):
    environment["CUDA_VISIBLE_DEVICES"] = "0,1"
    with Controller(log_dir=tmp_path / "logs") as controller:
        started = time.monotonic()
        with pytest.raises(StartError) as caught:
            WorkerGroup(ResourcePool([4], device="cuda"), Toy, controller=controller)
        assert time.monotonic() - started < 10
        text = str(caught.value)
        assert "the group asks for 4 devices here" in text
        assert "this node has 2 (0, 1; from CUDA_VISIBLE_DEVICES='0,1')" in text
        assert psutil.Process(controller._agent.pid).children() == [], "nothing was started"


def test_p04_all_gaps_of_all_pools_are_told_at_once():
    with pytest.raises(UsageError) as caught:
        ResourcePoolManager(
            {"actor_pool": [3, 1], "reward_pool": [2]}, {"actor": "actor_pool"}, devices_on_nodes=[4], device="cuda"
        )
    text = str(caught.value)
    assert "node 0 has 4 devices, but the pools ask for 5 there: actor_pool 3, reward_pool 2" in text
    assert "node 1 has 0 devices, but the pools ask for 1 there: actor_pool 1" in text


def test_p04_the_start_deadline_says_which_rank_is_missing_and_that_it_is_stopped(tmp_path: Path):
    with Controller(log_dir=tmp_path / "logs", start_timeout_s=4.0, heartbeat_s=None) as controller:
        with pytest.raises(StartError, match=r"did not start within 4\.0 s") as caught:
            WorkerGroup(ResourcePool([2]), StopsInBuild, 1, controller=controller)
        text = str(caught.value)
        assert "rank 1, pid" in text
        assert "rank 0, pid" not in text
        assert "is building its roles" in text
        assert "the process is stopped" in text


def test_p17_a_rank_that_waits_in_a_barrier_for_ever_is_ended_step_by_step(tmp_path: Path):
    """SIGTERM does not reach a thread that is blocked in gloo: SIGKILL follows, and the agent says so."""
    lines: list[str] = []
    with Controller(log_dir=tmp_path / "logs", console_sink=lines.append) as controller:
        group = WorkerGroup(ResourcePool([2]), Meeting, controller=controller)
        pids = group.join()
        future = group.reduce.submit(str(tmp_path), 0, "ignore")
        wait_for_files(tmp_path / "0", tmp_path / "1")
        with pytest.raises(CallTimeoutError, match=r"no reply from ranks \[0, 1\] within 0\.5 s"):
            future.result(0.5)
        ends = {end.rank: end for end in group.close(grace_s=0.5)}
        assert (ends[0].signal, ends[1].signal) == ("SIGKILL", "SIGKILL")
        assert "did not end within 0.5 s of SIGTERM; sending SIGKILL" in "\n".join(ends[1].last_lines)
        assert not any(psutil.pid_exists(pid) for pid in pids)
    assert any("sending SIGKILL" in line for line in lines)
