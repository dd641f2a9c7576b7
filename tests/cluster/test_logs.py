"""Where does the output of real workers go, and does a person find it?"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from rpcrl import Controller, ResourcePool, WorkerGroup
from rpcrl.errors import RemoteError, WorkerLostError
from tests.cluster.group_workers import FailsToBuild, Toy

pytestmark = pytest.mark.cluster

TEXT = "\n".join(f"step {number} loss 0.{number:04d}" for number in range(100))


def logs(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "rpcrl.cli.main", "logs", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)


def until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, what


@pytest.mark.parametrize(("console", "ranks"), [("default", [0]), ("all", list(range(8))), ("off", [])])
def test_p71_the_console_has_rank_0_and_the_warnings_of_all(tmp_path: Path, console: str, ranks: list[int]) -> None:
    lines: list[str] = []
    with Controller(log_dir=tmp_path, console=console, console_sink=lines.append) as controller:
        group = WorkerGroup(ResourcePool([8]), Toy)
        group.say(TEXT)
        group.complain("memory is short")
    shown = [line for line in lines if not line.startswith("[rpcrl]")]
    for rank in range(8):
        of_rank = [line.removeprefix(f"[Toy {rank}] ") for line in shown if line.startswith(f"[Toy {rank}] ")]
        told = TEXT.splitlines() if rank in ranks else []
        warned = [] if console == "off" else ["WARNING memory is short"]
        assert sorted(of_rank) == sorted(told + warned), f"rank {rank}"
        written = (tmp_path / f"Toy.rank{rank}.log").read_text().splitlines()
        assert written == [*TEXT.splitlines(), "WARNING memory is short"], "the file has all, whatever is shown"
    assert len(shown) == len(ranks) * 100 + (8 if console != "off" else 0)
    assert [line for line in lines if line.startswith("[rpcrl]")] == (
        []
        if console == "off"
        else [f"[rpcrl] run {controller.run_id}; complete output of the workers: {tmp_path} (`rpcrl logs` shows it)"]
    )


def test_p73_the_path_that_every_error_names_has_the_ranks_output(tmp_path: Path) -> None:
    with Controller(log_dir=tmp_path / "logs", console="off") as controller:
        group = WorkerGroup(ResourcePool([3]), Toy)
        group.say("so far so good")
        log = tmp_path / "logs" / "Toy.rank2.log"
        with pytest.raises(RemoteError, match="bad value on purpose") as raised:
            group.boom(2)
        assert f"\n  log: {log}\n" in str(raised.value)
        assert raised.value.log_path == str(log)
        with pytest.raises(WorkerLostError) as lost:
            group.die(2, "SIGKILL")
        assert lost.value.rank == 2
        assert f"log: {log}" in str(lost.value)
        assert "so far so good" in log.read_text()
        with pytest.raises(Exception, match=r"no such weights") as unbuilt:
            WorkerGroup(ResourcePool([2]), FailsToBuild, [1])
        assert str(tmp_path / "logs" / "FailsToBuild.rank1.log") in str(unbuilt.value)
        shown = logs("--rank", "2", "--tail", "1").stdout.splitlines()
    assert shown == [
        f"logs of run {controller.run_id} (it runs): {tmp_path / 'logs'}",
        "",
        f"[Toy 2] {log}",
        "  so far so good",
    ]
    assert "(it has ended)" in logs(controller.run_id).stdout


def test_p73_follow_shows_new_lines_and_new_groups_and_ends_with_the_run(tmp_path: Path) -> None:
    with Controller(log_dir=tmp_path, console="off") as controller:
        group = WorkerGroup(ResourcePool([2]), Toy)
        group.say("before")
        command = [sys.executable, "-u", "-m", "rpcrl.cli.main", "logs", controller.run_id, "--follow", "--tail", "1"]
        seen = tmp_path / "seen.txt"
        with seen.open("w") as stream:
            follower = subprocess.Popen(command, stdout=stream, stderr=subprocess.STDOUT)
        try:
            until(lambda: seen.read_text().count("  before\n") == 2, "the last lines")
            group.say("meanwhile")
            until(lambda: "[Toy 1] meanwhile\n" in seen.read_text(), "a new line")
            WorkerGroup(ResourcePool([1]), Toy, name="later").say("from another group")
            until(lambda: "[later 0] from another group\n" in seen.read_text(), "a new group")
            assert follower.poll() is None
            group.say("at the end")
            controller.close()
            assert follower.wait(timeout=30) == 0
        finally:
            follower.kill()
            follower.wait()
    text = seen.read_text()
    assert text.count("[Toy 0] at the end\n") == text.count("[Toy 1] at the end\n") == 1
    assert text.count("] meanwhile\n") == 2
