"""A group keeps the name it is given, and none is ever given twice."""

from __future__ import annotations

import threading

import pytest

from rpcrl.errors import DispatchError
from rpcrl.runtime.bookings import Admissions
from rpcrl.topology import ResourcePool


def test_a_group_keeps_its_name_and_a_second_one_gets_a_number() -> None:
    admissions, pool = Admissions(patience_s=1.0), ResourcePool([1], device=None)
    names = [admissions.admit(pool, name) for name in ("trainer", "reward", "trainer", "trainer-2")]
    assert names == ["trainer", "reward", "trainer-2", "trainer-2-2"]


def test_a_group_waits_for_the_room_of_one_that_is_ending() -> None:
    admissions, pool = Admissions(patience_s=30.0), ResourcePool([1], max_colocate_count=1)
    first = admissions.admit(pool, "a")
    with pytest.raises(DispatchError, match="no room for group 'a-2'"):
        admissions.admit(pool, "a")
    admissions.ends(first)
    ending = threading.Timer(0.2, admissions.release, [first])
    ending.start()
    assert admissions.admit(pool, "a") == "a-2"
    ending.join()
