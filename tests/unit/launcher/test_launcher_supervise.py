"""Are workers started, heard, ended and cleared away as promised? With real processes and no network."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from launcher.output import LAST_LINES
from launcher.plan import Node, ProcessSpec, plan_workers
from launcher.supervise import Supervisor
from launcher.sweep import become_subreaper
from rpcrl import env
from rpcrl.leftovers import find_processes, start_ticks, sweep_processes
from rpcrl.wire.messages import Message, StartWorkers, WorkerExited, WorkerOutput, WorkerStart, WorkerStarted

WORKER = "tests.cluster.small_worker"


class Bench:
    """A supervisor, the messages that it reported, and a loop that runs until a condition holds."""

    def __init__(self, log_dir: Path, console: str = "default") -> None:
        self.run_id = uuid.uuid4().hex
        self.log_dir = log_dir
        self.selector = selectors.DefaultSelector()
        self.messages: list[Message] = []
        self.room = True
        self.supervisor = Supervisor(
            self.selector,
            self._report,
            run_id=self.run_id,
            host="here",
            console=console,
            console_has_room=lambda: self.room,
        )

    def _report(self, message: Message) -> None:
        self.messages.append(message)
        if isinstance(message, WorkerStarted):
            # In place of SIGCHLD, which belongs to pytest here.
            handle = os.pidfd_open(message.pid)
            self.selector.register(handle, selectors.EVENT_READ, lambda: self._ended(handle))

    def _ended(self, handle: int) -> None:
        self.selector.unregister(handle)
        os.close(handle)
        self.supervisor.reap()

    def specs(self, *steps_by_rank: list[list[object]], module: str = WORKER, **changes: object) -> list[ProcessSpec]:
        count = len(steps_by_rank)
        workers = tuple(
            WorkerStart(f"g-{rank}", rank, count, 0, rank, count, rank, (), json.dumps({"steps": steps}).encode())
            for rank, steps in enumerate(steps_by_rank)
        )
        node = Node(self.run_id, str(self.log_dir), sys.executable, os.getpid(), dict(os.environ))
        return plan_workers(StartWorkers("g", module, "cpu", workers), node)

    def start(self, *steps_by_rank: list[list[object]], module: str = WORKER) -> None:
        self.supervisor.start(self.specs(*steps_by_rank, module=module))

    def until(self, condition: Callable[[], object], within_s: float = 20.0) -> None:
        deadline = time.monotonic() + within_s
        while not condition():
            left = deadline - time.monotonic()
            assert left > 0, f"not within {within_s} s; messages: {self.messages}"
            due = self.supervisor.next_deadline_s()
            wait = left if due is None else min(left, max(0.0, due - time.monotonic()))
            for key, _ in self.selector.select(wait):
                if key.fileobj in self.selector.get_map():
                    key.data()
            self.supervisor.on_time()

    def exits(self) -> dict[str, WorkerExited]:
        return {message.identity: message for message in self.messages if isinstance(message, WorkerExited)}

    def lines(self, identity: str = "g-0") -> list[str]:
        outputs = [message for message in self.messages if isinstance(message, WorkerOutput)]
        return [line for message in outputs if message.identity == identity for line in message.lines]

    def log(self, rank: int = 0) -> bytes:
        return (self.log_dir / f"g.rank{rank}.log").read_bytes()

    def close(self) -> None:
        self.supervisor.kill_all()
        with contextlib.suppress(ChildProcessError):
            while self.supervisor.running:
                os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
                self.supervisor.reap()
        for key in list(self.selector.get_map().values()):
            os.close(key.fd)
        self.selector.close()


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path)
    yield bench
    bench.close()


def test_a_worker_gets_its_seat_three_descriptors_and_a_group_of_its_own(bench: Bench) -> None:
    bench.start([["report"]], [])
    bench.until(lambda: len(bench.exits()) == 2)
    facts = json.loads(bench.lines()[0].removeprefix("REPORT "))
    assert facts["main"] is True
    # 3 was the bootstrap, read and closed; the listing itself takes the lowest free number.
    assert facts["fds"] == [0, 1, 2, 3]
    assert facts["pid"] == facts["session"] == facts["group"]
    assert facts["parent"] == os.getpid()
    assert facts["sigint"] is True
    assert facts["stdin"] == os.devnull
    assert facts["argv"][0].endswith("small_worker.py")
    assert (facts["environment"]["WORLD_SIZE"], facts["environment"][env.WORKER_ID]) == ("2", "g-0")


def test_a_bootstrap_larger_than_a_pipe_arrives_whole(bench: Bench) -> None:
    bench.start([["print", "y" * 1000]] * 1500 + [["exit", 0]])
    bench.until(bench.exits)
    assert len(bench.log()) == 1500 * 1001


@pytest.mark.parametrize(
    ("step", "code", "name", "last"),
    [
        (["exit", 17], 17, None, "before"),
        (["segfault"], None, "SIGSEGV", "tests/cluster/small_worker.py"),
        (["kill_self", "SIGKILL"], None, "SIGKILL", "before"),
        (["limit_memory"], 1, None, "MemoryError"),
        (["raise", "no luck"], 1, None, "RuntimeError: no luck"),
    ],
)
def test_p09_p36_each_end_is_told_apart(bench: Bench, step: list[object], code: int, name: str, last: str) -> None:
    bench.start([["print", "before"], step])
    bench.until(bench.exits)
    exit_ = bench.exits()["g-0"]
    assert (exit_.exit_code, exit_.signal, exit_.host, exit_.start_error) == (code, name, "here", "")
    assert any(last in line for line in exit_.last_lines)
    assert 1 << 20 < exit_.peak_rss_bytes < 1 << 31
    assert exit_.out_of_memory is False
    assert exit_.log_path == str(bench.log_dir / "g.rank0.log")


def test_p09_a_kill_while_the_kernel_counts_one_is_called_out_of_memory(bench: Bench, monkeypatch) -> None:
    counts = iter([4, 5])
    monkeypatch.setattr("launcher.supervise.count_oom_kills", lambda: next(counts))
    bench.start([["kill_self", "SIGKILL"]])
    bench.until(bench.exits)
    assert bench.exits()["g-0"].out_of_memory is True


def test_the_last_lines_arrive_with_the_end_also_a_partial_one(bench: Bench) -> None:
    bench.start([["print", "\n".join(str(number) for number in range(100))], ["fill", 7, 7], ["kill_self", "SIGKILL"]])
    bench.until(bench.exits)
    expected = [*(str(number) for number in range(100)), "xxxxxxx"]
    assert bench.exits()["g-0"].last_lines == tuple(expected[-LAST_LINES:])
    assert bench.lines() == expected
    assert bench.messages[-1] == bench.exits()["g-0"], "the console hears the last words before the end"


def test_p07_a_module_that_does_not_exist_is_a_start_error(bench: Bench) -> None:
    bench.start([], module="tests.no_such_module")
    bench.until(bench.exits)
    assert "no module named 'tests.no_such_module'" in bench.exits()["g-0"].start_error
    assert bench.exits()["g-0"].exit_code == 127


def test_p07_a_parent_package_that_fails_to_import_is_a_start_error(bench: Bench) -> None:
    bench.start([], module="tests.cluster.small_worker.inner")
    bench.until(bench.exits)
    assert "ModuleNotFoundError" in bench.exits()["g-0"].start_error


def test_a_command_that_cannot_be_executed_is_a_start_error_and_the_others_start(bench: Bench) -> None:
    import dataclasses

    bad, good = bench.specs([], [["exit", 3]])
    bench.supervisor.start([dataclasses.replace(bad, argv=("/no/python",)), good])
    bench.until(lambda: len(bench.exits()) == 2)
    assert "FileNotFoundError" in bench.exits()["g-0"].start_error
    assert bench.exits()["g-1"].exit_code == 3


def test_one_identity_runs_once(bench: Bench) -> None:
    bench.start([["wait"]])
    bench.start([["wait"]])
    assert "already runs" in bench.exits()["g-0"].start_error
    assert bench.supervisor.running == ["g-0"]


# ---- ends --------------------------------------------------------------------------------------------------------


def test_stop_is_sigterm_and_only_for_those_named(bench: Bench) -> None:
    bench.start([["wait"]], [["wait"]])
    bench.supervisor.stop(("g-1", "unknown"), grace_s=10)
    bench.until(bench.exits)
    assert bench.exits()["g-1"].signal == "SIGTERM"
    assert bench.supervisor.running == ["g-0"]


def test_p22_a_worker_that_ignores_sigterm_is_killed_with_a_warning(bench: Bench) -> None:
    bench.start([["ignore_sigterm"], ["print", "deaf"], ["wait"]])
    bench.until(bench.lines)
    before = time.monotonic()
    bench.supervisor.stop(None, grace_s=0.2)
    bench.until(bench.exits)
    assert time.monotonic() - before < 2
    exit_ = bench.exits()["g-0"]
    assert exit_.signal == "SIGKILL"
    assert "did not end within 0.2 s of SIGTERM" in exit_.last_lines[-1]
    assert "did not end within 0.2 s of SIGTERM" in bench.lines()[-1]


@pytest.mark.parametrize("how", ["plain", "session"])
def test_p21_what_a_worker_has_started_goes_with_it(bench: Bench, how: str) -> None:
    bench.start([["grandchild", how], ["exit", 0]], [["grandchild", how], ["print", "WARNING up"], ["wait"]])
    bench.until(lambda: bench.exits() and bench.lines("g-1"))
    grandchild = int(bench.lines("g-0")[0].removeprefix("GRANDCHILD "))
    # It kept the output pipe open: the end was reported all the same, and it was gone by then.
    assert start_ticks(grandchild) is None
    # The other worker and its own grandchild are untouched.
    assert bench.supervisor.running == ["g-1"]
    assert len(find_processes(bench.run_id, worker_id="g-1")) == 2
    bench.supervisor.stop(None, grace_s=5)
    bench.until(lambda: len(bench.exits()) == 2)
    assert find_processes(bench.run_id) == []


def test_what_left_its_environment_and_session_is_swept_at_the_end_of_the_run(tmp_path: Path) -> None:
    # In a process of its own: being a subreaper cannot be taken back.
    code = (
        "import os, sys; from pathlib import Path;"
        "from tests.unit.launcher.test_launcher_supervise import sweep_bare_grandchild;"
        "sweep_bare_grandchild(Path(sys.argv[1]))"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)


def sweep_bare_grandchild(log_dir: Path) -> None:
    become_subreaper()
    bench = Bench(log_dir)
    bench.start([["grandchild", "bare"], ["exit", 0]])
    bench.until(bench.exits)
    grandchild = int(bench.lines("g-0")[0].removeprefix("GRANDCHILD "))
    assert find_processes(bench.run_id) == []
    assert start_ticks(grandchild) is not None
    assert sweep_processes(bench.run_id, tree_of=os.getpid()) == [grandchild]
    bench.supervisor.reap()
    with contextlib.suppress(ChildProcessError):
        os.waitpid(grandchild, 0)
        raise AssertionError("the orphan was not reaped")
    bench.close()


def test_an_end_is_reported_within_a_second(bench: Bench) -> None:
    bench.start(*[[["wait"]] for _ in range(4)])
    pids = [message.pid for message in bench.messages if isinstance(message, WorkerStarted)]
    before = time.monotonic()
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    bench.until(lambda: len(bench.exits()) == 4)
    assert time.monotonic() - before < 1.0


# ---- output ------------------------------------------------------------------------------------------------------


def test_p69_fifty_megabytes_go_through_while_the_console_is_stuck(bench: Bench) -> None:
    bench.room = False
    bench.start([["fill", 50 << 20, 50 << 20], ["print", ""], ["fill", 1 << 20, 63], ["exit", 0]])
    bench.until(bench.exits, within_s=60)
    assert len(bench.log()) == (50 << 20) + 1 + (1 << 20)
    lines = bench.lines()
    assert len(lines) <= 1001
    assert "lines are left out here because the console fell behind" in lines[-1]
    assert str(bench.log_dir / "g.rank0.log") in lines[-1]
    assert sum(map(len, lines)) < 300_000
    assert max(len(line) for line in bench.exits()["g-0"].last_lines) < 5000


def test_p70_p71_each_ranks_file_is_complete_and_the_console_has_rank_0(bench: Bench) -> None:
    text = [f"loss 0.1234 rank {rank}\nWARNING: from {rank}" for rank in range(3)]
    bench.start(*[[["print", line]] for line in text])
    bench.until(lambda: len(bench.exits()) == 3)
    assert [bench.log(rank).decode().strip() for rank in range(3)] == text
    assert [bench.lines(f"g-{rank}") for rank in range(3)] == [
        ["loss 0.1234 rank 0", "WARNING: from 0"],
        ["WARNING: from 1"],
        ["WARNING: from 2"],
    ]


def test_a_worker_whose_agent_is_another_ends_itself(tmp_path: Path) -> None:
    variables = {**os.environ, env.PARENT_PID: "1" if os.getpid() != 1 else "2"}
    done = subprocess.run([sys.executable, "-m", "launcher.shim", WORKER], env=variables, timeout=30)
    assert done.returncode == 127
