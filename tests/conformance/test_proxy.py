"""Does the fault proxy do what it says, on every transport, and does it notice when it did nothing?"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from rpcrl.testing.proxy import FaultProxy
from rpcrl.testing.transport_harness import Harness, receive, receive_from
from rpcrl.transport.base import ClientKeys, Connection, Listener
from rpcrl.transport.keys import new_key_pair
from rpcrl.wire.frames import from_frames, to_frames
from rpcrl.wire.messages import Message, Ready, Shutdown


@pytest.fixture(params=["inproc", "ipc", "tcp"])
def harness(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Harness]:
    directory: Path = tmp_path_factory.mktemp("p")
    directory.chmod(0o700)
    with Harness(request.param, directory) as opened:
        yield opened


def stand_between(harness: Harness, identity: str) -> tuple[Listener, FaultProxy, Connection]:
    """The real listener, the proxy in front of it, and a peer that talks to the proxy."""
    listener = harness.listen()
    front = {"inproc": f"inproc://front-{id(harness)}", "ipc": f"ipc://{harness.directory}/front"}.get(
        harness.scheme, "tcp://127.0.0.1:0"
    )
    own_keys = new_key_pair() if harness.keys is not None else None

    def client_keys(peer: str) -> ClientKeys:
        assert harness.keys is not None
        return ClientKeys(harness.peer_keys(peer), harness.keys.public)

    proxy = FaultProxy(
        listener.address,
        front,
        limits=harness.limits,
        keys=own_keys,
        allowed=harness.allowed if own_keys is not None else None,
        client_keys=client_keys if own_keys is not None else None,
    )
    server_public = own_keys.public if own_keys is not None else None
    return listener, proxy, harness.connect(proxy.address, identity, server_public=server_public)


def is_ready(message: Message) -> bool:
    return isinstance(message, Ready)


def test_passes_both_ways_and_drops_what_it_was_told(harness: Harness) -> None:
    listener, proxy, connection = stand_between(harness, "w0")
    with proxy:
        up = proxy.drop(is_ready, count=2)
        for name in ("first", "second", "third"):
            connection.send(to_frames(Ready(name)))
        peer, frames = receive_from(listener, "the third message")
        assert (peer, from_frames(frames)) == ("w0", Ready("third"))
        assert up.num_matched == 2

        down = proxy.drop(lambda message: message == Shutdown("lost"), peer="w0", direction="down")
        listener.send("w0", to_frames(Shutdown("lost")))
        listener.send("w0", to_frames(Shutdown("kept")))
        assert from_frames(receive(connection, "the kept message")) == Shutdown("kept")
        down.wait()
        assert proxy.passed == {"up": 1, "down": 1}


def test_duplicates_holds_and_replaces(harness: Harness) -> None:
    listener, proxy, connection = stand_between(harness, "w0")
    with proxy:
        proxy.duplicate(lambda message: message == Ready("twice"))
        held = proxy.hold(lambda message: message == Ready("late"))
        proxy.replace(lambda message: message == Ready("broken"), lambda frames: [b"\xc1"])
        for name in ("late", "twice", "broken", "plain"):
            connection.send(to_frames(Ready(name)))
        assert [bytes(receive_from(listener, "message")[1][0]) for _ in range(4)] == [
            to_frames(Ready("twice"))[0],
            to_frames(Ready("twice"))[0],
            b"\xc1",
            to_frames(Ready("plain"))[0],
        ]
        assert proxy.release(held) == 1
        assert from_frames(receive_from(listener, "the held message")[1]) == Ready("late")


def test_a_fault_that_matched_nothing_fails_the_test(harness: Harness) -> None:
    listener, proxy, connection = stand_between(harness, "w0")

    def run() -> None:
        with proxy:
            proxy.drop(lambda message: True, peer="somebody else")
            proxy.drop(lambda message: True, direction="down")
            connection.send(to_frames(Ready("w0")))
            receive_from(listener, "the message")

    with pytest.raises(AssertionError, match="matched nothing"):
        run()
