"""Two workers over the in-process transport: calls between them run once, whatever is lost; ends are told."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from rpcrl.dispatch.register import register
from rpcrl.errors import ClosedError, WorkerExit, WorkerLostError
from rpcrl.runtime.caller import Part
from rpcrl.runtime.future import PendingReplies
from rpcrl.runtime.peers import Me, Peers, _PeerCalls, listening_address
from rpcrl.runtime.serve import CallServer
from rpcrl.shm.buffers import Buffer
from rpcrl.testing.transport_harness import wait_until
from rpcrl.transport.base import Dialer, Frame, Listener
from rpcrl.transport.open import connect, dialer, listen
from rpcrl.wire.codec import decode, encode
from rpcrl.wire.frames import from_frames, to_frames
from rpcrl.wire.imports import ImportPolicy
from rpcrl.wire.messages import (
    Call,
    ExpectPeer,
    ForgetPeer,
    GroupEnded,
    Introduce,
    Introduction,
    Message,
    PeerAddress,
    PeerExpected,
    Result,
)

WITHIN_S = 15.0
NOTHING = encode(((), {}))


class Counter:
    def __init__(self) -> None:
        self.count = 0

    @register
    async def inc(self) -> int:
        self.count += 1
        return self.count


class Lossy:
    """A dialer that loses messages, and says how many."""

    def __init__(self, end: Dialer) -> None:
        self._end = end
        self.dial, self.hang_up, self.wake, self.close = end.dial, end.hang_up, end.wake, end.close
        self.lose_sent: list[type] = []
        self.lose_received: list[type] = []
        self.lost: list[type] = []

    def send(self, peer: str, frames: Sequence[Buffer]) -> None:
        if self._loses(frames, self.lose_sent):
            return
        self._end.send(peer, frames)

    def receive(self, timeout_s: float | None) -> tuple[str, list[Frame]] | None:
        received = self._end.receive(timeout_s)
        return None if received is None or self._loses(received[1], self.lose_received) else received

    def _loses(self, frames: Sequence[Buffer], kinds: list[type]) -> bool:
        kind = type(from_frames(list(frames)))  # type: ignore[arg-type]
        if kind not in kinds:
            return False
        kinds.remove(kind)
        self.lost.append(kind)
        return True


class Pair:
    """A worker that is called, and the calling half of another, introduced by hand."""

    def __init__(self, name: str) -> None:
        self.controller: Listener = listen(f"inproc://{name}")
        connection = connect(self.controller.address, identity="called")
        self.server = CallServer(connection, ImportPolicy(("rpcrl", "tests")), incarnation="life-1")
        address = listening_address(self.controller.address, "127.0.0.1", f"{name}-peers")
        self.peers = Peers(self.server, Me("run", "called", "life-1", address, None))
        self.server.on_peers = self.peers.take
        self.counter = Counter()
        self.server.add_roles({"r": self.counter})
        self.server.start()
        self.server.post(Introduce("hello"))
        assert self.hear() == Introduce("hello")
        self.told: list[Message] = []
        self.end = Lossy(dialer("inproc", identity="caller"))
        self.calls = _PeerCalls(self.end, "caller", self.told.append)
        self.tell(ExpectPeer("caller"))
        expected = self.hear()
        assert isinstance(expected, PeerExpected)
        self.introduction = Introduction("g", (PeerAddress("called", "life-1", 0, expected.address),))

    def hear(self) -> Message:
        received = self.controller.receive(WITHIN_S)
        assert received is not None
        return from_frames(received[1])

    def tell(self, message: Message) -> None:
        self.controller.send("called", to_frames(message))

    def call(self) -> PendingReplies:
        pending = PendingReplies("r.inc", [0])
        self.calls.post(lambda: self.calls.call("g", "r", "inc", [Part("called", NOTHING)], pending))
        return pending

    def introduce(self) -> None:
        self.calls.post(lambda: self.calls.hear(self.introduction))

    def close(self) -> None:
        self.calls.stop()
        self.peers.close()
        self.server.close()
        self.controller.close()


@pytest.fixture
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    made = Pair(request.node.name)
    yield made
    made.close()


def value_of(pending: PendingReplies) -> int:
    [reply] = pending.settled.result(WITHIN_S)
    value: int = decode(reply.payload)
    return value


def test_a_call_waits_for_the_introduction_and_asks_for_it_once(pair: Pair):
    first, second = pair.call(), pair.call()
    pair.introduce()
    assert {value_of(first), value_of(second)} == {1, 2}
    assert pair.told == [Introduce("g")]


@pytest.mark.parametrize(("sent", "received"), [([Call], []), ([], [Result]), ([Call], [Result])])
def test_p64_what_is_lost_between_peers_is_asked_for_and_runs_once(pair: Pair, sent: list[type], received: list[type]):
    pair.introduce()
    assert value_of(pair.call()) == 1
    pair.end.lose_sent, pair.end.lose_received = list(sent), list(received)
    assert value_of(pair.call()) == 2
    assert pair.end.lost == [*sent, *received], "the loss did happen"
    assert pair.counter.count == 2
    assert value_of(pair.call()) == 3


def test_the_end_of_a_group_fails_what_waits_and_what_comes_later(pair: Pair):
    pair.introduce()
    assert value_of(pair.call()) == 1
    pair.end.lose_sent = [Call]
    waiting = pair.call()
    ending = WorkerExit("called", "g", 0, ("r",), "h", 5, None, "SIGKILL", 1, False, (), "log")
    pair.calls.post(lambda: pair.calls.hear(GroupEnded("g", "lost", "gone", (ending,))))
    for pending in (waiting, pair.call()):
        with pytest.raises(WorkerLostError, match="SIGKILL"):
            pending.settled.result(WITHIN_S)


def test_a_group_that_ends_before_the_introduction_fails_its_callers(pair: Pair):
    waiting = pair.call()
    pair.calls.post(lambda: pair.calls.hear(GroupEnded("g", "closed", "group 'g' is closed")))
    with pytest.raises(ClosedError, match=r"group 'g' is closed\s+during: r.inc"):
        waiting.settled.result(WITHIN_S)


def test_a_worker_that_ends_fails_its_own_calls(pair: Pair):
    pair.introduce()
    assert value_of(pair.call()) == 1
    pair.end.lose_sent = [Call]
    waiting = pair.call()
    pair.calls.stop()
    with pytest.raises(ClosedError):
        waiting.settled.result(WITHIN_S)


def test_a_caller_that_is_gone_is_forgotten(pair: Pair):
    pair.introduce()
    pair.end.lose_received = [Result]
    waiting = pair.call()
    line = pair.peers._line
    assert line is not None
    wait_until(lambda: line._cache.num_bytes > 0, "the reply is kept")
    assert not waiting.settled.done()
    pair.tell(ForgetPeer("caller"))
    wait_until(lambda: line._cache.num_bytes == 0, "and forgotten")
