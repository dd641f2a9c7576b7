"""Does an agent obey its controller and leave nothing? With real processes over the real transport."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rpcrl import env
from rpcrl.leftovers import find_processes, start_ticks
from rpcrl.wire.messages import Call, CallId, Encoded, WorkerExited, WorkerOutput, WorkerStarted
from tests.cluster.fake_controller import FakeController

pytestmark = pytest.mark.cluster


@contextlib.contextmanager
def running(tmp_path: Path, **options) -> Iterator[FakeController]:
    """A run that ends in order, with everything gone that must go and the logs kept."""
    controller = FakeController(None, tmp_path, **options)
    try:
        yield controller
        assert controller.close() == 0
    finally:
        controller.release()
        controller.listener.close()
    assert find_processes(controller.run_id) == []
    assert not controller.run_dir.exists()


def report(controller: FakeController, identity: str = "g-0") -> dict[str, object]:
    controller.until(lambda: any(line.startswith("REPORT ") for line in controller.lines(identity)))
    line = next(line for line in controller.lines(identity) if line.startswith("REPORT "))
    return json.loads(line.removeprefix("REPORT "))


@pytest.mark.parametrize("tcp", [False, True], ids=["ipc", "tcp"])
def test_the_life_of_a_group(tmp_path: Path, tcp: bool) -> None:
    with running(tmp_path, tcp=tcp) as controller:
        controller.start([["print", "hello"], ["wait"]], [["print", "hidden"], ["exit", 3]])
        controller.until(lambda: controller.lines() and controller.exits())
        hello = controller.hello()
        assert hello is not None
        assert (hello.kind, hello.pid, hello.devices) == ("agent", controller.process.pid, ())
        assert (hello.identity, hello.incarnation) == (controller.identity, "1")
        assert controller.exits()["g-1"].exit_code == 3
        assert controller.lines("g-1") == []
        controller.stop("g-0", grace_s=10.0)
        controller.until(lambda: "g-0" in controller.exits())
        assert controller.exits()["g-0"].signal == "SIGTERM"
    kinds = [type(message) for message in controller.messages]
    assert kinds[1:3] == [WorkerStarted, WorkerStarted]
    assert set(kinds[3:]) == {WorkerOutput, WorkerExited}
    assert (tmp_path / "g.rank1.log").read_text() == "hidden\n"


def test_shutdown_ends_all_workers_and_reports_them(tmp_path: Path) -> None:
    with running(tmp_path) as controller:
        controller.start([["grandchild", "session"], ["wait"]], [["ignore_sigterm"], ["print", "ERROR deaf"], ["wait"]])
        controller.until(lambda: controller.grandchildren() and controller.lines("g-1"))
        (grandchild,) = controller.grandchildren()
        assert start_ticks(grandchild) is not None
        before = time.monotonic()
    assert time.monotonic() - before < 5
    assert start_ticks(grandchild) is None
    assert {name: exit_.signal for name, exit_ in controller.exits().items()} == {"g-0": "SIGTERM", "g-1": "SIGKILL"}
    assert "did not end within 1 s of SIGTERM" in controller.exits()["g-1"].last_lines[-1]


def test_p07_a_bad_module_and_a_worker_that_raises_are_known_in_seconds(tmp_path: Path) -> None:
    with running(tmp_path) as controller:
        before = time.monotonic()
        controller.start([], [], name="bad", module="no.such.module")
        controller.start([], [["raise", "at import"], []])
        controller.until(lambda: len(controller.exits()) == 4, within_s=10)
        assert time.monotonic() - before < 10
        for rank in range(2):
            assert "'no.such.module' cannot be imported" in controller.exits()[f"bad-{rank}"].start_error
        failed = controller.exits()["g-1"]
        assert (failed.exit_code, failed.start_error) == (1, "")
        assert failed.last_lines[0] == "Traceback (most recent call last):"
        assert failed.last_lines[-1] == "RuntimeError: at import"
        # A rank that is not 0 shows its traceback on the console as well.
        assert controller.lines("g-1") == list(failed.last_lines)


def test_a_group_with_mistakes_is_not_started_and_each_worker_says_all_of_them(tmp_path: Path) -> None:
    with running(tmp_path, variables={env.VISIBLE_DEVICES: "7"}) as controller:
        controller.start([], [], device="cuda", environment={"RANK": "0", "MASTER_PORT": "1"})
        controller.until(lambda: len(controller.exits()) == 2)
        assert controller.started() == {}
        for exit_ in controller.exits().values():
            for part in ("environment['RANK']", "environment['MASTER_PORT']", f"{env.VISIBLE_DEVICES}='7'", "rank 1"):
                assert part in exit_.start_error


def test_p40_workers_get_the_entries_of_a_list_that_does_not_begin_at_zero(tmp_path: Path) -> None:
    with running(tmp_path, variables={env.VISIBLE_DEVICES: "3,MIG-b"}, device="cuda", console="all") as controller:
        controller.start([["report"]], [["report"]], device="cuda")
        given = [report(controller, f"g-{rank}")["environment"][env.VISIBLE_DEVICES] for rank in range(2)]
        assert given == ["3", "MIG-b"]
        hello = controller.hello()
        assert hello is not None
        assert hello.devices == ("3", "MIG-b")


def test_a_worker_inherits_no_descriptor_no_signal_setting_and_no_launcher_variable(tmp_path: Path) -> None:
    outer = {"TORCHELASTIC_RUN_ID": "x", "SLURM_PROCID": "1", "MASTER_ADDR": "10.0.0.1", "KEPT": "yes"}
    with running(tmp_path, variables=outer) as controller:
        controller.start([["report"], ["wait"]])
        facts = report(controller)
        assert facts["fds"] == [0, 1, 2, 3]
        assert facts["sigint"] is True
        assert facts["parent"] == controller.process.pid
        assert facts["session"] == facts["pid"] == facts["group"]
        variables = facts["environment"]
        assert isinstance(variables, dict)
        assert [name for name in outer if name in variables] == ["KEPT"]
        assert variables[env.RUN_ID] == controller.run_id


def test_p25_an_interrupt_does_not_reach_the_workers_through_the_agent(tmp_path: Path) -> None:
    with running(tmp_path) as controller:
        controller.start([["print", "up"], ["wait"]])
        controller.until(controller.lines)
        assert os.getsid(controller.process.pid) == controller.process.pid
        for _ in range(3):
            os.kill(controller.process.pid, signal.SIGINT)
        controller.start([["exit", 5]], name="later")
        controller.until(controller.exits)
        assert list(controller.exits()) == ["later-0"]


def test_p27_ending_one_run_does_not_touch_the_other(tmp_path: Path) -> None:
    with running(tmp_path / "a") as first:
        first.start([["grandchild", "session"], ["wait"]])
        first.until(first.grandchildren)
        with running(tmp_path / "b") as second:
            second.start([["grandchild", "session"], ["wait"]])
            second.until(second.grandchildren)
        assert start_ticks(first.grandchildren()[0]) is not None
        first.start([["print", "still here"], ["exit", 0]], name="late")
        first.until(lambda: first.lines("late-0"))
        assert list(first.exits()) in ([], ["late-0"])


def test_p69_a_controller_that_does_not_read_costs_no_worker_its_speed(tmp_path: Path) -> None:
    total = 60 << 20
    with running(tmp_path) as controller:
        controller.start([["fill", total, 100], ["exit", 0]])
        controller.until(controller.started)
        (pid,) = controller.started().values()
        handle = os.pidfd_open(pid)
        # Nothing is received meanwhile.
        ended = select.select([handle], [], [], 60)[0]
        os.close(handle)
        assert ended, "the worker is blocked"
        rss_kb = (
            int(Path(f"/proc/{controller.process.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 10
        )
        assert rss_kb < 200 << 10
        controller.until(controller.exits)
        lines = controller.lines()
        assert "left out here because the console fell behind" in " ".join(lines)
        assert str(tmp_path / "g.rank0.log") in " ".join(lines)
        assert (tmp_path / "g.rank0.log").stat().st_size == total // 101 * 101


def test_p71_eight_ranks_a_hundred_lines_each(tmp_path: Path) -> None:
    text = "\n".join(f"step {number} loss 0.{number:04d}" for number in range(100))
    with running(tmp_path) as controller:
        controller.start(*[[["print", text], ["exit", 0]] for _ in range(8)])
        controller.until(lambda: len(controller.exits()) == 8)
        assert controller.lines("g-0") == text.splitlines()
        assert [controller.lines(f"g-{rank}") for rank in range(1, 8)] == [[]] * 7
        assert {(tmp_path / f"g.rank{rank}.log").read_text() for rank in range(8)} == {text + "\n"}


def test_console_off_shows_nothing_and_the_log_has_it(tmp_path: Path) -> None:
    with running(tmp_path, console="off") as controller:
        controller.start([["print", "ERROR quiet"], ["exit", 0]])
        controller.until(controller.exits)
        assert controller.exits()["g-0"].last_lines == ("ERROR quiet",)
    assert controller.lines() == []


def test_a_message_that_is_not_for_agents_is_dropped(tmp_path: Path) -> None:
    with running(tmp_path) as controller:
        controller.until(controller.hello)
        controller.listener.send(controller.identity, [b"\x01nonsense"])
        controller.send(Call(CallId("controller", "1", 1), "r", "m", Encoded(b"\x90")))
        controller.start([["exit", 0]])
        controller.until(controller.exits)


def test_an_agent_that_is_not_let_in_says_so_and_leaves_nothing(tmp_path: Path, capfd) -> None:
    controller = FakeController(None, tmp_path, tcp=True, admit=False)
    try:
        assert controller.process.wait(timeout=20) == 1
        assert not controller.run_dir.exists()
    finally:
        controller.close()
    error = capfd.readouterr().err
    assert "AuthenticationError" in error
    assert str(controller.bootstrap["keys"]["secret"]) not in error


def test_sigterm_ends_an_agent_in_order(tmp_path: Path) -> None:
    with running(tmp_path) as controller:
        controller.start([["wait"]])
        controller.until(controller.started)
        controller.process.terminate()
        assert controller.process.wait(timeout=20) == 0
        controller.until(controller.exits)


@pytest.mark.parametrize("variables", [{}, {env.BOOTSTRAP_FD: "0"}, {env.BOOTSTRAP_FD: "987"}, {env.BOOTSTRAP_FD: "x"}])
def test_without_a_bootstrap_the_agent_says_who_starts_it(variables: dict[str, str]) -> None:
    clean = {name: value for name, value in os.environ.items() if name != env.BOOTSTRAP_FD}
    done = subprocess.run(
        [sys.executable, "-m", "launcher"],
        input="{}",
        env={**clean, **variables},
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.returncode == 2
    assert "bootstrap" in done.stderr or "started by rpcrl" in done.stderr
    assert "Traceback" not in done.stderr
