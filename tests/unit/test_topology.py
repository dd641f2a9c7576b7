"""Pools, windows of pools, and who sits where."""

import pytest

from rpcrl.errors import DispatchError, UsageError
from rpcrl.runtime.bookings import Bookings
from rpcrl.topology import ResourcePool, ResourcePoolManager


def seats(pool: ResourcePool) -> list[tuple[int, int, int, int, int | None]]:
    return [(seat.rank, seat.node, seat.node_rank, seat.local_rank, seat.device_slot) for seat in pool.placements()]


def test_ranks_go_node_by_node():
    assert seats(ResourcePool([2, 1])) == [(0, 0, 0, 0, 0), (1, 0, 0, 1, 1), (2, 1, 1, 0, 0)]
    assert [seat.local_world_size for seat in ResourcePool([2, 1]).placements()] == [2, 2, 1]
    assert seats(ResourcePool([1], device=None)) == [(0, 0, 0, 0, None)]


@pytest.mark.parametrize("nodes", [[], [0], [2, -1], [1.5], [True]])
def test_a_pool_without_slots_is_refused(nodes):
    with pytest.raises(UsageError, match="at least one node and at least one process"):
        ResourcePool(nodes)


def test_windows_reach_over_nodes_and_can_be_cut_again():
    pool = ResourcePool([2, 2, 2])
    first, second = pool.split(3)
    assert seats(first) == [(0, 0, 0, 0, 0), (1, 0, 0, 1, 1), (2, 1, 1, 0, 0)]
    assert seats(second) == [(0, 1, 0, 0, 1), (1, 2, 1, 0, 0), (2, 2, 1, 1, 1)]
    assert [seats(part) for part in second.split([1, 2])] == [[(0, 1, 0, 0, 1)], [(0, 2, 0, 0, 0), (1, 2, 0, 1, 1)]]
    assert second.whole is pool


@pytest.mark.parametrize("sizes", [4, 0, [2, 3], [7], [], [3, 0, 3]])
def test_sizes_that_do_not_add_up_are_refused(sizes):
    with pytest.raises(UsageError, match=r"has 6 slots; they cannot be split"):
        ResourcePool([2, 2, 2]).split(sizes)


def test_windows_share_devices_with_their_pool_and_not_with_each_other():
    pool = ResourcePool([4], max_colocate_count=1)
    left, right = pool.split(2)
    bookings = Bookings()
    bookings.admit(left, "left")
    bookings.admit(right, "right")
    with pytest.raises(DispatchError, match="no room"):
        bookings.admit(pool, "all")


def test_split_then_merge_has_the_same_slots():
    pool = ResourcePool([2, 2])
    left, right = pool.split(2)
    merged = left.merge(right)
    assert [(seat.node, seat.device_slot) for seat in merged.placements()] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert merged.whole is pool


def test_pools_of_their_own_are_merged_side_by_side():
    merged = ResourcePool([2], name="a").merge(ResourcePool([1], name="b"))
    assert (merged.name, merged.world_size) == ("a+b", 3)
    assert [(seat.node, seat.device_slot) for seat in merged.placements()] == [(0, 0), (0, 1), (1, 0)]
    with pytest.raises(UsageError, match=r"cannot be merged: \(device, max_colocate_count\) is \('cpu', 3\) and"):
        ResourcePool([1]).merge(ResourcePool([1], max_colocate_count=2))


def test_a_manager_gives_each_role_its_pool_and_each_pool_its_slots():
    manager = ResourcePoolManager(
        {"global_pool": [8, 8], "rollout_pool": [4]},
        {"actor": "global_pool", "critic": "global_pool", "rollout": "rollout_pool"},
        device="cuda",
        devices_on_nodes=[12, 8],
    )
    assert manager.get_resource_pool("actor") is manager.get_resource_pool("critic")
    assert [seat.device_slot for seat in manager.get_resource_pool("rollout").placements()] == [8, 9, 10, 11]
    with pytest.raises(UsageError, match="role 'reward' is mapped to no pool; mapped are: actor, critic, rollout"):
        manager.get_resource_pool("reward")


def test_every_gap_is_named_at_once():
    with pytest.raises(UsageError) as caught:
        ResourcePoolManager(
            {"global_pool": [8, 8], "rollout_pool": [4]},
            {"actor": "global_pool", "reward": "reward_pool"},
            devices_on_nodes=[8],
        )
    text = str(caught.value)
    assert "role 'reward' is mapped to pool 'reward_pool', which is not among 'global_pool', 'rollout_pool'" in text
    assert "node 0 has 8 devices, but the pools ask for 12 there: global_pool 8, rollout_pool 4" in text
    assert "node 1 has 0 devices, but the pools ask for 8 there: global_pool 8" in text
