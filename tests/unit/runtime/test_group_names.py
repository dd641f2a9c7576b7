"""A group keeps the name it is given, and none is ever given twice."""

from __future__ import annotations

from rpcrl.runtime.controller import Controller
from rpcrl.topology import ResourcePool


def test_a_group_keeps_its_name_and_a_second_one_gets_a_number() -> None:
    with Controller() as controller:
        pool = ResourcePool([1], device=None)
        names = [controller._admit(pool, name) for name in ("trainer", "reward", "trainer", "trainer-2")]
    assert names == ["trainer", "reward", "trainer-2", "trainer-2-2"]
