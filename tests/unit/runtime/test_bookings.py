"""Shares of devices: virtual ones belong to their pool, real ones to whoever names their slot."""

import pytest

from rpcrl.errors import DispatchError
from rpcrl.runtime.bookings import Bookings
from rpcrl.topology import ResourcePool


def test_a_pool_has_room_for_its_count_and_room_comes_back():
    bookings, pool = Bookings(), ResourcePool([2], max_colocate_count=2)
    bookings.admit(pool, "a")
    bookings.admit(pool, "b")
    with pytest.raises(DispatchError, match=r"2 groups share its devices already \(a, b\) and hold 1 of each"):
        bookings.admit(pool, "c")
    bookings.release("a")
    bookings.admit(pool, "c")


def test_two_cpu_pools_of_one_name_are_two_pools():
    bookings = Bookings()
    for number in range(8):
        bookings.admit(ResourcePool([2], max_colocate_count=1), f"group {number}")


def test_cuda_pools_share_the_slots_that_both_name():
    bookings = Bookings()
    bookings.admit(ResourcePool([1], max_colocate_count=2, device="cuda", name="half"), "half")
    third = ResourcePool([2], max_colocate_count=3, device="cuda", name="third")
    bookings.admit(third, "third")
    with pytest.raises(DispatchError, match=r"hold 5/6 of each; each worker of this pool takes 1/3"):
        bookings.admit(third, "another third")


def test_a_pool_without_devices_has_no_bound():
    bookings, pool = Bookings(), ResourcePool([4], max_colocate_count=1, device=None)
    for number in range(5):
        bookings.admit(pool, f"group {number}")
