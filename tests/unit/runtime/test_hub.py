"""The controller's I/O thread over the in-process transport: what it survives, and that nobody waits for it in vain."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Iterator

import pytest

from rpcrl.errors import AgentLostError, ClosedError, RpcrlError
from rpcrl.runtime.caller import Part
from rpcrl.runtime.console import Console
from rpcrl.runtime.future import PendingReplies
from rpcrl.runtime.hub import AGENT, Hub
from rpcrl.runtime.membership import Group, Member
from rpcrl.transport.base import Connection
from rpcrl.transport.open import connect, listen
from rpcrl.wire.codec import encode
from rpcrl.wire.frames import from_frames, to_frames
from rpcrl.wire.messages import Hello, Message, Ready, StartWorkers, StopWorkers, Welcome, WorkerExited

WITHIN_S = 10.0
NOTHING = encode(((), {}))


class Peer:
    """An agent or a worker, by hand."""

    def __init__(self, address: str, identity: str) -> None:
        self.identity = identity
        self._connection: Connection = connect(address, identity=identity)

    def send(self, message: Message) -> None:
        self._connection.send(to_frames(message))

    def hello(self, kind: str = "worker") -> None:
        self.send(Hello(kind, self.identity, "life", "host", 1, "boot"))

    def receive(self) -> Message:
        frames = self._connection.receive(WITHIN_S)
        assert frames is not None, f"{self.identity}: nothing came within {WITHIN_S} s"
        return from_frames(frames)

    def close(self) -> None:
        self._connection.close()


class Run:
    """A hub, its agent, and a group of two workers that has been handed to the agent."""

    def __init__(self, name: str) -> None:
        listener = listen(f"inproc://{name}")
        self.address = listener.address
        self.console = Console(lambda line: None)
        self.hub = Hub(listener, self.console)
        self.agent = Peer(self.address, AGENT)
        self.agent.hello("agent")
        self.hub.agent_ready.result(WITHIN_S)
        self.group = Group("g", [Member(f"w{rank}", "life", rank, ("r",)) for rank in range(2)])
        self.started: concurrent.futures.Future[None] = concurrent.futures.Future()
        start = StartWorkers("g", "module", None, ())
        self.hub.post(lambda: self.hub.start_group(self.group, start, NOTHING, "127.0.0.1", self.started))
        assert self.agent.receive() == start
        self.workers = [Peer(self.address, f"w{rank}") for rank in range(2)]

    def bring_up(self) -> None:
        for worker in self.workers:
            worker.hello()
        for worker in self.workers:
            assert isinstance(worker.receive(), Welcome)
            worker.send(Ready(worker.identity))
        self.started.result(WITHIN_S)

    def call(self) -> PendingReplies:
        pending = PendingReplies("r.m", range(2))
        parts = [Part(worker.identity, NOTHING) for worker in self.workers]
        self.hub.post(lambda: self.hub.call("g", "r", "m", parts, pending))
        return pending

    def stop_group(self) -> concurrent.futures.Future[list]:
        closed: concurrent.futures.Future[list] = concurrent.futures.Future()
        self.hub.post(lambda: self.hub.stop_group("g", 1.0, closed))
        return closed

    def exited(self, rank: int) -> None:
        self.agent.send(WorkerExited(f"w{rank}", "host", 1, None, "SIGKILL", 0, False, (), "log"))


@pytest.fixture
def run(request: pytest.FixtureRequest) -> Iterator[Run]:
    made = Run(request.node.name)
    yield made
    made.hub.stop()
    made.console.close()
    for peer in (made.agent, *made.workers):
        peer.close()


def test_a_worker_that_is_gone_before_its_welcome_ends_only_its_group(run: Run):
    run.workers[0].hello()
    run.hub.ask(lambda _: "")  # it was heard
    run.workers[0].close()  # its end is reported later than the other rank's hello
    run.workers[1].hello()
    assert isinstance(run.workers[1].receive(), Welcome)
    run.exited(0)
    with pytest.raises(RpcrlError, match="did not start"):
        run.started.result(WITHIN_S)
    assert run.hub.ask(lambda _: "serves") == "serves"
    assert isinstance(run.agent.receive(), StopWorkers), "the other rank is ended"


def test_an_agent_that_cannot_be_reached_is_told_when_it_is_back(run: Run):
    run.bring_up()
    run.agent.close()
    closed = run.stop_group()
    run.hub.ask(lambda _: "")
    run.agent = Peer(run.address, AGENT)
    run.agent.hello("agent")
    assert run.agent.receive() == StopWorkers(("w0", "w1"), 1.0)
    run.exited(0)
    run.exited(1)
    assert len(closed.result(WITHIN_S)) == 2


def test_two_threads_that_close_one_group_both_hear_of_its_end(run: Run):
    run.bring_up()
    first, second = run.stop_group(), run.stop_group()
    run.exited(0)
    run.exited(1)
    assert len(first.result(WITHIN_S)) == len(second.result(WITHIN_S)) == 2


def test_a_call_that_comes_too_late_is_told_so(run: Run):
    run.bring_up()
    run.hub.stop()
    with pytest.raises(ClosedError):
        run.call().settled.result(WITHIN_S)
    assert run.stop_group().result(WITHIN_S) == []
    started: concurrent.futures.Future[None] = concurrent.futures.Future()
    start = StartWorkers("h", "module", None, ())
    run.hub.post(lambda: run.hub.start_group(Group("h", []), start, NOTHING, "127.0.0.1", started))
    with pytest.raises(ClosedError):
        started.result(WITHIN_S)


def test_a_start_that_is_waited_for_ends_with_the_controller(run: Run):
    run.hub.stop()
    with pytest.raises(ClosedError):
        run.started.result(WITHIN_S)


def test_nobody_waits_for_a_thread_that_has_failed(run: Run):
    run.bring_up()
    open_call = run.call()

    def fail() -> None:
        raise RuntimeError("a bug")

    run.hub.post(fail)
    for pending in (open_call, run.call()):
        with pytest.raises(AgentLostError, match="a bug"):
            pending.settled.result(WITHIN_S)
    run.hub._io.join(WITHIN_S)
    with pytest.raises(AgentLostError, match="a bug"):
        run.call().settled.result(WITHIN_S)
    assert run.stop_group().result(WITHIN_S) == []
