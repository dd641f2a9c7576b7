"""Are addresses, identities and socket directories checked before anything is opened, in words that help?"""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from rpcrl.errors import TransportError, UsageError
from rpcrl.transport.addresses import MAX_IPC_PATH_BYTES, prepare_ipc_path
from rpcrl.transport.base import ClientKeys, KeyPair
from rpcrl.transport.keys import AllowList, new_key_pair
from rpcrl.transport.open import connect, listen


@pytest.fixture
def private(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("d")
    directory.chmod(0o700)
    return directory


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("", "no address"),
        ("/tmp/x", "no address"),
        ("udp://127.0.0.1:1", "no address"),
        ("ipc://relative/path", "must be absolute"),
        ("tcp://127.0.0.1", "has no port"),
        ("tcp://127.0.0.1:http", "has no port"),
        ("inproc://", "no address"),
    ],
)
def test_bad_addresses(address: str, words: str) -> None:
    for call in (lambda: listen(address), lambda: connect(address, identity="w0")):
        with pytest.raises(UsageError, match=words):
            call()


def test_long_ipc_paths_are_refused_with_the_numbers(private: Path) -> None:
    room = MAX_IPC_PATH_BYTES - len(os.fsencode(private)) - 1
    with pytest.raises(
        UsageError, match=r"has 108 bytes and the kernel takes at most 107; use a shorter run directory"
    ):
        listen(f"ipc://{private}/{'x' * (room + 1)}")
    listener = listen(f"ipc://{private}/{'x' * room}")
    listener.close()


@pytest.mark.parametrize("mode", [0o755, 0o750, 0o701, 0o777])
def test_directories_that_others_can_enter_are_refused(private: Path, mode: int) -> None:
    private.chmod(mode)
    with pytest.raises(TransportError, match=rf"mode {mode:04o} .* chmod 700"):
        listen(f"ipc://{private}/s")
    assert not (private / "s").exists()


def test_a_missing_directory_is_made_private(private: Path) -> None:
    before = os.umask(0)
    try:
        listener = listen(f"ipc://{private}/a/b/s")
    finally:
        os.umask(before)
    try:
        assert (private / "a" / "b").stat().st_mode & 0o777 == 0o700
        assert (private / "a" / "b" / "s").is_socket()
    finally:
        listener.close()
    assert not (private / "a" / "b" / "s").exists()


def test_a_live_socket_is_not_taken_over_and_a_dead_one_is(private: Path) -> None:
    path = private / "s"
    listener = listen(f"ipc://{path}")
    with pytest.raises(TransportError, match="another live process listens"):
        listen(f"ipc://{path}")
    assert path.is_socket()
    listener.close()
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))  # and its file stays behind
    listen(f"ipc://{path}").close()
    path.write_text("mine", encoding="ascii")
    with pytest.raises(TransportError, match="exists and is not a socket"):
        prepare_ipc_path(path)
    assert path.read_text(encoding="ascii") == "mine"


@pytest.mark.parametrize("identity", ["", "x" * 201, "a\nb", "a\0b", "ü" * 101])
def test_bad_identities(identity: str) -> None:
    for address in ("inproc://x", "ipc:///tmp/x"):
        with pytest.raises(UsageError, match="no identity"):
            connect(address, identity=identity)


def test_tcp_without_keys_is_refused() -> None:
    own = new_key_pair()
    for call in (
        lambda: listen("tcp://127.0.0.1:0"),
        lambda: listen("tcp://127.0.0.1:0", keys=own),
        lambda: listen("tcp://127.0.0.1:0", allowed=AllowList()),
        lambda: connect("tcp://127.0.0.1:1", identity="w0"),
    ):
        with pytest.raises(UsageError, match="there is no unprotected TCP"):
            call()


def test_keys_that_are_none_are_refused_and_never_shown() -> None:
    good = new_key_pair()
    bad = KeyPair(good.public, good.secret[:-1])
    for call in (
        lambda: listen("tcp://127.0.0.1:0", keys=bad, allowed=AllowList()),
        lambda: connect("tcp://127.0.0.1:1", identity="w0", keys=ClientKeys(bad, good.public)),
        lambda: connect("tcp://127.0.0.1:1", identity="w0", keys=ClientKeys(good, "short")),
    ):
        with pytest.raises(UsageError, match="a CURVE key is 40 characters") as caught:
            call()
        assert good.secret[:10] not in str(caught.value)
    assert good.secret not in repr(good)
    assert good.secret not in repr(ClientKeys(good, good.public))


def test_keys_within_a_process_are_a_mistake() -> None:
    with pytest.raises(UsageError, match="protect nothing"):
        listen("inproc://x", keys=new_key_pair(), allowed=AllowList())


def test_an_address_in_use_is_told() -> None:
    keys, allowed = new_key_pair(), AllowList()
    listener = listen("tcp://127.0.0.1:0", keys=keys, allowed=allowed)
    try:
        with pytest.raises(TransportError, match=r"cannot listen on .*Address already in use"):
            listen(listener.address, keys=keys, allowed=allowed)
    finally:
        listener.close()
    first = listen("inproc://taken")
    try:
        with pytest.raises(TransportError, match="in use"):
            listen("inproc://taken")
    finally:
        first.close()
