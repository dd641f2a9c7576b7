"""Slow calls: when are they asked about, and what is told?"""

from __future__ import annotations

import itertools

from rpcrl.errors import PeerUnreachableError
from rpcrl.runtime.caller import Caller, Part, Seat
from rpcrl.runtime.future import PendingReplies
from rpcrl.runtime.watchdog import ANSWER_S, Watchdog
from rpcrl.wire.messages import AskProgress, Encoded, Message, Progress, Result, Step

STACK = '  File "actor.py", line 7, in update\n    reduce()\n'


class Scene:
    """A caller of three workers, what was sent to them, and what was told."""

    def __init__(self, report_after_s: float | None = 10.0) -> None:
        self.asked: list[tuple[str, AskProgress]] = []
        self.told: list[str] = []
        self.unreachable: set[str] = set()
        self.caller = Caller("controller", lambda *_: None, lambda identity: Seat("g", int(identity[1])))
        self.watchdog = Watchdog(self.caller, self.send, report_after_s=report_after_s, tell=self.told.append)
        for rank in range(3):
            self.caller.add_peer(f"w{rank}", f"life {rank}")

    def send(self, identity: str, message: Message) -> None:
        if identity in self.unreachable:
            raise PeerUnreachableError(identity)
        assert isinstance(message, AskProgress)
        self.asked.append((identity, message))

    def call(self) -> tuple[PendingReplies, float]:
        pending = PendingReplies("actor.update on group 'g'", range(3))
        self.caller.call("actor", "update", [Part(f"w{rank}", Encoded(b"")) for rank in range(3)], pending)
        return pending, next(entry[4] for entry in self.caller.open_calls())

    def answer(self, runs: bool, seconds: float, stack: str, method: str = "actor.update") -> None:
        _identity, message = self.asked.pop(0)
        self.watchdog.take(Progress((Step(message.call_ids[0], runs, method, seconds, stack),)))


def test_ranks_of_one_stack_are_told_together():
    scene = Scene()
    _, opened_at = scene.call()
    scene.watchdog.tick(now=opened_at + 9.9)
    assert scene.asked == []
    scene.watchdog.tick(now=opened_at + 12.5)
    assert [identity for identity, _ in scene.asked] == ["w0", "w1", "w2"]
    scene.answer(True, 12.0, STACK)
    scene.answer(True, 12.4, STACK)
    assert scene.told == []
    scene.answer(False, 11.0, "elsewhere\n", "actor.save")
    [text] = scene.told
    head, *rest = text.splitlines()
    assert head.startswith("actor.update on group 'g' has no reply for 12.5 s")
    assert rest[0] == "  ranks 0–1 in actor.update for 12.4 s, at"
    assert rest[1] == '      File "actor.py", line 7, in update'
    assert "  rank 2 has not begun it: in actor.save for 11.0 s, at" in rest


def test_who_does_not_answer_is_told_too():
    scene = Scene()
    scene.unreachable = {"w2"}
    _, opened_at = scene.call()
    scene.watchdog.tick(now=opened_at + 12.5)
    scene.answer(True, 12.0, STACK)
    scene.watchdog.tick(now=opened_at + 12.5 + ANSWER_S - 0.1)
    assert scene.told == []
    assert scene.watchdog.next_tick_at() == opened_at + 12.5 + ANSWER_S
    scene.watchdog.tick(now=opened_at + 12.5 + ANSWER_S)
    assert "ranks 1–2 gave no answer within 1 s: the interpreter is held by one long step" in scene.told[0]


def test_a_call_is_told_of_again_when_it_is_twice_as_old():
    scene = Scene()
    _, opened_at = scene.call()
    told_at = []
    for second in range(1, 100):
        before = len(scene.told)
        scene.watchdog.tick(now=opened_at + second)
        while scene.asked:
            scene.answer(True, second, STACK)
        told_at += [second] * (len(scene.told) - before)
    assert told_at[0] in (10, 11, 12)
    assert [round(later / earlier) for earlier, later in itertools.pairwise(told_at)] == [2] * 3


def test_what_has_ended_meanwhile_is_not_told_of():
    scene = Scene()
    pending, opened_at = scene.call()
    scene.watchdog.tick(now=opened_at + 12.5)
    for identity, _, _, call_id, _ in list(scene.caller.open_calls()):
        scene.caller.take(identity, Result(call_id, Encoded(b"")))
    assert pending.settled.done()
    scene.watchdog.tick(now=opened_at + 20)
    assert scene.told == []
    assert scene.watchdog.next_tick_at() is None


def test_without_a_bound_nobody_is_asked():
    scene = Scene(report_after_s=None)
    _, opened_at = scene.call()
    scene.watchdog.tick(now=opened_at + 1e6)
    assert scene.asked == []
    assert scene.watchdog.next_tick_at() is None
