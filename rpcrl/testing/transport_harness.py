"""With what does a transport check work? Ends that are opened and closed for it, and waits with a bound."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from rpcrl.transport.base import ClientKeys, Connection, Frame, KeyPair, Limits, Listener
from rpcrl.transport.keys import AllowList, new_key_pair
from rpcrl.transport.open import connect, listen

__all__ = ["PATIENCE_S", "Harness", "fail", "greet", "receive", "receive_from", "same", "wait_until"]

PATIENCE_S = 20.0
"""A bound for everything that ought to happen at once; never reached by a transport that works."""


def fail(text: str) -> NoReturn:
    """Say which promise is broken."""
    raise AssertionError(text)


def same(found: object, wanted: object, what: str) -> None:
    """Fail unless both are equal."""
    if found != wanted:
        fail(f"{what}: {found!r:.300} instead of {wanted!r:.300}")


def wait_until(condition: Callable[[], bool], what: str, *, patience_s: float = PATIENCE_S) -> None:
    """Wait for a state that another thread or the kernel brings about. Raises AssertionError after ``patience_s``."""
    deadline_s = time.monotonic() + patience_s
    pause = threading.Event()
    while not condition():
        if time.monotonic() > deadline_s:
            fail(f"after {patience_s:g} s still not: {what}")
        pause.wait(0.005)


@dataclass
class Harness:
    """Opens listeners and connections of one transport and closes them in the end."""

    scheme: str
    """``inproc``, ``ipc`` or ``tcp``; what really runs is checked against it."""
    directory: Path
    """A fresh directory with mode 0700."""
    limits: Limits = field(default_factory=lambda: Limits(reconnect_s=0.02, handshake_s=5.0))
    stack: ExitStack = field(default_factory=ExitStack)

    def __post_init__(self) -> None:
        self.keys: KeyPair | None = new_key_pair() if self.scheme == "tcp" else None
        self.allowed = AllowList()
        self._peers: dict[str, KeyPair] = {}

    def __enter__(self) -> Harness:
        return self

    def __exit__(self, *exc: object) -> None:
        self.stack.close()

    def listen(self, *, address: str | None = None, limits: Limits | None = None) -> Listener:
        """Return a listener on a fresh address, or on ``address`` again."""
        fresh = {
            "inproc": f"inproc://kit-{os.getpid()}-{id(self)}",
            "ipc": f"ipc://{self.directory}/kit",
            "tcp": "tcp://127.0.0.1:0",
        }[self.scheme]
        listener = listen(
            address or fresh,
            limits=limits or self.limits,
            keys=self.keys,
            allowed=self.allowed if self.keys is not None else None,
        )
        self.stack.callback(listener.close)
        if not listener.address.startswith(f"{self.scheme}://") or listener.address.endswith(":0"):
            fail(f"a listener on {listener.address}, not a real address of {self.scheme}")
        return listener

    def peer_keys(self, identity: str) -> KeyPair:
        """Return the keys of a peer; they are on the listener's allow-list."""
        own = self._peers.setdefault(identity, new_key_pair())
        self.allowed.add(own.public, identity)
        return own

    def connect(
        self, address: str, identity: str, *, limits: Limits | None = None, server_public: str | None = None
    ) -> Connection:
        """Return a connection under a name that the listener lets in."""
        keys = None
        if self.keys is not None:
            keys = ClientKeys(self.peer_keys(identity), server_public or self.keys.public)
        connection = connect(address, identity=identity, limits=limits or self.limits, keys=keys)
        self.stack.callback(connection.close)
        return connection

    def pair(self, *, limits: Limits | None = None) -> tuple[Listener, Connection]:
        """Return a listener and a connection ``peer`` that have greeted each other."""
        listener = self.listen(limits=limits)
        connection = self.connect(listener.address, "peer", limits=limits)
        greet(listener, connection, "peer")
        return listener, connection


def receive_from(listener: Listener, what: str) -> tuple[str, list[Frame]]:
    """Return the listener's next message. Raises AssertionError when none comes."""
    got = listener.receive(PATIENCE_S)
    return got if got is not None else fail(f"{what}: nothing came")


def receive(connection: Connection, what: str) -> list[Frame]:
    """Return the connection's next message. Raises AssertionError when none comes."""
    got = connection.receive(PATIENCE_S)
    return got if got is not None else fail(f"{what}: nothing came")


def greet(listener: Listener, connection: Connection, identity: str) -> None:
    """Send one message each way."""
    connection.send([b"hello"])
    peer, frames = receive_from(listener, "greeting")
    same((peer, list(map(bytes, frames))), (identity, [b"hello"]), "greeting")
    listener.send(identity, [b"welcome"])
    same(list(map(bytes, receive(connection, "answer"))), [b"welcome"], "answer")
