"""Large buffers between real processes: right whatever either side does with its tensors, and nothing grows."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rpcrl import Controller, ResourcePool, WorkerGroup
from rpcrl.errors import WorkerLostError
from rpcrl.shm.exchange import Exchange
from rpcrl.shm.files import owner_tag
from tests.cluster.memory_workers import Memory, lies_in_shared_memory

pytestmark = pytest.mark.cluster

MIB = 1 << 20
FLOATS = MIB // 4
"""Of one MiB."""
LONE, PAIR = ResourcePool([1], device=None), ResourcePool([2], device=None)


def exchange_of(controller: Controller) -> Exchange:
    assert controller._exchange is not None
    return controller._exchange


def files_of(controller: Controller, identity: str = "") -> list[str]:
    tag = owner_tag(identity) if identity else ""
    return sorted(path.name for path in Path("/dev/shm").glob(f"rpcrl-{controller.run_id}-{tag}*"))


def wait_until(condition: Callable[[], bool], what: str, within_s: float = 20.0) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {within_s} s: {what}"
        os.sched_yield()


def test_arguments_results_and_constructor_arguments_go_by_shared_memory(controller: Controller):
    with WorkerGroup(PAIR, Memory, torch.ones(FLOATS)) as group:
        assert group.start_is_shared() == [True, True]
        assert group.is_shared(torch.ones(FLOATS)) == [True, True]
        assert group.is_shared(torch.ones(FLOATS // 100)) == [False, False]
        results = group.scale(torch.ones(FLOATS))
        assert [lies_in_shared_memory(result) for result in results] == [True, True]
        assert [float(result.sum()) for result in results] == [2.0 * FLOATS, 3.0 * FLOATS]


def test_p58_a_tensor_may_be_changed_as_soon_as_it_was_submitted(ipc: Controller):
    with WorkerGroup(LONE, Memory) as group:
        x = torch.arange(float(FLOATS))
        futures = []
        for number in range(8):
            x.fill_(number)
            futures.append(group.echo.submit(x))
        assert [float(future.result(30)[-1]) for future in futures] == list(range(8))


def test_one_copy_for_all_and_each_has_its_own(ipc: Controller):
    with WorkerGroup(ResourcePool([3], device=None), Memory) as group:
        x, before = torch.ones(FLOATS), exchange_of(ipc).arena.shared_bytes
        results = group.scale(x)
        assert exchange_of(ipc).arena.shared_bytes - before == MIB
        assert [float(result[0]) for result in results] == [2.0, 3.0, 4.0]
        assert float(x.sum()) == FLOATS
        results[0].zero_()
        assert float(results[1].sum()) == 3.0 * FLOATS


def test_what_a_worker_keeps_stays_as_it_was_and_is_given_back(ipc: Controller):
    with WorkerGroup(LONE, Memory) as group:
        for number in range(5):
            group.keep(torch.full((FLOATS,), float(number)))
        for _ in range(10):
            group.echo(torch.full((FLOATS,), -1.0))
        assert group.look() == [[number, number] for number in map(float, range(5))]
        assert exchange_of(ipc).arena.num_leased() == 5
        group.drop()
        wait_until(lambda: exchange_of(ipc).arena.num_leased() == 0, "what the worker dropped is free again")


def test_what_the_driver_keeps_stays_as_it_was(ipc: Controller):
    with WorkerGroup(LONE, Memory) as group:
        kept = [group.echo(torch.full((FLOATS,), float(number)))[7:9] for number in range(5)]
        for _ in range(10):
            group.echo(torch.full((FLOATS,), -1.0))
        assert [part.tolist() for part in kept] == [[number, number] for number in map(float, range(5))]


def test_slots_are_used_again(ipc: Controller):
    """A call and its two results want three slots at a time, and a slot may come back a few calls late."""
    with WorkerGroup(PAIR, Memory) as group:
        for _ in range(60):
            group.scale(torch.ones(FLOATS))
        assert 3 * MIB <= exchange_of(ipc)._budget.used_bytes <= 20 * MIB, "180 MiB went through"


def test_hundreds_of_calls_in_flight_and_results_alive(ipc: Controller):
    with WorkerGroup(LONE, Memory) as group:
        futures = [group.echo.submit(torch.full((FLOATS // 16,), float(number))) for number in range(500)]
        results = [future.result(60) for future in futures]
        assert [float(result.sum()) for result in results] == [number * FLOATS / 16 for number in range(500)]
        assert all(lies_in_shared_memory(result) for result in results[::50])


def test_without_room_everything_works_and_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    lines: list[str] = []
    with (
        caplog.at_level(logging.WARNING),
        Controller(
            log_dir=tmp_path / "logs", console="all", console_sink=lines.append, shared_memory_bytes=2 * MIB
        ) as controller,
        WorkerGroup(PAIR, Memory) as group,
    ):
        kept: list[Any] = []
        for number in range(4):
            kept += group.scale(torch.full((FLOATS,), float(number)))
        assert [float(result[5]) for result in kept] == [number * scale for number in range(4) for scale in (2, 3)]
        assert exchange_of(controller)._budget.used_bytes <= 2 * MIB
        told = [record.getMessage() for record in caplog.records]
        wait_until(lambda: len(_warnings(told + lines)) > 0, "the warning", 10.0)
    assert len(_warnings(told + lines)) == 1
    assert "2.0 MiB" in _warnings(told + lines)[0]


def _warnings(texts: list[str]) -> list[str]:
    return [text for text in texts if "Controller(shared_memory_bytes=2097152)" in text]


def test_switched_off_there_are_no_files(tmp_path: Path):
    with (
        Controller(log_dir=tmp_path / "logs", console="off", shared_memory_bytes=0) as controller,
        WorkerGroup(PAIR, Memory) as group,
    ):
        assert group.is_shared(torch.ones(FLOATS)) == [False, False]
        assert [float(result.sum()) for result in group.scale(torch.ones(FLOATS))] == [2.0 * FLOATS, 3.0 * FLOATS]
        assert files_of(controller) == []


def test_workers_share_with_each_other(controller: Controller):
    with WorkerGroup(PAIR, Memory) as asked, WorkerGroup(LONE, Memory) as asking:
        assert asking.ask(asked, torch.ones(FLOATS)) == ([True, True], True, 2.0 * FLOATS)


def test_a_worker_that_is_killed_leaves_no_file_and_holds_no_lease(ipc: Controller):
    group = WorkerGroup(LONE, Memory)
    [identity] = group.identities
    group.keep(torch.ones(FLOATS))
    result = group.echo(torch.full((FLOATS,), 7.0))
    assert len(files_of(ipc, identity)) > 2
    assert exchange_of(ipc).arena.num_leased() > 0
    [pid] = [member.pid for member in ipc._hub._membership.groups[group.name].members]
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(WorkerLostError):
        group.echo(torch.ones(FLOATS))
    assert exchange_of(ipc).arena.num_leased() == 0
    assert files_of(ipc, identity) == []
    assert float(result.sum()) == 7.0 * FLOATS, "what was received stays readable"
    group.close()


@pytest.mark.slow
def test_p61_three_gigabytes_without_a_copy_in_the_processes_own_memory(tmp_path: Path):
    with Controller(log_dir=tmp_path / "logs", console="off") as controller, WorkerGroup(LONE, Memory) as group:
        content = torch.from_numpy(np.zeros(3 << 30, np.uint8))  # pages of zeros, which take no memory
        before = _own_bytes()
        assert group.is_shared(content) == [True]
        assert _own_bytes() - before < 64 * MIB
        assert exchange_of(controller).arena.shared_bytes == 3 << 30


def _own_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0]) * 1024
