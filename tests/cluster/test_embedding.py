"""A driver inside somebody's program: in an event loop, in a notebook, beside other controllers and other runs."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from rpcrl import Controller, ResourcePool, WorkerGroup
from rpcrl.errors import ClosedError, UsageError
from rpcrl.runtime.controller import current_controller
from tests.cluster.group_workers import Concurrent, Toy

pytestmark = pytest.mark.cluster

ROOT = Path(__file__).parents[2]
WORKERS = """
from rpcrl import Worker, register

class Mine(Worker):
    @register
    def double(self, x: int) -> int:
        return 2 * x
"""
PROGRAM = """
from rpcrl import Controller, ResourcePool, Worker, WorkerGroup, register
from workers import Mine
with Controller() as controller:
    group = WorkerGroup(ResourcePool([2]), Mine)
    print("answer", group.double(21))
"""
NOTEBOOK = """
import sys, types
# As a kernel does: the cells run in a main module that has no file.
notebook = types.ModuleType("__main__")
sys.modules["__main__"] = notebook
for cell in sys.stdin.read().split("# %%"):
    exec(compile(cell, "<cell>", "exec"), notebook.__dict__)
"""


def run(arguments: list[str], cwd: Path, *, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        input=stdin,
        capture_output=True,
        text=True,
        timeout=90,
        env=os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"},
        check=False,
    )


def test_a_controller_inside_a_running_loop(tmp_path: Path) -> None:
    async def driver() -> list[object]:
        with Controller(log_dir=tmp_path) as controller:
            assert current_controller() is controller
            group = WorkerGroup(ResourcePool([2]), Toy, 1)
            awaited = await group.add.submit(1)
            together = await asyncio.gather(group.add.submit(2), group.echo.submit("x"))
            blocking = group.add(3)  # waits here, and the loop with it
            return [awaited, together, blocking]

    assert asyncio.run(driver()) == [[2, 2], [[3, 3], ["x", "x"]], [4, 4]]


def test_an_awaited_call_leaves_the_loop_to_others(ipc: Controller) -> None:
    """The first call ends only when the second is inside: a loop that waits for the first would never send it."""
    group = WorkerGroup(ResourcePool([1]), Concurrent)

    async def first() -> list[str]:
        return await group.meet.submit("first")

    async def second() -> list[str]:
        while (await group.seen.submit()) != [["enter first"]]:
            pass
        return await group.meet.submit("second")

    async def driver() -> list[list[str]]:
        return await asyncio.wait_for(asyncio.gather(first(), second()), 30)

    assert asyncio.run(driver()) == [["first"], ["second"]]


@pytest.mark.parametrize("arguments", [["-c", PROGRAM], ["-"], ["-i"], ["program.py"]], ids=lambda words: words[0])
def test_programs_without_a_file_or_a_guard_work_with_classes_of_a_module(tmp_path: Path, arguments: list[str]) -> None:
    (tmp_path / "workers.py").write_text(WORKERS)
    (tmp_path / "program.py").write_text(PROGRAM)
    stdin = PROGRAM + "\n" if arguments[0] in ("-", "-i") else ""
    done = run(arguments, tmp_path, stdin=stdin)
    assert done.returncode == 0, done.stderr
    assert "answer [42, 42]" in done.stdout, done.stdout + done.stderr


def test_a_notebook_works_with_classes_of_a_module(tmp_path: Path) -> None:
    (tmp_path / "workers.py").write_text(WORKERS)
    (tmp_path / "kernel.py").write_text(NOTEBOOK)
    cells = """
    from rpcrl import Controller, ResourcePool, WorkerGroup
    controller = Controller()
    # %%
    from workers import Mine
    group = WorkerGroup(ResourcePool([2]), Mine)
    # %%
    import asyncio
    async def cell():
        print("awaited", await group.double.submit(1), "blocking", group.double(2))
    asyncio.run(cell())  # a kernel runs every cell inside of its loop
    # %%
    controller.close()
    """
    done = run(["kernel.py"], tmp_path, stdin=textwrap.dedent(cells))
    assert done.returncode == 0, done.stderr
    assert "awaited [2, 2] blocking [4, 4]" in done.stdout


def test_a_class_or_function_of_a_notebook_cell_gets_a_message(tmp_path: Path) -> None:
    (tmp_path / "workers.py").write_text(WORKERS)
    (tmp_path / "kernel.py").write_text(NOTEBOOK)
    cells = f"""{WORKERS}
from rpcrl import Controller, ResourcePool, WorkerGroup
with Controller():
    try:
        WorkerGroup(ResourcePool([1]), Mine)
    except Exception as error:
        print(type(error).__name__, error)
    import workers
    group = WorkerGroup(ResourcePool([1]), workers.Mine)
    def mine(x):
        return x
    try:
        group.double(mine)
    except Exception as error:
        print(type(error).__name__, error)
    print("goes on", group.double(1))
"""
    done = run(["kernel.py"], tmp_path, stdin=cells)
    assert done.returncode == 0, done.stderr
    refused = [line for line in done.stdout.splitlines() if "put it into a .py file" in line]
    assert len(refused) == 2, done.stdout
    assert refused[0].startswith("UsageError worker class Mine")
    assert refused[1].startswith("EncodeError")
    assert "mine" in refused[1]
    assert "goes on [2]" in done.stdout


def test_two_controllers_in_one_process(tmp_path: Path) -> None:
    with Controller(log_dir=tmp_path / "a") as first, Controller(log_dir=tmp_path / "b") as second:
        newest, named = WorkerGroup(ResourcePool([1]), Toy), WorkerGroup(ResourcePool([1]), Toy, controller=first)
        assert newest.where()[0]["environment"]["RPCRL_RUN_ID"] == second.run_id
        assert named.where()[0]["environment"]["RPCRL_RUN_ID"] == first.run_id
        assert newest.where()[0]["pid"] != named.where()[0]["pid"]
        second.close()
        with pytest.raises(ClosedError, match=second.run_id):
            newest.inc()
        assert named.inc() == [1], "the other one goes on"
        assert current_controller() is first
        assert WorkerGroup(ResourcePool([1]), Toy, 5).add(1) == [6]
    with pytest.raises(UsageError, match="no controller is open"):
        current_controller()


@pytest.mark.parametrize("end", ["in order", "SIGKILL"])
def test_p27_two_runs_on_one_host_do_not_touch_each_other(tmp_path: Path, end: str) -> None:
    (tmp_path / "workers.py").write_text(WORKERS)
    program = """
from rpcrl import Controller, ResourcePool, WorkerGroup
from workers import Mine
with Controller() as controller:
    group = WorkerGroup(ResourcePool([2]), Mine)
    print("answer", group.double(21), flush=True)
    input()
print("ended", flush=True)
"""
    with Controller(log_dir=tmp_path / "logs") as controller:
        group = WorkerGroup(ResourcePool([2]), Toy)
        other = subprocess.Popen(
            [sys.executable, "-c", program],
            cwd=tmp_path,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"},
        )
        try:
            assert other.stdout is not None
            assert other.stdout.readline() == "answer [42, 42]\n"
            assert group.inc() == [1, 1]
            if end == "SIGKILL":
                other.kill()
            out, _ = other.communicate("\n", timeout=30)
            assert out == ("" if end == "SIGKILL" else "ended\n")
        finally:
            other.kill()
            other.wait()
        assert group.inc() == [2, 2], "the run that goes on still answers"
        assert WorkerGroup(ResourcePool([1]), Toy, 5).add(1) == [6], "and starts groups"
        assert Path(controller.address.removeprefix("ipc://")).exists(), "its sockets are its own"
