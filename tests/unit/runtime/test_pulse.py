"""The rule of heartbeats: what is a death, and what is not?"""

from __future__ import annotations

from rpcrl.runtime.pulse import Silences

HERE, AWAY = {"w": True}, {"w": False}


def look(silences: Silences, seen: dict[str, bool], start: float, end: float) -> list[tuple[float, str, float]]:
    """Look every quarter second from start to end; return what is reported, with its time."""
    told = []
    now = start
    while now <= end:
        told += [(now, *entry) for entry in silences.on_look(seen, now=now)]
        now += 0.25
    return told


def test_a_peer_that_stays_away_is_given_up():
    silences = Silences(1.0, now=0.0)
    assert look(silences, HERE, 0.25, 5.0) == []
    told = look(silences, AWAY, 5.25, 6.0)
    assert told[0] == (5.75, "w", 2.0)


def test_one_that_comes_back_in_time_is_not():
    silences = Silences(1.0, now=0.0)
    for start in (1.0, 2.0, 3.0):
        assert look(silences, AWAY, start, start + 0.25) == []
        assert look(silences, HERE, start + 0.5, start + 0.75) == []


def test_after_the_drivers_own_pause_everybody_gets_time_to_come_back():
    silences = Silences(1.0, now=0.0)
    assert look(silences, HERE, 0.25, 1.0) == []
    assert look(silences, AWAY, 61.0, 62.75) == []
    assert look(silences, HERE, 63.0, 70.0) == []
    assert look(silences, AWAY, 70.25, 71.0)[0][0] == 70.75, "the pause is forgotten"


def test_one_that_was_lost_before_the_pause_gets_time_too_but_not_for_ever():
    silences = Silences(1.0, now=0.0)
    assert look(silences, AWAY, 0.25, 0.5) == []
    told = look(silences, AWAY, 100.0, 103.0)
    assert told[0][0] == 102.0


def test_who_is_forgotten_is_not_reported():
    silences = Silences(1.0, now=0.0)
    assert look(silences, AWAY, 0.25, 0.5) == []
    assert look(silences, {}, 0.75, 5.0) == []
