"""The role gate: alone or shared, first come first served."""

from rpcrl.runtime.gate import RoleGate


def test_first_come_first_served_and_nobody_overtakes_a_waiting_update():
    gate = RoleGate()
    order: list[str] = []

    def arrive(name: str, *, alone: bool) -> None:
        gate.request(alone=alone, enter=lambda: order.append(name))

    arrive("read 1", alone=False)
    arrive("read 2", alone=False)
    arrive("update", alone=True)
    arrive("read 3", alone=False)
    assert order == ["read 1", "read 2"]
    gate.leave(alone=False)
    assert order == ["read 1", "read 2"]
    gate.leave(alone=False)
    assert order == ["read 1", "read 2", "update"]
    gate.leave(alone=True)
    assert order == ["read 1", "read 2", "update", "read 3"]


def test_enter_alone_returns_at_once_when_free():
    gate = RoleGate()
    gate.enter_alone()
    entered: list[bool] = []
    gate.request(alone=True, enter=lambda: entered.append(True))
    assert entered == []
    gate.leave(alone=True)
    assert entered == [True]
