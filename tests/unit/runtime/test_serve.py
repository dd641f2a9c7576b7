"""The worker's call server over the in-process transport: what runs, what never runs twice, what a probe answers."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from rpcrl.dispatch.register import register
from rpcrl.errors import PeerUnreachableError
from rpcrl.runtime.serve import CallServer
from rpcrl.transport.base import Connection, Frame, Listener
from rpcrl.transport.open import connect, listen
from rpcrl.wire.codec import decode, encode
from rpcrl.wire.frames import from_frames, to_frames
from rpcrl.wire.imports import ImportPolicy
from rpcrl.wire.messages import Call, CallId, Cancel, Failure, Message, Probe, Ready, Result, Shutdown, Status

IMPORTS = ImportPolicy(("rpcrl", "tests"))


@dataclasses.dataclass
class Surprising:
    """A value whose encoding fails in an unforeseen way."""

    field: int = 0

    def __getattribute__(self, name: str) -> Any:
        if name == "field":
            raise RuntimeError("surprise")
        return super().__getattribute__(name)


class Valve:
    """A connection that can be made full, or broken."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.full = False
        self.broken = False

    def send(self, frames: Sequence[Frame]) -> None:
        if self.full:
            raise PeerUnreachableError("full")
        self._connection.send(frames)

    def receive(self, timeout_s: float | None) -> list[Frame] | None:
        frames = self._connection.receive(timeout_s)
        if self.broken:
            raise RuntimeError("a bug")
        return frames

    def wake(self) -> None:
        self._connection.wake()

    def close(self) -> None:
        self._connection.close()


class Role:
    def __init__(self) -> None:
        self.count = 0
        self.inside = threading.Event()
        self.go_on = threading.Event()
        self.lent = np.zeros(1000)

    @register
    def inc(self, by: int = 1) -> int:
        self.count += by
        return self.count

    @register
    def wait(self) -> str:
        self.inside.set()
        self.go_on.wait(20)
        return "done"

    @register
    def lend(self) -> Any:
        return self.lent

    @register
    def overwrite(self) -> None:
        self.lent[:] = 1
        self.inside.set()

    @register
    def surprise(self) -> Any:
        return Surprising()

    @register
    def refuse(self) -> None:
        raise KeyError("nothing here")

    @register
    def leak(self) -> Any:
        return threading.Lock()

    def hidden(self) -> None: ...


class Driver:
    """The controller's end of the wire, by hand."""

    def __init__(self, listener: Listener) -> None:
        self._listener = listener

    def send(self, message: Message) -> None:
        self._listener.send("w", to_frames(message))

    def receive(self, within_s: float = 20.0) -> Message:
        received = self._listener.receive(within_s)
        assert received is not None, f"nothing came within {within_s} s"
        return from_frames(received[1])

    def call(self, sequence: int, method: str, *args: Any, role: str = "r", below: int = 0, life: str = "i") -> None:
        payload = encode((args, {}), imports=IMPORTS)
        self.send(Call(CallId("controller", life, sequence), role, method, payload, answered_below=below))

    def value(self) -> Any:
        message = self.receive()
        assert isinstance(message, Result), message
        return decode(message.payload, imports=IMPORTS)


@pytest.fixture
def role() -> Role:
    return Role()


@pytest.fixture
def valve(request: pytest.FixtureRequest) -> Valve:
    return Valve(connect(f"inproc://{request.node.name}", identity="w"))


@pytest.fixture
def server(role: Role, valve: Valve) -> CallServer:
    return CallServer(valve, IMPORTS, incarnation="i")


@pytest.fixture
def driver(role: Role, server: CallServer, request: pytest.FixtureRequest) -> Iterator[Driver]:
    listener = listen(f"inproc://{request.node.name}")
    server.add_roles({"r": role})
    server.start()
    thread = threading.Thread(target=server.run)
    thread.start()
    server.post(Ready("w"))
    driver = Driver(listener)
    assert driver.receive() == Ready("w")
    yield driver
    role.go_on.set()
    driver.send(Shutdown("the test ends"))
    thread.join(20)
    assert not thread.is_alive()
    server.close()
    listener.close()


def test_calls_run_in_order(driver: Driver):
    for sequence, by in ((1, 1), (2, 10), (3, 100)):
        driver.call(sequence, "inc", by)
    assert [driver.value() for _ in range(3)] == [1, 11, 111]


def test_a_repeated_call_gets_the_same_reply_and_runs_once(driver: Driver, role: Role):
    driver.call(1, "inc")
    assert driver.value() == 1
    for _ in range(2):
        driver.call(1, "inc")
        assert driver.value() == 1
    driver.call(2, "inc")
    assert driver.value() == 2
    assert role.count == 2


def test_a_call_that_is_repeated_while_it_runs_is_answered_once(driver: Driver, role: Role):
    driver.call(1, "wait")
    assert role.inside.wait(20)
    driver.call(1, "wait")
    driver.call(2, "inc")
    driver.send(Probe("controller", "i", (1, 2)))
    status = driver.receive()
    assert isinstance(status, Status), "the repeated call has arrived before this answer"
    role.go_on.set()
    assert [driver.value(), driver.value()] == ["done", 1]


def test_a_call_below_the_watermark_is_discarded_and_never_run(driver: Driver, role: Role):
    driver.call(1, "inc")
    assert driver.value() == 1
    driver.call(2, "inc", below=2)
    assert driver.value() == 2
    driver.call(1, "inc")
    failure = driver.receive()
    assert isinstance(failure, Failure)
    assert failure.kind == "discarded"
    assert "was not run again" in failure.info.message
    assert role.count == 2


def test_a_call_of_another_incarnation_is_dropped(driver: Driver, role: Role):
    driver.call(1, "inc", life="captured yesterday")
    driver.call(2, "inc")
    assert driver.value() == 1
    assert role.count == 1


def test_a_probe_tells_running_from_unknown_and_sends_a_reply_again(driver: Driver, role: Role):
    driver.call(1, "inc")
    assert driver.value() == 1
    driver.call(2, "wait")
    assert role.inside.wait(20)
    driver.send(Probe("controller", "i", (1, 2, 9)))
    again = driver.receive()
    assert isinstance(again, Result)
    assert again.call_id == CallId("controller", "i", 1)
    status = driver.receive()
    assert isinstance(status, Status)
    assert list(status.running) == [2]
    assert status.unknown == (9,)
    assert status.running_method == "r.wait"
    role.go_on.set()
    assert driver.value() == "done"
    assert role.count == 1


@pytest.mark.parametrize(
    ("method", "role_name"), [("hidden", "r"), ("__init__", "r"), ("no", "r"), ("inc", "other"), ("count", "r")]
)
def test_only_registered_methods_can_be_called(driver: Driver, role: Role, method: str, role_name: str):
    driver.call(1, method, role=role_name)
    failure = driver.receive()
    assert isinstance(failure, Failure)
    assert failure.kind == "unknown_method"
    assert role.count == 0


def test_failures_say_what_kind_they_are(driver: Driver):
    driver.call(1, "refuse")
    raised = driver.receive()
    assert isinstance(raised, Failure)
    assert (raised.kind, raised.info.type_name) == ("raised", "KeyError")
    assert "in refuse" in raised.info.traceback_text
    driver.call(2, "leak")
    unencodable = driver.receive()
    assert isinstance(unencodable, Failure)
    assert unencodable.kind == "unencodable"
    assert "return value" in unencodable.info.message
    driver.call(3, "inc", 1, 2)
    wrong = driver.receive()
    assert isinstance(wrong, Failure)
    assert wrong.info.type_name == "TypeError"


def test_a_cancelled_call_never_starts_and_the_next_one_does(driver: Driver, role: Role):
    driver.call(1, "wait")
    assert role.inside.wait(20)
    driver.call(2, "inc")
    driver.send(Cancel(CallId("controller", "i", 2)))
    driver.send(Cancel(CallId("controller", "i", 9)))
    driver.call(3, "inc")
    driver.send(Probe("controller", "i", (1, 2, 3)))
    assert isinstance(driver.receive(), Status), "the cancellation has arrived before this answer"
    role.go_on.set()
    assert driver.value() == "done"
    failure = driver.receive()
    assert isinstance(failure, Failure)
    assert (failure.kind, failure.call_id.sequence) == ("cancelled", 2)
    assert driver.value() == 1
    assert role.count == 1


def test_garbage_is_dropped_and_the_worker_goes_on(driver: Driver, role: Role):
    driver._listener.send("w", [b"\x80\x04\x95pickle"])
    driver._listener.send("w", [b""])
    driver.call(1, "inc")
    assert driver.value() == 1


def test_a_reply_is_what_the_method_returned_not_what_the_next_one_made_of_it(driver: Driver, role: Role, valve: Valve):
    valve.full = True
    driver.call(1, "lend")
    driver.call(2, "overwrite")
    assert role.inside.wait(20)
    valve.full = False
    assert not driver.value().any()
    assert driver.value() is None


def test_a_value_whose_encoding_fails_in_any_way_is_a_failure_of_that_call(driver: Driver):
    driver.call(1, "surprise")
    failure = driver.receive()
    assert isinstance(failure, Failure)
    assert (failure.kind, failure.info.message) == ("unencodable", "surprise")
    driver.call(2, "inc")
    assert driver.value() == 1


def test_a_worker_whose_connection_fails_in_any_way_ends(role: Role, server: CallServer, valve: Valve):
    server.add_roles({"r": role})
    server.start()
    main = threading.Thread(target=server.run, daemon=True)
    main.start()
    valve.broken = True
    valve.wake()
    main.join(20)
    assert not main.is_alive()
    assert isinstance(server.failure, RuntimeError)
    server.close()
