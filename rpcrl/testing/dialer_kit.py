"""Does a dialer keep the promises of ``transport/base.py``? As ``transport_kit``, for the end that reaches many."""

from __future__ import annotations

import os
from collections.abc import Callable

from rpcrl.errors import ClosedError, PeerUnreachableError, UsageError
from rpcrl.testing.transport_harness import PATIENCE_S, Harness, fail, receive_from, same, wait_until
from rpcrl.transport.base import Dialer, Limits, Listener
from rpcrl.transport.keys import new_key_pair
from rpcrl.transport.open import dialer as open_dialer
from rpcrl.transport.open import listen

__all__ = ["DIALER_CHECKS"]

NAME = "caller"


def _dialer(harness: Harness, *, limits: Limits | None = None) -> Dialer:
    keys = harness.peer_keys(NAME) if harness.keys is not None else None
    opened = open_dialer(harness.scheme, identity=NAME, limits=limits or harness.limits, keys=keys)
    harness.stack.callback(opened.close)
    return opened


def _listeners(harness: Harness, count: int) -> list[Listener]:
    """Return listeners with keys of their own, as workers have them."""
    fresh = {
        "inproc": f"inproc://dialer-kit-{os.getpid()}-{id(harness)}-",
        "ipc": f"ipc://{harness.directory}/many-",
        "tcp": "tcp://127.0.0.1:0",
    }[harness.scheme]
    opened = []
    for number in range(count):
        address = fresh if harness.scheme == "tcp" else f"{fresh}{number}"
        allowed = harness.allowed if harness.keys is not None else None
        listener = listen(address, limits=harness.limits, keys=harness.keys, allowed=allowed)
        harness.stack.callback(listener.close)
        opened.append(listener)
    return opened


def _dial(harness: Harness, dialer: Dialer, peer: str, listener: Listener) -> None:
    dialer.dial(peer, listener.address, server_public=harness.keys.public if harness.keys is not None else None)


def reaches_each_listener(harness: Harness) -> None:
    """A message goes to the listener that was named and to no other, and an answer says where it comes from."""
    dialer, listeners = _dialer(harness), _listeners(harness, 4)
    for number, listener in enumerate(listeners):
        _dial(harness, dialer, f"l{number}", listener)
    big = os.urandom(1 << 20)
    for number in range(4):
        for turn in range(50):
            dialer.send(f"l{number}", [f"{number}.{turn}".encode(), big])
    for number, listener in enumerate(listeners):
        for turn in range(50):
            peer, frames = receive_from(listener, f"message {turn} of listener {number}")
            same((peer, bytes(frames[0])), (NAME, f"{number}.{turn}".encode()), "message")
            listener.send(NAME, [b"%d" % number, frames[1]])
    seen = dict.fromkeys(range(4), 0)
    for _ in range(200):
        answer = dialer.receive(PATIENCE_S) or fail(f"an answer is missing; so far {seen}")
        same(answer[0], f"l{bytes(answer[1][0]).decode()}", "sender of an answer")
        same(bytes(answer[1][1]) == big, True, "content of an answer")
        seen[int(bytes(answer[1][0]))] += 1
    same(set(seen.values()), {50}, "answers of each listener")


def waits_for_a_listener(harness: Harness) -> None:
    """What is sent before the listener is there arrives when it is."""
    if harness.scheme == "tcp":
        return  # its port is only known once it listens
    first = _listeners(harness, 1)[0]
    address = first.address
    first.close()
    dialer = _dialer(harness)
    dialer.dial("late", address)
    dialer.send("late", [b"early"])
    listener = listen(address, limits=harness.limits)
    harness.stack.callback(listener.close)
    same(bytes(receive_from(listener, "early message")[1][0]), b"early", "early message")


def hangs_up(harness: Harness) -> None:
    """After ``hang_up`` nothing goes there; the name can be dialled again."""
    dialer, (one, other) = _dialer(harness), _listeners(harness, 2)
    _dial(harness, dialer, "peer", one)
    dialer.send("peer", [b"to one"])
    receive_from(one, "first message")
    wrongs: list[Callable[[], None]] = [
        lambda: _dial(harness, dialer, "peer", other),
        lambda: dialer.send("nobody", [b"x"]),
    ]
    for wrong in wrongs:
        try:
            wrong()
        except (UsageError, PeerUnreachableError):
            continue
        fail("a name in use was dialled again, or a message to nobody was taken")
    dialer.hang_up("peer")
    dialer.hang_up("peer")
    try:
        dialer.send("peer", [b"x"])
    except PeerUnreachableError:
        pass
    else:
        fail("a message to a peer that was hung up was taken")
    _dial(harness, dialer, "peer", other)
    dialer.send("peer", [b"to the other"])
    same(bytes(receive_from(other, "message after redial")[1][0]), b"to the other", "message after redial")


def full_queue_raises(harness: Harness) -> None:
    """A listener that does not read costs bounded memory, and does not stop messages to another."""
    limits = Limits(max_queued_messages=10)
    dialer, (stalled, reading) = _dialer(harness, limits=limits), _listeners(harness, 2)
    _dial(harness, dialer, "stalled", stalled)
    _dial(harness, dialer, "reading", reading)
    for _ in range(200_000):
        try:
            dialer.send("stalled", [b"x" * 4096])
        except PeerUnreachableError:
            break
    else:
        fail("200,000 messages went to a listener that reads none")
    dialer.send("reading", [b"still"])
    same(bytes(receive_from(reading, "message beside a stalled peer")[1][0]), b"still", "message")


def strangers_stay_out(harness: Harness) -> None:
    """On TCP a dialer whose key is not on the list is not heard, and one without a key is refused here."""
    if harness.keys is None:
        return
    (listener,) = _listeners(harness, 1)
    stranger = open_dialer("tcp", identity=NAME, limits=harness.limits, keys=new_key_pair())
    harness.stack.callback(stranger.close)
    stranger.dial("l", listener.address, server_public=harness.keys.public)
    stranger.send("l", [b"let me in"])

    def turned_away() -> bool:
        if listener.receive(0.01) is not None:
            fail("a stranger was heard")
        return bool(getattr(listener, "rejected", 0))

    wait_until(turned_away, "a stranger was turned away")
    bare = open_dialer("tcp", identity=NAME, limits=harness.limits)
    harness.stack.callback(bare.close)
    try:
        bare.dial("l", listener.address, server_public=harness.keys.public)
    except UsageError:
        return
    fail("a dialer without keys may use TCP")


def closes(harness: Harness) -> None:
    """``close`` is idempotent, and everything after it raises ClosedError."""
    dialer, (listener,) = _dialer(harness), _listeners(harness, 1)
    _dial(harness, dialer, "l", listener)
    dialer.close()
    dialer.close()
    uses: list[Callable[[], object]] = [
        lambda: dialer.send("l", [b"x"]),
        lambda: dialer.receive(0.0),
        lambda: dialer.hang_up("l"),
    ]
    for use in uses:
        try:
            use()
        except ClosedError:
            continue
        fail("a closed dialer was used")


DIALER_CHECKS: tuple[Callable[[Harness], None], ...] = (
    reaches_each_listener,
    waits_for_a_listener,
    hangs_up,
    full_queue_raises,
    strangers_stay_out,
    closes,
)
