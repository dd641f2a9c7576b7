"""Workers as threads of the driver's own process: what they can do, and what they refuse."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from rpcrl import ClassWithInitArgs, Controller, DataProto, ResourcePool, WorkerGroup
from rpcrl.errors import ClosedError, RemoteError, StartError, UsageError, WorkerLostError
from rpcrl.runtime.worker import context
from tests.cluster import thread_workers
from tests.cluster.peer_workers import Adder, Caller
from tests.cluster.thread_workers import FailsToBuild, Threaded, wait_until_ended


@pytest.fixture
def inproc() -> Iterator[Controller]:
    thread_workers.gate.clear()
    thread_workers.told.clear()
    thread_workers.ran.clear()
    try:
        with Controller(transport="inproc", start_timeout_s=60) as opened:
            yield opened
    finally:
        thread_workers.gate.set()


def test_each_worker_knows_its_own_rank_in_all_its_threads(inproc: Controller) -> None:
    first = WorkerGroup(ResourcePool([2, 1]), Threaded)
    second = WorkerGroup(ResourcePool([2]), Threaded)
    assert first.ranks() == [(0, 3, 0, 0), (1, 3, 0, 1), (2, 3, 1, 0)]
    assert second.ranks() == [(0, 2, 0, 0), (1, 2, 0, 1)]
    assert first.ranks_of_a_coroutine() == [[rank] * 3 for rank in range(3)]
    assert second.ranks_of_a_coroutine() == [[rank] * 3 for rank in range(2)]
    with pytest.raises(UsageError, match="this is no worker"):
        context()
    assert "not in a thread that a worker has started by itself" in second.rank_in_a_thread_of_its_own()[0]


def test_it_all_happens_in_this_process(inproc: Controller, capsys: pytest.CaptureFixture[str]) -> None:
    group = WorkerGroup(ResourcePool([2]), Threaded)
    idents = group.where()
    assert len({ident for ident, _ in idents} | {threading.get_ident()}) == 3
    assert {ident for ident, _ in idents} <= {thread.ident for thread in threading.enumerate()}
    assert idents == group.where(), "one thread for each worker's synchronous methods"
    group.say("printed where the driver prints")
    assert capsys.readouterr().out == "printed where the driver prints\n" * 2


def test_arguments_and_results_are_each_sides_own(inproc: Controller) -> None:
    group = WorkerGroup(ResourcePool([2]), Threaded, 10)
    numbers = [1]
    assert group.grow(numbers) == [[1, 10], [1, 11]]
    assert numbers == [1]


def test_roles_are_colocated_and_errors_come_back(inproc: Controller) -> None:
    roles = {"one": ClassWithInitArgs(Threaded, 1), "two": ClassWithInitArgs(Threaded, 2)}
    views = WorkerGroup(ResourcePool([2]), roles).spawn()
    assert views["one"].neighbour("two") == [2, 2]
    with pytest.raises(KeyError, match="falls") as caught:
        views["one"].fall()
    assert isinstance(caught.value, RemoteError)
    with pytest.raises(RemoteError, match="SystemExit"):
        views["two"].leave()
    assert views["two"].neighbour("one") == [1, 1], "the worker lives on"


def test_handles_and_futures_go_from_worker_to_worker(inproc: Controller) -> None:
    adders, callers = WorkerGroup(ResourcePool([2]), Adder), WorkerGroup(ResourcePool([2]), Caller)
    assert callers.call(adders, 10) == [[(0, 10), (1, 10)], [(0, 11), (1, 11)]]
    assert callers.all_at_once(adders, 20) == [list(range(20))] * 2
    batch = DataProto.from_dict(tensors={"x": torch.arange(5.0)})
    assert adders.double(adders.double.submit(batch)).batch["x"].tolist() == [0.0, 4.0, 8.0, 12.0, 16.0]


def test_what_a_thread_cannot_have_is_refused(inproc: Controller) -> None:
    with pytest.raises(UsageError, match=r"cannot give them environment=\{'A': '1'\}: all ranks share the driver's"):
        WorkerGroup(ResourcePool([1]), Threaded, environment={"A": "1"})
    with pytest.raises(UsageError, match=r"cannot give them device='cuda'.*transport='ipc'"):
        WorkerGroup(ResourcePool([1], device="cuda"), Threaded)
    group = WorkerGroup(ResourcePool([1]), Threaded)
    with pytest.raises(RemoteError, match="init_process_group needs a process for each rank"):
        group.meet()
    with pytest.raises(RemoteError, match="inside a worker"):
        group.open_a_controller()
    with pytest.raises(UsageError, match="must be 'ipc', 'tcp' or 'inproc'"):
        Controller(transport="pigeon")


def test_a_constructor_that_fails_is_told_with_its_traceback(inproc: Controller) -> None:
    with pytest.raises(StartError, match=r"rank 1 .*RuntimeError: no such weights: /nowhere(.|\n)*in __init__"):
        WorkerGroup(ResourcePool([2]), FailsToBuild, name="failing")
    wait_until_ended("failing")


def test_a_group_ends_after_the_method_that_runs_and_no_queued_one(inproc: Controller) -> None:
    group = WorkerGroup(ResourcePool([1]), Threaded)
    running, queued = group.wait_at_the_gate.submit(), group.run.submit(1)
    waiting = group.wait_for_ever.submit()
    for _ in range(2):
        assert thread_workers.entered.acquire(timeout=20)
    closer = threading.Thread(target=group.close, kwargs={"grace_s": 30.0})
    closer.start()
    for future in (running, queued, waiting):
        with pytest.raises(ClosedError):
            future.result(20)
    assert thread_workers.told.wait(20)
    thread_workers.gate.set()
    closer.join(20)
    assert not closer.is_alive()
    assert [exit.exit_code for exit in group.close()] == [0]
    assert thread_workers.ran == []


def test_a_method_that_does_not_end_is_left_and_said_so(inproc: Controller) -> None:
    group = WorkerGroup(ResourcePool([2]), Threaded, name="stuck")
    future = group.wait_at_the_gate.submit()
    for _ in range(2):
        assert thread_workers.entered.acquire(timeout=20)
    exits = group.close(grace_s=0.05)
    assert [exit.exit_code for exit in exits] == [None, None]
    assert "a thread cannot be ended from outside" in str(exits[0])
    with pytest.raises(ClosedError):
        future.result(20)
    thread_workers.gate.set()
    wait_until_ended("stuck")
    assert WorkerGroup(ResourcePool([1]), Threaded).ranks() == [(0, 1, 0, 0)], "the controller goes on"


def test_closing_the_controller_ends_every_group_and_calls_in_flight(tmp_path: Path) -> None:
    thread_workers.gate.clear()
    with Controller(transport="inproc", log_dir=tmp_path / "logs"):
        group = WorkerGroup(ResourcePool([2]), Threaded)
        group.ranks_of_a_coroutine()
        future = group.wait_at_the_gate.submit()
        for _ in range(2):
            assert thread_workers.entered.acquire(timeout=20)
    with pytest.raises((ClosedError, WorkerLostError)):
        future.result(20)
    with pytest.raises(ClosedError):
        group.ranks()
    thread_workers.gate.set()
    wait_until_ended("Threaded")
    assert not (tmp_path / "logs").exists(), "there are no logs: what a worker prints is the driver's own"


SCRIPT = """
import os
from rpcrl import Controller, Dispatch, DataProto, ResourcePool, Worker, WorkerGroup, register

print("top level of", __name__)


def double(batch):
    return DataProto.from_dict(non_tensors={"x": [2 * x for x in batch.non_tensor_batch["x"]]})


class Mine(Worker):
    @register
    def pid(self) -> int:
        return os.getpid()

    @register(Dispatch.DP_COMPUTE_PROTO_WITH_FUNC)
    def apply(self, function, batch):
        return function(batch)


if __name__ == "__main__":
    with Controller(transport="inproc"):
        group = WorkerGroup(ResourcePool([2]), Mine)
        print(set(group.pid()) == {os.getpid()})
        print(list(group.apply(double, DataProto.from_dict(non_tensors={"x": [1, 2, 3]})).non_tensor_batch["x"]))
"""


def test_classes_of_the_drivers_script_are_not_loaded_twice(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, str(tmp_path / "script.py")],
        env={**os.environ},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["top level of __main__", "True", "[2, 4, 6]"]
