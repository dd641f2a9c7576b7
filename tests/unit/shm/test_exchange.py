"""With whom does a process share memory, and what becomes of it when the other has gone?"""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rpcrl.errors import DecodeError
from rpcrl.leftovers import remove_shared_memory, shared_memory_prefix
from rpcrl.shm import exchange as exchange_module
from rpcrl.shm.buffers import Lent, Placed
from rpcrl.shm.exchange import Exchange, open_exchange
from tests.unit.shm.conftest import MIB


@pytest.fixture
def join() -> Iterator[Callable[[str], Exchange]]:
    run_id, joined = f"test-{os.getpid()}-{secrets.token_hex(6)}", []

    def make(identity: str) -> Exchange:
        joined.append(Exchange(run_id, identity, 64 * MIB))
        return joined[-1]

    yield make
    for each in joined:
        each.close()
    remove_shared_memory(run_id)


def test_only_a_peer_that_sees_this_memory_is_near(join: Callable[[str], Exchange]) -> None:
    a = join("a")
    assert not a.is_near("b")
    b = join("b")
    assert a.is_near("b")
    assert b.is_near("a")
    assert not a.is_near("somebody on another host")


def test_a_file_of_another_boot_proves_nothing(
    join: Callable[[str], Exchange], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    a = join("a")
    other = tmp_path / "boot_id"
    other.write_text("0f0e0d0c-another-kernel\n")
    monkeypatch.setattr(exchange_module, "_BOOT_ID", other)
    b = join("b")
    assert not a.is_near("b")
    assert not b.is_near("a")


def test_a_process_in_another_folder_is_not_near(
    join: Callable[[str], Exchange], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    a = join("a")
    with monkeypatch.context() as elsewhere:  # what a container with a /dev/shm of its own sees
        for module in ("files", "budget"):
            elsewhere.setattr(f"rpcrl.shm.{module}.SHARED_MEMORY", str(tmp_path))
        b = join("b")
        assert not b.is_near("a")
    assert not a.is_near("b")


def test_nothing_is_placed_for_peers_that_cannot_see_it(join: Callable[[str], Exchange]) -> None:
    a, content = join("a"), b"x" * MIB
    assert a.place([content], ["far"]) == (content,)
    join("b")
    assert isinstance(a.place([content], ["far", "b"])[0], Placed)


def test_a_placed_buffer_goes_as_bytes_to_a_peer_that_is_not_near(join: Callable[[str], Exchange]) -> None:
    a = join("a")
    join("b")
    placed = a.place([b"x" * MIB], ["b"])
    assert a.lend("far", placed) is None
    assert a.lend("b", [b"small"]) is None
    assert a.lend("b", placed) is not None


def test_buffers_come_together_in_their_order(join: Callable[[str], Exchange]) -> None:
    a, b = join("a"), join("b")
    placed = a.place([b"1", b"2" * MIB, b"3", b"4" * MIB], ["b"])
    lent = a.lend("b", placed)
    assert lent is not None
    merged = b.merge(lent[0], [b"1", b"3"])
    assert [type(each) for each in merged] == [bytes, Lent, bytes, Lent]
    with pytest.raises(DecodeError, match="beyond"):
        b.merge(a.lend("b", placed)[0], [b"1"])  # type: ignore[index]


def test_what_has_gone_holds_nothing_and_leaves_nothing(join: Callable[[str], Exchange]) -> None:
    a, b = join("a"), join("b")
    lent = a.lend("b", a.place([b"x" * MIB], ["b"]))
    assert lent is not None
    received = b.merge(lent[0], [])
    answer = b.place([b"y" * MIB], ["a"])
    assert a.arena.num_leased() == 1
    a.gone("b", remove=True)
    assert a.arena.num_leased() == 0
    prefix = shared_memory_prefix(a._run_id)
    assert not list(Path("/dev/shm").glob(f"{prefix}{b.arena.tag}-*"))
    assert not a.is_near("b")
    assert received
    assert answer


def test_the_end_of_a_peer_is_seen_by_those_whom_nobody_tells(
    join: Callable[[str], Exchange], monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b, driver = join("a"), join("b"), join("driver")
    lent = a.lend("b", a.place([b"x" * MIB], ["b"]))
    assert lent is not None
    received = b.merge(lent[0], [])
    monkeypatch.setattr(exchange_module, "TIDY_S", 0.0)
    a.tidy()
    assert a.arena.num_leased() == 1
    driver.gone("b", remove=True)
    a.tidy()
    assert a.arena.num_leased() == 0
    assert received


def test_without_a_folder_for_it_there_is_one_warning_and_no_sharing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("rpcrl.shm.files.SHARED_MEMORY", str(tmp_path / "missing"))
    with caplog.at_level(logging.WARNING):
        assert open_exchange("run", "a") is None
        assert open_exchange("run", "a", 0) is None  # asked for: nothing to warn of
    assert len(caplog.records) == 1
    assert "shared_memory_bytes" in caplog.records[0].getMessage()
