"""Workers call workers of other groups: by handles that the driver gives them, without the driver in the path."""

from __future__ import annotations

import os
import signal

import pytest
import torch

from rpcrl import Controller, DataProto, ResourcePool, WorkerGroup
from rpcrl.errors import ClosedError, RemoteError, UnknownMethodError
from tests.cluster.peer_workers import Adder, Caller

pytestmark = pytest.mark.cluster

NODES = ResourcePool([2], device=None)
LONE = ResourcePool([1], device=None)


def test_a_worker_calls_a_group_and_single_workers(controller: Controller):
    adders, callers = WorkerGroup(NODES, Adder), WorkerGroup(NODES, Caller)
    assert callers.call(adders, 10) == [[(0, 10), (1, 10)], [(0, 11), (1, 11)]]
    assert callers.many(adders.workers[1], 200) == [sum(range(1, 201))] * 2
    assert adders.counted() == [2, 402], "every call ran once"
    assert callers.all_at_once(adders, 40) == [list(range(40))] * 2


def test_a_worker_splits_a_batch_over_another_group(ipc: Controller):
    adders, callers = WorkerGroup(NODES, Adder), WorkerGroup(LONE, Caller)
    [doubled] = callers.proto(adders, DataProto.from_dict(tensors={"x": torch.arange(5.0)}))
    assert torch.equal(doubled.batch["x"], torch.arange(5.0) * 2)


def test_handles_are_kept_passed_on_and_given_back(controller: Controller):
    adders, callers, others = WorkerGroup(NODES, Adder), WorkerGroup(LONE, Caller), WorkerGroup(LONE, Caller)
    assert callers.keep(adders) == [f"<WorkerGroup {adders.name!r}: Adder on 2 workers>"]
    assert callers.call_kept(1) == [[(0, 2), (1, 2)]]
    assert others.pass_on(callers, adders, 3) == [[[(0, 3), (1, 3)]]]
    [back] = callers.give_back(adders)
    assert back.add(5) == [(0, 6), (1, 6)], "the driver calls it as its own"
    [worker] = callers.give_back(adders.workers[1])
    assert worker.add(5) == (1, 6)
    with pytest.raises(RemoteError, match="belongs to the driver"):
        callers.close_it(adders)


def test_the_driver_is_not_in_the_path(controller: Controller):
    """The driver is stopped for good while a worker calls another: the calls go on."""
    adders, callers = WorkerGroup(LONE, Adder), WorkerGroup(LONE, Caller)
    callers.call(adders, 1)  # introduced
    passed: list[str] = []
    take = controller._hub.take

    def count(peer: str, frames: object) -> None:
        passed.append(peer)
        take(peer, frames)  # type: ignore[arg-type]

    controller._hub.take = count  # type: ignore[method-assign, assignment]
    assert callers.many(adders.workers[0], 300) == [sum(range(1, 301))]
    assert len(passed) < 20, f"300 calls, of which the driver saw {len(passed)} messages"


def test_errors_tell_the_same_as_on_the_driver(controller: Controller):
    adders, callers = WorkerGroup(NODES, Adder), WorkerGroup(LONE, Caller)
    [(kind, text, _)] = callers.story(adders, "refuse")
    assert kind == "RemoteKeyError", text
    assert "Adder.refuse raised KeyError on ranks 0–1 of group 'Adder'" in text
    assert "peer_workers.py" in text
    [(kind, text, _)] = callers.story(adders, "ad")
    assert kind == "UnknownMethodError"
    assert "did you mean add?" in text
    [(kind, text, _)] = callers.story(adders, "add", 1, 2, 3)
    assert kind == "DispatchError"
    assert "nothing was sent" in text
    assert callers.cancelled(adders.workers[1]) == [True]


def test_the_death_of_a_peer_is_told_by_rank_and_signal(controller: Controller):
    adders, callers = WorkerGroup(NODES, Adder), WorkerGroup(LONE, Caller)
    [(kind, text, rank)] = callers.story(adders, "die", 1)
    assert (kind, rank) == ("WorkerLostError", 1), text
    assert "SIGKILL" in text
    assert "during: Adder.die on group 'Adder'" in text
    [(kind, text, _)] = callers.story(adders, "add", 1)
    assert kind == "WorkerLostError", "and it stays broken"


def test_a_group_that_is_closed_is_told_to_its_callers(controller: Controller):
    adders, callers = WorkerGroup(NODES, Adder), WorkerGroup(LONE, Caller)
    callers.keep(adders)
    callers.call_kept(1)
    future = callers.story.submit(adders, "wait")
    adders.close()
    [(kind, text, _)] = future.result(30)
    assert kind == "ClosedError", text
    with pytest.raises(RemoteError, match=r"group 'Adder' is closed\s+during: Adder.add"):
        callers.call_kept(1)
    with pytest.raises(ClosedError):
        adders.add(1)


def test_a_caller_that_dies_leaves_the_called_unharmed(controller: Controller):
    adders, callers, others = WorkerGroup(NODES, Adder), WorkerGroup(LONE, Caller), WorkerGroup(LONE, Caller)
    callers.call(adders, 1)
    others.call(adders, 1)
    callers.story.submit(adders, "add", 1)
    pid = next(member.pid for member in controller._hub._membership.groups[callers.name].members)
    os.kill(pid, signal.SIGKILL)
    assert callers.close()[0].signal == "SIGKILL"
    assert others.call(adders, 2) == [[(0, 2), (1, 2)]]
    assert len(adders.add(1)) == 2


def test_a_group_started_later_brings_its_modules_along(controller: Controller):
    callers = WorkerGroup(LONE, Caller)
    assert "tests" in controller.imports.prefixes
    adders = WorkerGroup(LONE, Adder)
    assert callers.call(adders, 1) == [[(0, 1)]]


def test_a_group_of_several_roles_has_no_single_workers(ipc: Controller):
    group = WorkerGroup(LONE, {"a": Adder, "b": Caller})
    with pytest.raises(UnknownMethodError, match="several roles"):
        group.workers  # noqa: B018
    views = group.spawn({"b"})
    assert list(views) == ["b"]
    with pytest.raises(Exception, match="no role 'bb'"):
        group.spawn({"bb"})


def test_nothing_is_opened_before_a_peer_is_called(controller: Controller):
    callers, adders = WorkerGroup(LONE, Caller), WorkerGroup(LONE, Adder)
    [before] = callers.sockets()
    callers.keep(adders)
    assert callers.sockets() == [before]
