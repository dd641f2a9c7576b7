"""A peer that runs is heard, whatever it does; one that does not is found out, and known again when it comes back."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rpcrl.errors import UsageError
from rpcrl.transport.base import ClientKeys
from rpcrl.transport.keys import AllowList, new_key_pair
from rpcrl.transport.pulse import CUT_AFTER, Pulse, PulseListener

HEARTBEAT_S = 0.4

PEER = """
import ctypes, sys
from rpcrl.transport.base import ClientKeys, KeyPair
from rpcrl.transport.pulse import Pulse

address, hold, *keys = sys.argv[1:]
pulse = Pulse(address, "w", keys=ClientKeys(KeyPair(*keys[:2]), keys[2]) if keys else None)
print("there", flush=True)
if hold == "hold":
    ctypes.PyDLL(None).sleep(60)  # with the interpreter lock
sys.stdin.readline()
pulse.close()
"""


@pytest.fixture(params=["ipc", "tcp"])
def listening(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[PulseListener, list[str]]]:
    """A listener, and the arguments with which a peer reaches it."""
    if request.param == "ipc":
        (tmp_path / "private").mkdir(mode=0o700)
        listener = PulseListener(f"ipc://{tmp_path}/private/pulse.sock", heartbeat_s=HEARTBEAT_S)
        keys = []
    else:
        server, own, allowed = new_key_pair(), new_key_pair(), AllowList()
        allowed.add(own.public, "w")
        listener = PulseListener("tcp://127.0.0.1:0", heartbeat_s=HEARTBEAT_S, keys=server, allowed=allowed)
        keys = [own.public, own.secret, server.public]
    try:
        yield listener, keys
    finally:
        listener.close()


@contextmanager
def peer(listener: PulseListener, keys: list[str], hold: str = "") -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", PEER, listener.address, hold, *keys]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "there\n"
        look_until(listener, lambda seen: seen == {"w": True}, 20)
        yield process
    finally:
        process.kill()
        process.communicate()


def look_until(listener: PulseListener, wanted: Callable[[dict[str, bool]], bool], within_s: float) -> float:
    """Look until it is as wanted; return the seconds that this took."""
    started = time.monotonic()
    while not wanted(seen := listener.look(0.02)):
        assert time.monotonic() - started < within_s, f"not within {within_s} s: {seen}"
    return time.monotonic() - started


def test_a_stopped_peer_is_cut_off_and_known_again_when_it_goes_on(listening):
    listener, keys = listening
    with peer(listener, keys) as process:
        process.send_signal(signal.SIGSTOP)
        took_s = look_until(listener, lambda seen: seen == {"w": False}, 10)
        assert took_s > HEARTBEAT_S * 0.9, "the connection stands: only time can tell"
        assert took_s < HEARTBEAT_S * (CUT_AFTER + 1.0)
        process.send_signal(signal.SIGCONT)
        look_until(listener, lambda seen: seen == {"w": True}, 10)


def test_a_peer_that_holds_the_interpreter_lock_is_heard(listening):
    listener, keys = listening
    with peer(listener, keys, "hold") as process:
        until = time.monotonic() + HEARTBEAT_S * 6
        while time.monotonic() < until:
            assert listener.look(0.02) == {"w": True}
        assert process.poll() is None


def test_a_peer_that_ends_is_gone_at_once(listening):
    listener, keys = listening
    with peer(listener, keys) as process:
        process.kill()
        process.wait()
        assert look_until(listener, lambda seen: seen == {"w": False}, 10) < HEARTBEAT_S
        listener.forget("w")
        assert listener.look(0.0) == {}


def test_an_orderly_close_is_seen(listening):
    listener, keys = listening
    with peer(listener, keys) as process:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
        process.wait(20)
        look_until(listener, lambda seen: seen == {"w": False}, 10)


def test_a_peer_without_a_listed_key_is_never_known():
    server, own, stranger, allowed = new_key_pair(), new_key_pair(), new_key_pair(), AllowList()
    allowed.add(own.public, "w")
    listener = PulseListener("tcp://127.0.0.1:0", heartbeat_s=HEARTBEAT_S, keys=server, allowed=allowed)
    try:
        other = Pulse(listener.address, "w", keys=ClientKeys(stranger, server.public))
        liar = Pulse(listener.address, "v", keys=ClientKeys(own, server.public))
        until = time.monotonic() + 10
        while listener.rejected < 2:
            assert listener.look(0.02) == {}
            assert time.monotonic() < until
        other.close()
        liar.close()
        honest = Pulse(listener.address, "w", keys=ClientKeys(own, server.public))
        look_until(listener, lambda seen: seen == {"w": True}, 10)
        honest.close()
    finally:
        listener.close()


def test_addresses_that_no_pulse_can_use():
    with pytest.raises(UsageError, match="keys on TCP"):
        Pulse("tcp://127.0.0.1:1", "w")
    with pytest.raises(UsageError, match="another process"):
        Pulse("inproc://x", "w")
