"""Does a listener on TCP let in exactly whom it should, under the one name that is theirs, undisturbed by the rest?"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from typing import cast

import pytest
import zmq

from rpcrl.errors import AuthenticationError, PeerUnreachableError
from rpcrl.testing.transport_harness import greet, receive, wait_until
from rpcrl.transport import keys as keys_module
from rpcrl.transport.base import ClientKeys, Limits
from rpcrl.transport.keys import AllowList, new_key_pair
from rpcrl.transport.open import connect, listen
from rpcrl.transport.zeromq import ZmqConnection, ZmqListener

LIMITS = Limits(handshake_s=0.5, reconnect_s=0.02, linger_s=0.1)


class Scene:
    """A listener that lets in ``w0`` and ``w1``, and ``w0`` connected to it."""

    def __init__(self) -> None:
        self.server = new_key_pair()
        self.first, self.second, self.stranger = new_key_pair(), new_key_pair(), new_key_pair()
        allowed = AllowList({self.first.public: "w0", self.second.public: "w1"})
        self.listener = cast(
            "ZmqListener", listen("tcp://127.0.0.1:0", limits=LIMITS, keys=self.server, allowed=allowed)
        )
        self.good = self.connect("w0", ClientKeys(self.first, self.server.public))
        greet(self.listener, self.good, "w0")

    def connect(self, identity: str, keys: ClientKeys) -> ZmqConnection:
        return cast("ZmqConnection", connect(self.listener.address, identity=identity, limits=LIMITS, keys=keys))


@pytest.fixture
def scene() -> Iterator[Scene]:
    made = Scene()
    yield made
    greet(made.listener, made.good, "w0")  # whatever happened, the good peer is not disturbed
    made.good.close()
    made.listener.close()


def expect_refusal(connection: ZmqConnection, words: str, *, by_send: bool) -> None:
    """Each call looks after the handshake; the refusal comes within its time."""

    def call_until_refused() -> None:
        while True:
            if by_send:
                connection.send([b"let me in"])
                connection._monitor.poll(100)
            else:
                connection.receive(5.0)

    try:
        with pytest.raises(AuthenticationError, match=words):
            call_until_refused()
    finally:
        connection.close()


@pytest.mark.parametrize("by_send", [True, False], ids=["send", "receive"])
def test_an_unlisted_key_is_told_at_once(scene: Scene, by_send: bool) -> None:
    connection = scene.connect("w1", ClientKeys(scene.stranger, scene.server.public))
    start_s = time.monotonic()
    expect_refusal(connection, "not on its allow-list", by_send=by_send)
    assert time.monotonic() - start_s < 5.0
    wait_until(lambda: scene.listener.rejected >= 1, "the stranger is counted")
    assert scene.listener.receive(0.0) is None


@pytest.mark.parametrize("by_send", [True, False], ids=["send", "receive"])
def test_a_wrong_server_key_is_told_in_words(scene: Scene, by_send: bool) -> None:
    connection = scene.connect("w1", ClientKeys(scene.second, scene.stranger.public))
    expect_refusal(
        connection, r"no handshake within 0.5 s \(Limits.handshake_s\): the listener's public key is", by_send=by_send
    )
    assert scene.listener.rejected >= 1


def test_a_plain_client_is_never_heard(scene: Scene) -> None:
    before = scene.listener.rejected
    with zmq.Context() as context, context.socket(zmq.DEALER) as plain:
        plain.linger = 0
        plain.setsockopt(zmq.ROUTING_ID, b"w1")
        plain.connect(scene.listener.address)
        plain.send(b"hello")
        wait_until(lambda: scene.listener.rejected > before, "the plain client is counted")
        assert scene.listener.receive(0.1) is None


def test_bytes_that_are_no_zeromq_are_dropped(scene: Scene) -> None:
    before = scene.listener.rejected
    host, _, port = scene.listener.address.removeprefix("tcp://").rpartition(":")
    for data in (b"GET / HTTP/1.1\r\n\r\n" * 20, b"\xff" * 100, b"\x80\x04\x95" * 50):
        with socket.create_connection((host, int(port))) as stranger:
            stranger.sendall(data)
            stranger.settimeout(10.0)
            try:
                while stranger.recv(1000):
                    pass
            except ConnectionResetError:
                continue
    wait_until(lambda: scene.listener.rejected > before, "the strangers are counted")
    assert scene.listener.receive(0.0) is None


def test_a_silent_stranger_is_cut_after_the_handshake_time(scene: Scene) -> None:
    host, _, port = scene.listener.address.removeprefix("tcp://").rpartition(":")
    with socket.create_connection((host, int(port))) as stranger:
        stranger.settimeout(10.0)
        try:
            while stranger.recv(1000):
                pass
        except ConnectionResetError:
            pass


def test_a_listed_peer_cannot_speak_under_another_name(scene: Scene) -> None:
    impostor = scene.connect("w0", ClientKeys(scene.second, scene.server.public))
    before = scene.listener.rejected
    impostor.send([b"I am w0"])
    assert scene.listener.receive(0.3) is None
    assert scene.listener.rejected == before + 1
    impostor.close()


def test_a_listed_peer_cannot_catch_messages_for_another(scene: Scene) -> None:
    """w1 knows its key and w0's name, and waits for w0 to go away: what is sent to w0 never comes to w1."""
    scene.good.close()
    impostor = scene.connect("w0", ClientKeys(scene.second, scene.server.public))
    impostor.send([b"I am w0"])
    assert scene.listener.receive(0.3) is None

    def unreachable() -> bool:
        try:
            scene.listener.send("w0", [b"secret"])
        except PeerUnreachableError:
            return True
        return False

    wait_until(unreachable, "w0 is gone")
    assert impostor.receive(0.3) is None
    impostor.close()
    scene.good = scene.connect("w0", ClientKeys(scene.first, scene.server.public))


def test_an_absent_listener_accuses_no_key() -> None:
    with socket.socket() as placeholder:
        placeholder.bind(("127.0.0.1", 0))
        port = placeholder.getsockname()[1]
        placeholder.listen()
        own = new_key_pair()
        keys = ClientKeys(own, new_key_pair().public)
        connection = connect(f"tcp://127.0.0.1:{port}", identity="w0", limits=LIMITS, keys=keys)
        accepted, _ = placeholder.accept()  # somebody is there, then dies in the middle of the handshake
        accepted.close()
    try:
        assert connection.receive(3 * LIMITS.handshake_s) is None
        connection.send([b"waits"])
    finally:
        connection.close()


def _shut(end: socket.socket) -> None:
    try:
        end.shutdown(socket.SHUT_RDWR)
    except OSError:  # it is down already
        pass


class DeafRelay:
    """A TCP relay whose connections can die on the peer's side only: the listener never hears of it."""

    def __init__(self, target: str) -> None:
        host, _, port = target.removeprefix("tcp://").rpartition(":")
        self._target = (host, int(port))
        self._server = socket.create_server(("127.0.0.1", 0))
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()
        self.address = f"tcp://127.0.0.1:{self._server.getsockname()[1]}"

    def _accept(self) -> None:
        while True:
            try:
                peer, _ = self._server.accept()
            except OSError:
                return
            target = socket.create_connection(self._target)
            self._pairs.append((peer, target))
            for source, sink in ((peer, target), (target, peer)):
                thread = threading.Thread(target=self._pump, args=(source, sink))
                thread.start()
                self._threads.append(thread)

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        try:
            while data := source.recv(65536):
                sink.sendall(data)
        except OSError:
            pass

    def cut_peers(self) -> None:
        for peer, _ in list(self._pairs):
            _shut(peer)

    def close(self) -> None:
        self._server.shutdown(socket.SHUT_RDWR)
        self._threads[0].join()
        for pair in self._pairs:
            for end in pair:
                _shut(end)
        for thread in self._threads:
            thread.join()
        for pair in self._pairs:
            for end in pair:
                end.close()
        self._server.close()


def test_a_connection_that_died_unseen_is_replaced_at_once(scene: Scene) -> None:
    """The listener holds the old connection for alive for a minute more; the peer's new one takes its place."""
    relay = DeafRelay(scene.listener.address)
    keys = ClientKeys(scene.second, scene.server.public)
    connection = connect(relay.address, identity="w1", limits=LIMITS, keys=keys)
    try:
        greet(scene.listener, connection, "w1")
        for _ in range(3):
            relay.cut_peers()
            wait_until(
                lambda: connection.receive(0.01) is None and not cast("ZmqConnection", connection).ready, "it is cut"
            )
            wait_until(
                lambda: connection.receive(0.01) is None and cast("ZmqConnection", connection).ready, "it is back"
            )
            greet(scene.listener, connection, "w1")
    finally:
        connection.close()
        relay.close()


def test_an_allow_list_that_fails_lets_nobody_in() -> None:
    server, own = new_key_pair(), new_key_pair()

    def broken(key: str, /) -> str | None:
        raise RuntimeError("the key file is gone")

    listener = listen("tcp://127.0.0.1:0", limits=LIMITS, keys=server, allowed=broken)
    connection = connect(listener.address, identity="w0", limits=LIMITS, keys=ClientKeys(own, server.public))
    expect_refusal(cast("ZmqConnection", connection), "allow-list", by_send=False)
    listener.close()


def test_keys_may_be_added_while_the_listener_runs() -> None:
    server, own = new_key_pair(), new_key_pair()
    allowed = AllowList()
    listener = listen("tcp://127.0.0.1:0", limits=LIMITS, keys=server, allowed=allowed)
    assert allowed(own.public) is None
    allowed.add(own.public, "late")
    connection = connect(listener.address, identity="late", limits=LIMITS, keys=ClientKeys(own, server.public))
    greet(listener, connection, "late")
    allowed.remove(own.public)
    assert allowed(own.public) is None
    again = connect(listener.address, identity="late", limits=LIMITS, keys=ClientKeys(own, server.public))
    expect_refusal(cast("ZmqConnection", again), "allow-list", by_send=False)
    connection.close()
    listener.close()


def test_without_curve_in_libzmq_there_is_no_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    server, own = new_key_pair(), new_key_pair()
    monkeypatch.setattr(zmq, "has", lambda capability: False)
    for call in (
        lambda: listen("tcp://127.0.0.1:0", keys=server, allowed=AllowList()),
        lambda: connect("tcp://127.0.0.1:1", identity="w0", keys=ClientKeys(own, server.public)),
        keys_module.new_key_pair,
    ):
        with pytest.raises(AuthenticationError, match="has no CURVE"):
            call()


def test_a_flood_of_strangers_does_not_disturb(scene: Scene) -> None:
    host, _, port = scene.listener.address.removeprefix("tcp://").rpartition(":")
    stop = threading.Event()

    def flood() -> None:
        while not stop.is_set():
            with socket.create_connection((host, int(port))) as stranger:
                stranger.sendall(b"\xff" * 64)

    thread = threading.Thread(target=flood)
    thread.start()
    try:
        for number in range(500):
            scene.good.send([str(number).encode()])
            got = scene.listener.receive(10.0)
            assert got is not None
            scene.listener.send("w0", got[1])
            assert bytes(receive(scene.good, "echo")[0]) == str(number).encode()
    finally:
        stop.set()
        thread.join()
