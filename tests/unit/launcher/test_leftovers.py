"""Are the processes and directories of a dead run found and removed, and those of another never touched?"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from rpcrl import env
from rpcrl.errors import UsageError
from rpcrl.leftovers import (
    OWNER_FILE,
    create_run_dir,
    descendants,
    find_processes,
    find_stale_runs,
    machine_id,
    remove_run_dir,
    start_ticks,
    sweep_processes,
    sweep_stale_runs,
)


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[bytes]]]:
    processes: list[subprocess.Popen[bytes]] = []
    yield processes
    for process in processes:
        process.kill()
        process.communicate()


def carrier(started: list[subprocess.Popen[bytes]], run_id: str, worker_id: str = "w", *command: str) -> int:
    variables = {**os.environ, env.RUN_ID: run_id, env.WORKER_ID: worker_id}
    process = subprocess.Popen(command or ("sleep", "600"), env=variables, stdout=subprocess.PIPE)
    started.append(process)
    return process.pid


def new_id() -> str:
    return uuid.uuid4().hex


def test_p27_only_processes_of_this_run_and_worker_are_killed(started) -> None:
    run, other = new_id(), new_id()
    first, second, foreign = carrier(started, run, "a"), carrier(started, run, "b"), carrier(started, other, "a")
    # An id that merely begins like ours is another run.
    longer = carrier(started, run + "0", "a")
    assert sorted(find_processes(run)) == sorted([first, second])
    assert sweep_processes(run, worker_id="a") == [first]
    assert started[0].wait() == -signal.SIGKILL
    assert [process.poll() for process in started[1:]] == [None, None, None]
    assert sweep_processes(run) == [second]
    assert find_processes(other) == [foreign]
    assert find_processes(run + "0") == [longer]


def test_a_sweep_takes_what_the_dying_have_started_and_spares_whom_it_is_told(started) -> None:
    run = new_id()
    pid = carrier(started, run, "a", "sh", "-c", "sleep 600 & echo $!; wait")
    assert started[0].stdout is not None
    below = int(started[0].stdout.readline())
    assert descendants(pid) == [below]
    assert sweep_processes(run, spare=(pid,)) == [below]
    assert sweep_processes(run, spare=(pid,)) == []


def test_a_process_that_cleared_its_environment_is_found_below_its_parent(started) -> None:
    run = new_id()
    pid = carrier(started, run, "a", "env", "-i", "/bin/sh", "-c", "sleep 600 & echo $!; wait")
    assert started[0].stdout is not None
    below = int(started[0].stdout.readline())
    assert find_processes(run) == []
    assert sweep_processes(run, tree_of=pid) == [below]


def test_start_ticks_tell_one_life_of_a_pid_from_another(started) -> None:
    pid = carrier(started, new_id())
    assert start_ticks(pid) == start_ticks(pid) != start_ticks(os.getpid())
    started[0].kill()
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert start_ticks(pid) is None, "a zombie is dead"


# ---- run directories ---------------------------------------------------------------------------------------------


def test_a_run_directory_is_private_and_goes_with_its_sockets(tmp_path: Path) -> None:
    run_dir = create_run_dir(new_id())
    assert run_dir.stat().st_mode & 0o777 == 0o700
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(run_dir / "c.sock"))
    (run_dir / "deep").mkdir()
    (run_dir / "deep" / "file").touch()
    assert remove_run_dir(run_dir) is True
    assert not run_dir.exists()
    assert remove_run_dir(run_dir) is False


def test_logs_inside_a_run_directory_are_kept(tmp_path: Path) -> None:
    run_dir = create_run_dir(new_id(), tmp_path / "run")
    logs = run_dir / "out" / "logs"
    logs.mkdir(parents=True)
    (logs / "a.log").touch()
    (run_dir / "out" / "other").touch()
    remove_run_dir(run_dir, keep=(logs,))
    assert sorted(path.relative_to(run_dir) for path in run_dir.rglob("*")) == [
        Path("out"),
        Path("out/logs"),
        Path("out/logs/a.log"),
    ]


def test_what_is_not_a_run_directory_is_never_removed(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    assert remove_run_dir(tmp_path) is False
    with pytest.raises(UsageError, match="not empty"):
        create_run_dir(new_id(), tmp_path)
    real = create_run_dir(new_id(), tmp_path / "real")
    (tmp_path / "link").symlink_to(real)
    assert remove_run_dir(tmp_path / "link") is False
    assert (tmp_path / "thesis.tex").exists()
    assert real.exists()


def test_two_runs_cannot_have_one_directory() -> None:
    run_id = new_id()
    run_dir = create_run_dir(run_id)
    with pytest.raises(FileExistsError):
        create_run_dir(run_id)
    remove_run_dir(run_dir)


def dead_run(parent: Path, started) -> tuple[str, Path]:
    """Make a run directory in a process that ends at once, as if its driver had been killed."""
    run_id = new_id()
    run_dir = parent / f"rpcrl-{run_id}"
    code = (
        "import sys; from pathlib import Path; from rpcrl.leftovers import create_run_dir;"
        "create_run_dir(sys.argv[1], Path(sys.argv[2]))"
    )
    subprocess.run([sys.executable, "-c", code, run_id, str(run_dir)], check=True)
    return run_id, run_dir


def test_the_next_start_removes_dead_runs_with_their_processes_and_leaves_living_ones(tmp_path: Path, started) -> None:
    run_id, run_dir = dead_run(tmp_path, started)
    pid = carrier(started, run_id)
    alive_id = new_id()
    alive = create_run_dir(alive_id, tmp_path / f"rpcrl-{alive_id}")
    carrier(started, alive_id)
    assert [path for path, _ in find_stale_runs(tmp_path)] == [run_dir]
    assert [owner.run_id for owner in sweep_stale_runs(tmp_path)] == [run_id]
    assert not run_dir.exists()
    assert started[0].wait() == -signal.SIGKILL
    assert started[0].pid == pid
    assert alive.exists()
    assert started[1].poll() is None
    remove_run_dir(alive)


@pytest.mark.parametrize(
    ("change", "stale"),
    [
        ({}, False),
        ({"start_ticks": 1}, True),
        ({"machine": "another-boot/1"}, True),
        ({"machine": "another-boot/1", "host": "elsewhere"}, False),
        ({"machine": machine_id().split("/")[0] + "/1", "start_ticks": 1}, False),
    ],
    ids=["alive", "pid used again", "before the last boot", "another host", "another container"],
)
def test_only_an_owner_that_can_be_seen_is_judged(tmp_path: Path, change: dict[str, object], stale: bool) -> None:
    run_dir = create_run_dir(new_id(), tmp_path / "rpcrl-x")
    path = run_dir / OWNER_FILE
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    assert bool(find_stale_runs(tmp_path)) is stale


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"pid": 1}'])
def test_a_broken_owner_file_is_left_alone(tmp_path: Path, text: str) -> None:
    create_run_dir(new_id(), tmp_path / "rpcrl-x").joinpath(OWNER_FILE).write_text(text)
    assert find_stale_runs(tmp_path) == []
