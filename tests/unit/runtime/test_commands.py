"""The queue of commands: in order, bounded, and nobody waits for a thread that has ended."""

import threading

import pytest

from rpcrl.runtime.commands import Commands

WITHIN_S = 10.0


def test_commands_are_taken_in_their_order():
    commands, done = Commands(), []
    for number in range(3):
        commands.put(lambda number=number: done.append(number))
    assert len(commands) == 3
    commands.run()
    assert done == [0, 1, 2]
    assert len(commands) == 0


def test_who_comes_when_it_is_full_waits_until_some_are_taken():
    commands, entered = Commands(max_waiting=2), threading.Event()
    for _ in range(2):
        commands.put(lambda: None)

    def third() -> None:
        commands.put(lambda: None)
        entered.set()

    thread = threading.Thread(target=third)
    thread.start()
    assert not entered.wait(0.05)
    commands.run()
    assert entered.wait(WITHIN_S)
    thread.join(WITHIN_S)
    assert len(commands) <= 1


def test_the_taker_itself_never_waits():
    commands = Commands(max_waiting=1)
    commands.put(lambda: [commands.put(lambda: None) for _ in range(3)])
    commands.run()
    assert len(commands) == 3, "what comes while commands run waits for the next turn"


def test_a_command_that_raises_leaves_the_later_ones():
    commands, done = Commands(), []
    commands.put(lambda: done.append(1 / 0))
    commands.put(lambda: done.append("later"))
    with pytest.raises(ZeroDivisionError):
        commands.run()
    commands.end()
    assert done == ["later"]


def test_after_the_end_commands_run_where_they_come_from():
    commands, done = Commands(max_waiting=1), []
    commands.put(lambda: done.append("queued"))
    waiting = threading.Thread(target=lambda: commands.put(lambda: done.append("waited")))
    waiting.start()
    commands.end()
    waiting.join(WITHIN_S)
    assert not waiting.is_alive()
    commands.put(lambda: done.append("late"))
    assert sorted(done) == ["late", "queued", "waited"]
    assert done[0] == "queued"
