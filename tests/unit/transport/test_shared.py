"""Do large buffers get past the socket, and does everything else go on as it did?"""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgpack
import numpy as np
import pytest
import torch

from rpcrl.errors import PeerUnreachableError
from rpcrl.leftovers import remove_shared_memory
from rpcrl.shm.buffers import Buffer, Lent, view_of
from rpcrl.shm.exchange import Exchange
from rpcrl.transport.base import Connection, Frame
from rpcrl.transport.open import connect, listen
from rpcrl.transport.shared import SharingEnd, without_note
from rpcrl.wire.codec import decode, encode
from rpcrl.wire.frames import from_frames, to_frames
from rpcrl.wire.messages import CallId, Encoded, Result

MIB = 1 << 20
WAIT_S = 20.0


class Ended:
    """A connection, seen as an end with the one peer ``server``."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.wake, self.close = connection.wake, connection.close

    def send(self, peer: str, frames: Sequence[Buffer]) -> None:
        self._connection.send(frames)

    def receive(self, timeout_s: float | None) -> tuple[str, list[Frame]] | None:
        frames = self._connection.receive(timeout_s)
        return None if frames is None else ("server", frames)


@dataclass
class Pair:
    server: SharingEnd
    client: SharingEnd
    plain: Ended
    """What the client's end sends by."""
    at_server: Exchange
    at_client: Exchange


@pytest.fixture(params=["inproc", "ipc"])
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Pair]:
    run_id = f"test-{os.getpid()}-{secrets.token_hex(6)}"
    address = f"inproc://{run_id}" if request.param == "inproc" else f"ipc://{tmp_path}/s"
    listener = listen(address)
    plain = Ended(connect(address, identity="client"))
    exchanges = [Exchange(run_id, name, 64 * MIB) for name in ("server", "client")]
    made = Pair(SharingEnd(listener, exchanges[0]), SharingEnd(plain, exchanges[1]), plain, *exchanges)
    try:
        made.client.send("server", [b"hello"])
        assert made.server.receive(WAIT_S) == ("client", [b"hello"])
        yield made
    finally:
        made.client.close()
        made.server.close()
        for exchange in exchanges:
            exchange.close()
        remove_shared_memory(run_id)


def _frames(pair: Pair, value: object, receiver: str = "server") -> list[Buffer]:
    exchange = pair.at_client if receiver == "server" else pair.at_server
    encoded = encode(value)
    payload = Encoded(encoded.tree, exchange.place(encoded.buffers, [receiver]))
    return to_frames(Result(CallId("c", "i", 1), payload))


def _value(received: tuple[str, Sequence[Buffer]] | None) -> object:
    assert received is not None
    message = from_frames(received[1])
    assert isinstance(message, Result)
    return decode(message.payload)


def test_a_value_arrives_as_it_was_both_ways(pair: Pair) -> None:
    value = {"x": torch.arange(1 << 18), "y": np.ones(200), "z": np.full((300, 300), 2.5), "b": b"c" * MIB, "t": "text"}
    for end, other, name in ((pair.client, pair.server, "server"), (pair.server, pair.client, "client")):
        end.send(name, _frames(pair, value, name))
        got = _value(other.receive(WAIT_S))
        assert isinstance(got, dict)
        assert torch.equal(got["x"], value["x"])  # type: ignore[arg-type]
        assert np.array_equal(got["y"], value["y"])  # type: ignore[arg-type]
        assert np.array_equal(got["z"], value["z"])  # type: ignore[arg-type]
        assert (got["b"], got["t"]) == (value["b"], value["t"])
        got["x"].add_(1)
        got["z"][:] = 0
    assert pair.at_client.arena.shared_bytes == pair.at_server.arena.shared_bytes == (2 << 20) + 720_000 + MIB


def test_only_a_note_goes_through_the_socket(pair: Pair) -> None:
    sent: list[Sequence[Buffer]] = []
    send = pair.plain.send
    pair.plain.send = lambda peer, frames: (sent.append(frames), send(peer, frames))[1]  # type: ignore[method-assign]
    pair.client.send("server", _frames(pair, torch.zeros(MIB)))
    assert sum(view_of(frame).nbytes for frame in sent[0]) < 512
    assert torch.equal(_value(pair.server.receive(WAIT_S)), torch.zeros(MIB))  # type: ignore[arg-type]


def test_a_lease_lasts_from_sending_to_the_end_of_the_last_view(pair: Pair) -> None:
    pair.client.send("server", _frames(pair, torch.arange(MIB)))
    assert pair.at_client.arena.num_leased() == 1
    value = _value(pair.server.receive(WAIT_S))
    assert isinstance(value, torch.Tensor)
    row = value[5:7]
    del value
    assert pair.at_client.arena.num_leased() == 1
    assert row.tolist() == [5, 6]
    del row
    assert pair.at_client.arena.num_leased() == 0


def test_frames_that_are_kept_can_be_sent_again(pair: Pair) -> None:
    frames = _frames(pair, torch.arange(MIB))
    for _ in range(2):  # as a reply cache does
        pair.client.send("server", frames)
        value = _value(pair.server.receive(WAIT_S))
        assert isinstance(value, torch.Tensor)
        assert torch.equal(value, torch.arange(MIB))
        value.zero_()


def test_what_cannot_be_sent_is_not_lent(pair: Pair) -> None:
    Exchange(pair.at_server._run_id, "stranger", 0).close()
    pair.at_server._near["stranger"] = True
    encoded = encode(torch.zeros(MIB))
    frames: list[Buffer] = [b"head", *pair.at_server.arena.place(encoded.buffers)]
    with pytest.raises(PeerUnreachableError):
        pair.server.send("stranger", frames)
    assert pair.at_server.arena.num_leased() == 0


def test_a_peer_that_does_not_share_gets_the_bytes(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    frames = _frames(pair, torch.arange(MIB))
    monkeypatch.setattr(pair.at_client, "is_near", lambda peer: False)
    pair.client.send("server", frames)
    received = pair.server.receive(WAIT_S)
    assert received is not None
    assert not any(isinstance(frame, Lent) for frame in received[1])
    assert torch.equal(_value(received), torch.arange(MIB))  # type: ignore[arg-type]
    assert pair.at_client.arena.num_leased() == 0


NOTES = {
    "empty": b"\xc1",
    "no message": b"\xc1\x90",
    "no msgpack": b"\xc1\xc1\xc1",
    "no note": b"\xc1" + msgpack.packb([1, 2, 3]),
    "a class": b"\xc1" + msgpack.packb(msgpack.ExtType(5, b"x")),
    "of nobody": b"\xc1" + msgpack.packb(["0" * 16, [[0, 0, 1]], [[0, 0, 0, 100]]]),
}


@pytest.mark.parametrize("kind", NOTES)
def test_a_wrong_note_costs_its_message_and_no_other(pair: Pair, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        pair.plain.send("server", [NOTES[kind]] if kind == "no message" else [NOTES[kind], b"head", b"rest"])
        pair.client.send("server", _frames(pair, torch.arange(MIB)))
        assert torch.equal(_value(pair.server.receive(WAIT_S)), torch.arange(MIB))  # type: ignore[arg-type]
    assert len([record for record in caplog.records if "was dropped" in record.getMessage()]) == 1


def test_p58_small_and_large_parts_in_any_order_survive_the_senders_next_step(pair: Pair) -> None:
    for order in (("big", "small"), ("small", "big")):
        source = {"big": np.arange(MIB), "small": np.arange(1000)}
        expected = {name: source[name].copy() for name in order}
        pair.client.send("server", _frames(pair, {name: source[name] for name in order}))
        for array in source.values():
            array[:] = -1  # nobody has read yet
        got = _value(pair.server.receive(WAIT_S))
        assert isinstance(got, dict)
        assert all(np.array_equal(got[name], expected[name]) for name in order)


def test_envelopes_can_be_looked_at_without_the_note(pair: Pair) -> None:
    sent: list[Sequence[Buffer]] = []
    pair.plain.send = lambda peer, frames: sent.append(frames)  # type: ignore[method-assign]
    pair.client.send("server", _frames(pair, torch.zeros(MIB)))
    assert isinstance(from_frames(without_note(sent[0])), Result)
    assert without_note([b"\x90"]) == [b"\x90"]
