"""Placement of requests: examples of each rule, and a machine that does anything in any order."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule

from rpcrl.agents.balancer import Balancer, Placement
from rpcrl.errors import UsageError


def _placed(balancer: Balancer, *conversations: str | None) -> list[str]:
    placements = [balancer.acquire(conversation) for conversation in conversations]
    assert all(placement is not None for placement in placements)
    return [placement.replica for placement in placements if placement is not None]


def test_requests_go_where_the_fewest_are_open():
    balancer = Balancer(["a", "b", "c"])
    assert _placed(balancer, *[None] * 5) == ["a", "b", "c", "a", "b"]
    balancer.release(Placement("b", 2))
    balancer.release(Placement("b", 2))
    assert _placed(balancer, None, None) == ["b", "b"], "b had none open, c and a had more"


def test_balancers_of_several_workers_begin_at_different_replicas():
    firsts = [_placed(Balancer(["a", "b", "c"], first=worker), None)[0] for worker in range(4)]
    assert firsts == ["a", "b", "c", "a"]


def test_a_conversation_stays_even_where_more_is_open():
    balancer = Balancer(["a", "b"])
    assert _placed(balancer, "talk", None, None, None) == ["a", "b", "a", "b"]
    assert _placed(balancer, "talk", "talk") == ["a", "a"]


def test_memory_of_conversations_is_bounded_and_the_longest_silent_goes_first():
    balancer = Balancer(["a", "b"], conversations=2)
    _placed(balancer, "one", "two", "one", "three")
    assert balancer.num_conversations == 2
    assert (balancer.in_flight("a"), balancer.in_flight("b")) == (2, 2)
    assert _placed(balancer, "two") == ["a"], "it was on b, was forgotten, and is placed anew"
    balancer.forget("three")
    assert balancer.num_conversations == 1


def test_deterministic_placement_is_a_function_of_the_conversation_and_the_names():
    one, other = Balancer(["a", "b", "c"], policy="deterministic"), Balancer(["c", "a", "b"], policy="deterministic")
    talks = [f"prompt-{number}/0" for number in range(200)]
    other.acquire("something else that runs meanwhile")
    assert _placed(one, *talks) == _placed(other, *reversed(talks))[::-1]
    assert min(Counter(_placed(one, *talks)).values()) > 30, "and it spreads them"
    with pytest.raises(UsageError, match="needs the name of a conversation"):
        one.acquire()


def test_a_release_of_an_old_registration_does_not_touch_the_new_one():
    balancer = Balancer(["a"])
    old = balancer.acquire("talk")
    assert old is not None
    balancer.remove("a")
    assert balancer.acquire("talk") is None, "nobody takes requests"
    balancer.add("a")
    new = balancer.acquire("talk")
    assert new is not None
    assert (balancer.in_flight("a"), balancer.num_leaving) == (1, 1)
    balancer.release(old)
    assert (balancer.in_flight("a"), balancer.num_leaving) == (1, 0)
    balancer.release(new)
    assert balancer.in_flight("a") == 0


def test_a_loss_that_is_reported_late_does_not_remove_what_came_after():
    balancer = Balancer()
    old = balancer.add("a")
    assert balancer.remove("a", old)
    new = balancer.add("a")
    assert not balancer.remove("a", old)
    assert balancer.replicas == ("a",)
    assert balancer.remove("a", new)


def test_a_draining_replica_finishes_what_it_has_and_takes_nothing_new():
    balancer = Balancer(["a", "b"])
    placement = balancer.acquire("talk")
    assert placement == Placement("a", 1)
    balancer.drain("a")
    assert _placed(balancer, "talk", None, None) == ["b"] * 3, "the conversation moves"
    assert balancer.in_flight("a") == 1
    balancer.release(placement)
    balancer.undrain("a")
    assert _placed(balancer, None) == ["a"]


def test_mistakes_are_named():
    balancer = Balancer(["a"])
    with pytest.raises(UsageError, match="'a' is there already"):
        balancer.add("a")
    with pytest.raises(UsageError, match="no replica 'b'; there are a"):
        balancer.drain("b")
    placement = balancer.acquire()
    assert placement is not None
    balancer.release(placement)
    with pytest.raises(UsageError, match="each placement is released once"):
        balancer.release(placement)
    with pytest.raises(UsageError, match="conversations=0"):
        Balancer(conversations=0)


NAMES = st.sampled_from(["a", "b", "c", "d"])
TALKS = st.one_of(st.none(), st.sampled_from([f"talk-{number}" for number in range(6)]))


class AnyOrder(RuleBasedStateMachine):
    """Replicas come, go and drain while requests are placed and released; a plain list of placements is the truth."""

    placements: Bundle[Placement] = Bundle("placements")

    def __init__(self) -> None:
        super().__init__()
        self.balancer = Balancer(conversations=3)
        self.there: dict[str, int] = {}
        self.draining: set[str] = set()
        self.open: list[Placement] = []
        self.last: dict[str, Placement] = {}

    @rule(name=NAMES)
    def add(self, name: str) -> None:
        if name in self.there:
            with pytest.raises(UsageError):
                self.balancer.add(name)
            return
        self.there[name] = self.balancer.add(name)
        self.draining.discard(name)

    @rule(name=NAMES)
    def remove(self, name: str) -> None:
        assert self.balancer.remove(name) is (name in self.there)
        self.there.pop(name, None)

    @rule(name=NAMES, drain=st.booleans())
    def drain(self, name: str, drain: bool) -> None:
        if name in self.there:
            (self.balancer.drain if drain else self.balancer.undrain)(name)
            (self.draining.add if drain else self.draining.discard)(name)

    @rule(target=placements, conversation=TALKS)
    def acquire(self, conversation: str | None) -> Placement:
        taking = [name for name in self.there if name not in self.draining]
        before = {name: self.balancer.in_flight(name) for name in taking}
        known = None if conversation is None else self.balancer._sticky.get(conversation)
        placement = self.balancer.acquire(conversation)
        if placement is None:
            assert not taking
            return Placement("none", -1)
        assert placement.replica in taking
        assert placement.registration == self.there[placement.replica]
        if known is None:
            assert before[placement.replica] == min(before.values())
        else:
            assert placement == known == self.last[str(conversation)]
        self.open.append(placement)
        if conversation is not None:
            self.last[conversation] = placement
        return placement

    @precondition(lambda self: self.open)
    @rule(placement=consumes(placements))
    def release(self, placement: Placement) -> None:
        if placement in self.open:
            self.open.remove(placement)
            self.balancer.release(placement)

    @invariant()
    def counts_are_those_of_open_requests(self) -> None:
        counts = Counter(self.open)
        for name, registration in self.there.items():
            assert self.balancer.in_flight(name) == counts.pop(Placement(name, registration), 0)
        assert self.balancer.num_leaving == sum(counts.values())
        assert self.balancer.num_conversations <= 3
        assert set(self.balancer.replicas) == set(self.there) - self.draining


AnyOrder.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestAnyOrder = AnyOrder.TestCase
