"""The calling half: replies that come twice, workers that are not known, calls that are cancelled on their way."""

from __future__ import annotations

import concurrent.futures
import gc

import pytest

from rpcrl.errors import ClosedError
from rpcrl.runtime.caller import Caller, Part, Seat
from rpcrl.runtime.future import PendingReplies
from rpcrl.wire.codec import encode
from rpcrl.wire.messages import Call, Free, Message, Result

NOTHING = encode(((), {}))


class Wire:
    def __init__(self) -> None:
        self.sent: list[tuple[str, Message]] = []
        self.caller = Caller("controller", lambda peer, message: self.sent.append((peer, message)), self.seat)
        self.caller.add_peer("w0", "life")

    def seat(self, identity: str) -> Seat:
        return Seat("g", 0)

    def call(self, identity: str = "w0") -> tuple[PendingReplies, Call]:
        pending = PendingReplies("r.m", [0])
        self.caller.call("r", "m", [Part(identity, NOTHING)], pending)
        message = self.sent[-1][1]
        assert isinstance(message, Call)
        return pending, message

    def freed(self) -> list[int]:
        self.caller.ask()
        return [key for _, message in self.sent if isinstance(message, Free) for key in message.keys]


def test_a_reply_that_comes_twice_does_not_free_what_is_held() -> None:
    wire = Wire()
    pending, call = wire.call()
    wire.caller.take("w0", Result(call.call_id, NOTHING, 7))
    [reply] = pending.settled.result(0)
    wire.caller.take("w0", Result(call.call_id, NOTHING, 7))
    gc.collect()
    assert wire.freed() == []
    del reply, pending
    gc.collect()
    assert wire.freed() == [7]


def test_a_result_that_nobody_waits_for_is_freed() -> None:
    wire = Wire()
    pending, call = wire.call()
    pending.fail(concurrent.futures.CancelledError())
    wire.caller.cancel(pending)
    wire.caller.take("w0", Result(call.call_id, NOTHING, 8))
    gc.collect()
    assert wire.freed() == [8]


def test_a_worker_that_is_not_known_fails_the_call_and_not_the_thread() -> None:
    wire = Wire()
    pending = PendingReplies("r.m", [0])
    wire.caller.call("r", "m", [Part("stranger", NOTHING)], pending)
    with pytest.raises(ClosedError, match="stranger is no worker"):
        pending.settled.result(0)


def test_a_call_that_is_cancelled_on_its_way_is_not_sent() -> None:
    wire = Wire()
    pending = PendingReplies("r.m", [0])
    pending.fail(concurrent.futures.CancelledError())
    wire.caller.call("r", "m", [Part("w0", NOTHING)], pending)
    assert wire.sent == []
