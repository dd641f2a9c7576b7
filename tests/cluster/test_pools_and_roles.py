"""Where groups sit, what they share, and what roles in one process do with each other."""

from __future__ import annotations

import concurrent.futures

import pytest

from rpcrl import ClassWithInitArgs, Controller, ResourcePool, ResourcePoolManager, WorkerGroup
from rpcrl.errors import DispatchError, UsageError
from tests.cluster.role_workers import Actor, Fused, Patient, Where

pytestmark = pytest.mark.cluster


def test_windows_over_virtual_nodes_are_groups_of_their_own(controller: Controller):
    whole = ResourcePool([2, 2])
    left, middle, right = whole.split([1, 2, 1])
    groups = [WorkerGroup(window, Where) for window in (left, middle, right)]
    places = [group.place() for group in groups]
    assert [[(p["RANK"], p["NODE_RANK"], p["LOCAL_RANK"]) for p in place] for place in places] == [
        [("0", "0", "0")],
        [("0", "0", "0"), ("1", "1", "0")],
        [("0", "0", "0")],
    ]
    assert {p["LOCAL_WORLD_SIZE"] for p in places[1]} == {"1"}
    everywhere = WorkerGroup(left.merge(middle).merge(right), Where)
    assert [p["RANK"] for p in everywhere.place()] == ["0", "1", "2", "3"]


def test_groups_on_one_pool_have_ports_and_variables_of_their_own(ipc: Controller):
    pool = ResourcePool([2])
    one = WorkerGroup(pool, Where, environment={"MINE": "one"})
    other = WorkerGroup(pool, Where, environment={"MINE": "other"})
    first, second = one.place(), other.place()
    assert {p["MINE"] for p in first} == {"one"}
    assert {p["MINE"] for p in second} == {"other"}
    assert len({p["MASTER_PORT"] for p in first}) == len({p["MASTER_PORT"] for p in second}) == 1
    assert first[0]["MASTER_PORT"] != second[0]["MASTER_PORT"]
    assert one.add_up() == other.add_up() == [2.0, 2.0]
    for name in ("RANK", "MASTER_PORT", "CUDA_VISIBLE_DEVICES"):
        with pytest.raises(DispatchError, match=f"may not set {name}"):
            WorkerGroup(pool, Where, environment={name: "1"})


def test_groups_are_built_while_others_run(ipc: Controller):
    pool = ResourcePool([1], max_colocate_count=4)
    busy = WorkerGroup(pool, Patient)
    running = busy.wait.submit()
    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        made = list(threads.map(lambda _: WorkerGroup(pool, Where), range(2)))
    assert [group.answer() for group in made] == [["here"], ["here"]]
    assert not running.done()
    assert busy.control() == ["told"], "a control call is answered while a long call runs"
    assert running.result(60) == [None]


def test_a_manager_gives_each_role_its_pool(ipc: Controller):
    manager = ResourcePoolManager(
        {"global_pool": [2], "reward_pool": [1], "rollout_pool": [1, 1]},
        {"actor": "global_pool", "critic": "global_pool", "reward": "reward_pool", "rollout": "rollout_pool"},
    )
    sizes = {role: len(WorkerGroup(manager.get_resource_pool(role), Where).answer()) for role in manager.mapping}
    assert sizes == {"actor": 2, "critic": 2, "reward": 1, "rollout": 2}
    with pytest.raises(UsageError, match="'judge' is mapped to no pool"):
        manager.get_resource_pool("judge")


def test_a_fused_role_works_with_its_neighbours_by_plain_calls(controller: Controller):
    roles = {"actor": ClassWithInitArgs(Actor, 3), "actor_rollout": Actor, "critic": Actor, "trainer": Fused}
    group = WorkerGroup(ResourcePool([2]), roles)
    views = group.spawn({"trainer", "actor"})
    sampled, critic, _ = views["trainer"].step(5)
    assert (sampled, critic) == (5 * 4, 11)
    assert views["actor"].sample(1) == [4, 3], "rank 0 was updated by its neighbour, rank 1 was not"
    assert group.spawn(["actor_rollout"])["actor_rollout"].sample(1) == [1, 1], "actor is not actor_rollout"
