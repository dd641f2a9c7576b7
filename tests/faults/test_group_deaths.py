"""A worker raises, dies or never starts: the caller hears of it soon, with rank, role, cause and the remote story."""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from rpcrl import Controller, ResourcePool, WorkerGroup
from rpcrl.errors import AgentLostError, RemoteError, StartError, UnknownMethodError, WorkerLostError
from tests.cluster.group_workers import DiesInBuild, FailsToBuild, HangsInBuild, Toy

pytestmark = pytest.mark.cluster

BOUND_S = 1.0
"""From the end of the process to the failed call."""


@pytest.fixture
def controller(tmp_path: Path) -> Iterator[Controller]:
    with Controller(log_dir=tmp_path / "logs", start_timeout_s=60) as opened:
        yield opened


@pytest.mark.parametrize(
    ("how", "words"),
    [("exit", "exited with code 17"), ("SIGKILL", "killed by SIGKILL"), ("SIGSEGV", "killed by SIGSEGV")],
)
def test_p36_a_death_fails_the_call_within_a_second(controller: Controller, how: str, words: str, tmp_path: Path):
    group = WorkerGroup(ResourcePool([3]), Toy, name="actor")
    pids = [seat["pid"] for seat in group.where()]
    started = time.monotonic()
    with pytest.raises(WorkerLostError) as caught:
        group.die(1, how, str(tmp_path / "never"))
    took_s = time.monotonic() - started
    text = str(caught.value)
    assert took_s < BOUND_S, f"the death was noticed after {took_s:.2f} s"
    assert (caught.value.rank, caught.value.roles) == (1, ("actor",))
    assert f"rank 1 of group {group.name!r} (role actor, pid {pids[1]} on " in text
    assert words in text
    assert "during: actor.die on group" in text
    assert str(controller.log_dir) in text
    with pytest.raises(WorkerLostError, match="the group stays broken"):
        group.inc()
    ends = group.close()
    assert sorted(end.pid for end in ends) == sorted(pids)
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_survivors_in_a_collective_are_ended(controller: Controller):
    group = WorkerGroup(ResourcePool([3]), Toy)
    pids = [seat["pid"] for seat in group.where()]
    group.all_reduce()
    os.kill(pids[2], signal.SIGSTOP)  # so that the others wait in the collective
    future = group.all_reduce.submit()
    os.kill(pids[2], signal.SIGKILL)
    with pytest.raises((WorkerLostError, RemoteError)):
        future.result(20)
    ends = group.close()
    assert len(ends) == 3


def test_p31_odd_exceptions_keep_their_story(controller: Controller):
    group = WorkerGroup(ResourcePool([2]), Toy)
    with pytest.raises(RemoteError, match="code 7") as caught:
        group.boom(1, "keyword_only")
    assert caught.value.type_name.endswith("KeywordOnlyError")
    assert caught.value.rank == 1
    with pytest.raises(RemoteError, match="holds a lambda"):
        group.boom(0, "lambda")
    with pytest.raises(RuntimeError) as caught_huge:
        group.boom(0, "huge")
    assert len(str(caught_huge.value)) < 1_000_000
    with pytest.raises(RuntimeError, match="the outer one") as caught_nested:
        group.boom(0, "nested")
    assert isinstance(caught_nested.value, RemoteError)
    assert any("the inner one" in cause for cause in caught_nested.value.causes)
    assert "make_error" in str(caught_nested.value) or "boom" in str(caught_nested.value)
    with pytest.raises(ValueError, match="bad value on purpose"):
        group.boom(0)
    assert group.inc() == [1, 1], "the workers live on"


@pytest.mark.parametrize("kind", ["SystemExit", "KeyboardInterrupt"])
def test_a_methods_own_exit_is_an_error_of_the_call_and_not_the_workers_end(controller: Controller, kind: str):
    group = WorkerGroup(ResourcePool([2]), Toy)
    with pytest.raises(RemoteError) as caught:
        group.boom(1, kind)
    assert caught.value.type_name == kind
    assert not isinstance(caught.value, SystemExit | KeyboardInterrupt)
    assert "in boom" in str(caught.value)
    assert group.inc() == [1, 1]


def test_p32_an_attribute_error_inside_is_no_unknown_method(controller: Controller):
    group = WorkerGroup(ResourcePool([1]), Toy)
    with pytest.raises(RemoteError) as caught:
        group.boom(0, "AttributeError")
    assert isinstance(caught.value, AttributeError)
    assert not isinstance(caught.value, UnknownMethodError)
    text = str(caught.value)
    for part in (
        "Toy.boom",
        "rank 0",
        f"group {group.name!r}",
        "pid ",
        "call controller#",
        "in boom",
        "no attribute 'shape'",
    ):
        assert part in text, part
    with pytest.raises(UnknownMethodError) as unknown:
        group.no_such_method()
    assert not isinstance(unknown.value, RemoteError)


def test_p07_a_constructor_that_raises_is_reported_with_its_traceback(controller: Controller):
    with pytest.raises(StartError) as caught:
        WorkerGroup(ResourcePool([3]), FailsToBuild, [1, 2])
    text = str(caught.value)
    assert "ranks 1–2" in text
    assert "no such weights: /nowhere" in text
    assert "in __init__" in text


def test_p07_a_module_that_cannot_be_imported_is_reported(controller: Controller, tmp_path: Path, monkeypatch):
    module = tmp_path / "breaks_on_workers.py"
    module.write_text(
        "import os\n"
        "if 'RPCRL_WORKER_ID' in os.environ:\n"
        "    raise ImportError('libmissing.so.7: cannot open shared object file')\n"
        "from rpcrl import Worker\n"
        "class Model(Worker):\n"
        "    pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    from breaks_on_workers import Model

    started = time.monotonic()
    with pytest.raises(StartError, match=r"libmissing\.so\.7") as caught:
        WorkerGroup(ResourcePool([2]), Model)
    assert time.monotonic() - started < 20
    assert "ranks 0–1" in str(caught.value)
    assert "breaks_on_workers.py" in str(caught.value)


def test_a_death_while_building_is_reported(controller: Controller):
    with pytest.raises(StartError, match="exited with code 17"):
        WorkerGroup(ResourcePool([2]), DiesInBuild)


def test_a_rank_that_hangs_is_named_at_the_deadline(tmp_path: Path):
    with Controller(log_dir=tmp_path / "logs", start_timeout_s=6) as controller:
        with pytest.raises(StartError, match=r"did not start within 6 s") as caught:
            WorkerGroup(ResourcePool([2]), HangsInBuild, 1)
        text = str(caught.value)
        assert "rank 1" in text
        assert "building its roles" in text
        assert "rank 0" not in text
        assert controller.run_id


def test_p21_the_agent_is_killed(controller: Controller):
    group = WorkerGroup(ResourcePool([2]), Toy)
    pids = [seat["pid"] for seat in group.where()] + group.spawn_child()
    os.kill(controller._agent.pid, signal.SIGKILL)
    with pytest.raises(AgentLostError, match="killed by signal 9"):
        group.die(-1, "", "/never/there")
    _gone, alive = psutil.wait_procs([psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)], timeout=5)
    assert alive == []


def test_p21_a_dead_workers_children_are_ended(controller: Controller):
    group = WorkerGroup(ResourcePool([2]), Toy)
    children = group.spawn_child()
    with pytest.raises(WorkerLostError):
        group.die(0, "SIGKILL", "/never/there")
    _gone, alive = psutil.wait_procs([psutil.Process(pid) for pid in children if psutil.pid_exists(pid)], timeout=5)
    assert alive == []


def test_p29_a_forked_child_is_told_and_the_parent_is_unaffected(controller: Controller):
    group = WorkerGroup(ResourcePool([1]), Toy)
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            group.inc()
            os.write(write_end, b"no error")
        except BaseException as error:
            os.write(write_end, f"{type(error).__name__}: {error}".encode())
        finally:
            os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end) as pipe:
        answered, _, _ = select.select([pipe], [], [], 20)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        text = pipe.read() if answered else "the forked child hangs"
    assert text.startswith("UsageError")
    assert "fork" in text
    assert group.inc() == [1]
