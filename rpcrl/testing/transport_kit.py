"""Does a transport keep the promises of ``transport/base.py``?

A test suite makes a ``Harness`` per transport and runs every function of ``CHECKS`` on it. Each check raises
AssertionError when a promise is broken. ``rpcrl`` runs them on inproc, ipc and tcp with CURVE.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from rpcrl.errors import ClosedError, MessageTooLargeError, PeerUnreachableError
from rpcrl.testing.transport_harness import (
    PATIENCE_S,
    Harness,
    fail,
    greet,
    receive,
    receive_from,
    same,
    wait_until,
)
from rpcrl.transport.base import Connection, Frame, Listener

__all__ = ["CHECKS", "Harness", "wait_until"]


def really_runs(harness: Harness) -> None:
    """What runs is the transport that was asked for, seen from the kernel."""
    listener, _ = harness.pair()
    module = type(listener).__module__
    same(module.rpartition(".")[2], "inproc" if harness.scheme == "inproc" else "zeromq", "implementation")
    target = listener.address.partition("://")[2]
    if harness.scheme == "ipc" and target not in Path("/proc/net/unix").read_text(encoding="ascii"):
        fail(f"the kernel knows no unix socket {target}")
    if harness.scheme == "tcp":
        port = int(target.rpartition(":")[2])
        local = [line.split()[1] for line in Path("/proc/net/tcp").read_text(encoding="ascii").splitlines()[1:]]
        if f"0100007F:{port:04X}" not in local:
            fail(f"the kernel knows no TCP socket on 127.0.0.1:{port}")


def keeps_frames(harness: Harness) -> None:
    """Messages arrive whole, whatever kind of buffer carries them; long ones too, empty ones too."""
    listener, connection = harness.pair()
    big = os.urandom(3 << 20)
    message: list[Frame] = [b"a", bytearray(b"bb"), memoryview(b"ccc"), b"", memoryview(big), b"end"]
    wanted = [b"a", b"bb", b"ccc", b"", big, b"end"]
    for _ in range(2):
        connection.send(message)
        same(list(map(bytes, receive_from(listener, "frames up")[1])), wanted, "frames up")
        listener.send("peer", message)
        got = receive(connection, "frames down")
        same(list(map(bytes, got)), wanted, "frames down")
        if any(type(frame) is not bytearray for frame in got[1:]):
            fail("received buffers must be bytearrays of the receiver's own")


def takes_frames_over(harness: Harness) -> None:
    """The caller may change its buffers as soon as ``send`` has returned."""
    listener, connection = harness.pair()
    for size in (10, 4096, 64 << 10, 8 << 20):
        buffer = bytearray(b"x" * size)
        connection.send([b"head", buffer])
        buffer[:] = b"y" * size
        frames = receive_from(listener, "buffer up")[1]
        same(bytes(frames[1]) == b"x" * size, True, f"{size} bytes sent before the change")
        buffer[:] = b"x" * size
        listener.send("peer", [b"head", memoryview(buffer)])
        buffer[:] = b"y" * size
        same(bytes(receive(connection, "buffer down")[1]) == b"x" * size, True, f"{size} bytes back")


def keeps_order_under_load(harness: Harness) -> None:
    """Four peers at once, thousands of messages each way: none is lost, none is double, each peer's are in order."""
    listener = harness.listen()
    count, names = 2_000, [f"peer-{number}" for number in range(4)]
    failures: list[str] = []

    def talk(name: str) -> None:
        connection = harness.connect(listener.address, name)
        try:
            for number in range(count):
                connection.send([str(number).encode(), b"x" * (number % 3_000)])
            for number in range(count):
                frames = receive(connection, f"echo {number} of {name}")
                same((int(frames[0]), len(frames[1])), (number, number % 3_000), f"order at {name}")
        except BaseException as error:
            failures.append(f"{name}: {error!r}")

    threads = [threading.Thread(target=talk, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    seen = dict.fromkeys(names, 0)
    for _ in range(count * len(names)):
        peer, frames = receive_from(listener, f"message under load (so far {seen})")
        same(int(frames[0]), seen[peer], f"order from {peer}")
        seen[peer] += 1
        listener.send(peer, frames)
    for thread in threads:
        thread.join(PATIENCE_S)
    same(failures, [], "failures of the peers")


def refuses_unknown_peer(harness: Harness) -> None:
    """A message to nobody raises, and the next one is not disturbed."""
    listener, connection = harness.pair()
    for _ in range(3):
        try:
            listener.send("nobody", [b"lost", b"message"])
        except PeerUnreachableError as error:
            same("nobody" in str(error), True, "the peer's name in the error")
        else:
            fail("a message to an unknown peer was accepted")
    listener.send("peer", [b"found"])
    same(list(map(bytes, receive(connection, "next message"))), [b"found"], "next message")


def forgets_closed_peer(harness: Harness) -> None:
    """A peer that has closed becomes unreachable; a fresh one takes its place."""
    listener, connection = harness.pair()
    connection.close()

    def is_gone() -> bool:
        try:
            listener.send("peer", [b"?"])
        except PeerUnreachableError:
            return True
        return False

    wait_until(is_gone, "the closed peer is unreachable")
    again = harness.connect(listener.address, "peer-2")
    greet(listener, again, "peer-2")


def knows_a_peer_from_its_first_message(harness: Harness) -> None:
    """A silent peer is unreachable; of two peers of one name the one heard last gets the answers."""
    listener = harness.listen()
    first = harness.connect(listener.address, "twin")
    first.receive(0.1)
    try:
        listener.send("twin", [b"?"])
    except PeerUnreachableError:
        pass
    else:
        fail("a peer that was never heard got a message")
    greet(listener, first, "twin")
    second = harness.connect(listener.address, "twin")
    for connection in (second, first, second):
        greet(listener, connection, "twin")
    first.close()
    for _ in range(3):
        greet(listener, second, "twin")


def refuses_oversize(harness: Harness) -> None:
    """A message over the limit raises on both sides, nothing of it is sent."""
    limits = replace(harness.limits, max_message_bytes=100_000)
    listener, connection = harness.pair(limits=limits)
    for frames in ([b"x" * 100_001], [b"x" * 60_000, b"y" * 60_000]):
        for send in (connection.send, lambda message: listener.send("peer", message)):
            try:
                send(frames)
            except MessageTooLargeError as error:
                same("100000" in str(error), True, "the limit in the error")
            else:
                fail("a message over the limit was accepted")
    greet(listener, connection, "peer")


def passes_garbage(harness: Harness) -> None:
    """Bytes are not the transport's business: garbage passes as it is, and what follows is whole."""
    listener, connection = harness.pair()
    garbage: Sequence[list[Frame]] = ([b""], [b"\xff" * 100], [b"\x00"], [b"\x80\x04\x95."], [b"", b"", b""])
    for frames in garbage:
        connection.send(frames)
        same(list(map(bytes, receive_from(listener, "garbage")[1])), frames, "garbage")
    greet(listener, connection, "peer")


def reconnects(harness: Harness) -> None:
    """The listener goes away and comes back on the same address: the connection finds it again by itself."""
    listener, connection = harness.pair()
    address = listener.address
    for life in range(3):
        listener.close()
        listener = harness.listen(address=address)
        deadline_s = time.monotonic() + PATIENCE_S
        got = None
        while got is None and time.monotonic() < deadline_s:
            connection.send([b"still there?", str(life).encode()])
            connection.receive(0.0)
            got = listener.receive(0.1)
        if got is None:
            fail("the connection did not come back")
        listener.send("peer", [b"yes", str(life).encode()])
        same(list(map(bytes, receive(connection, "answer"))), [b"yes", str(life).encode()], "answer")
        while listener.receive(0.1) is not None:
            pass


def connects_before_listener(harness: Harness) -> None:
    """A connection may be opened first; what it sent meanwhile arrives, in order."""
    listener = harness.listen()
    address = listener.address
    listener.close()
    connection = harness.connect(address, "early")
    for number in range(100):
        connection.send([str(number).encode()])
    listener = harness.listen(address=address)
    for number in range(100):
        peer, frames = receive_from(listener, f"early message {number}")
        same((peer, int(frames[0])), ("early", number), "early message")


def bounds_stalled_peer(harness: Harness) -> None:
    """A reader that stalls makes ``send`` raise once its queue is full; it never blocks, and reading on heals it."""
    limits = replace(harness.limits, max_queued_messages=50)
    listener, connection = harness.pair(limits=limits)
    block = b"x" * 20_000
    for send in (lambda message: listener.send("peer", message), connection.send):
        accepted = 0
        try:
            while accepted < 20_000:
                send([str(accepted).encode(), block])
                accepted += 1
        except PeerUnreachableError as error:
            same("50" in str(error), True, "the limit in the error")
        else:
            fail(f"{accepted} messages of {len(block)} bytes were accepted for a peer that reads none")
        reads = send != connection.send
        for number in range(accepted):
            if reads:
                frames = receive(connection, f"message {number} of {accepted} that were accepted")
            else:
                frames = receive_from(listener, f"message {number} of {accepted} that were accepted")[1]
            same(int(frames[0]), number, "order after the stall")

        def sends_again(send: Callable[[Sequence[Frame]], None] = send) -> bool:
            try:
                send([b"again"])
            except PeerUnreachableError:
                return False
            return True

        wait_until(sends_again, "the queue takes messages again")
        same(
            bytes((receive(connection, "again") if reads else receive_from(listener, "again")[1])[0]),
            b"again",
            "",
        )


def wakes(harness: Harness) -> None:
    """``wake`` ends a waiting ``receive``, or the next that would wait; messages neither wait for it nor are lost."""
    listener, connection = harness.pair()
    for end in (listener, connection):
        end.wake()
        same(end.receive(PATIENCE_S), None, "receive after wake")
        same(end.receive(0.0), None, "receive without anything")
        waiting = threading.Event()

        def call(end: Listener | Connection = end, waiting: threading.Event = waiting) -> None:
            waiting.wait(PATIENCE_S)
            for _ in range(10):
                end.wake()

        caller = threading.Thread(target=call)
        caller.start()
        start_s = time.monotonic()
        waiting.set()
        same(end.receive(None), None, "receive that was woken")
        caller.join()
        if time.monotonic() - start_s > PATIENCE_S / 2:
            fail("waking took too long")
        end.receive(0.0)
    connection.send([b"kept"])
    listener.wake()
    got = listener.receive(PATIENCE_S) or listener.receive(PATIENCE_S)
    same(got is not None and bytes(got[1][0]), b"kept", "the message beside a wake")
    connection.send([b"kept waiting"])
    _receive_while_woken(listener)
    listener.send("peer", [b"kept waiting"])
    _receive_while_woken(connection)


def _receive_while_woken(end: Listener | Connection) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline_s:
        end.wake()
        if end.receive(0.0) is not None:
            return
    fail("a message waited for as long as somebody went on waking")


def times_out(harness: Harness) -> None:
    """``receive`` waits as long as it was told, and not longer."""
    listener, connection = harness.pair()
    for end in (listener, connection):
        start_s = time.monotonic()
        same(end.receive(0.1), None, "receive without a message")
        waited_s = time.monotonic() - start_s
        if not 0.09 <= waited_s < PATIENCE_S / 2:
            fail(f"receive(0.1) came back after {waited_s:.3f} s")


def closes_without_leaks(harness: Harness) -> None:
    """``close`` may be called again, later calls say so, and no fd, thread or file stays behind."""
    before = _resources(harness)
    for number in range(10):
        with Harness(harness.scheme, harness.directory, harness.limits) as inner:
            listener, connection = inner.pair()
            connection.send([b"unread"])
            start_s = time.monotonic()
            for end in (connection, listener):
                end.close()
                end.close()
                end.wake()
                try:
                    end.receive(0.0)
                except ClosedError:
                    continue
                fail("receive on a closed end did not raise")
            if time.monotonic() - start_s > harness.limits.linger_s + PATIENCE_S / 2:
                fail(f"round {number}: closing took longer than its linger time")
    wait_until(lambda: _resources(harness) == before, f"resources are back to {before} (now {_resources(harness)})")


def _resources(harness: Harness) -> tuple[int, int, list[str]]:
    threads = len(list(Path("/proc/self/task").iterdir()))
    return len(os.listdir("/proc/self/fd")), threads, sorted(os.listdir(harness.directory))


CHECKS: tuple[Callable[[Harness], None], ...] = (
    really_runs,
    keeps_frames,
    takes_frames_over,
    keeps_order_under_load,
    refuses_unknown_peer,
    forgets_closed_peer,
    knows_a_peer_from_its_first_message,
    refuses_oversize,
    passes_garbage,
    reconnects,
    connects_before_listener,
    bounds_stalled_peer,
    wakes,
    times_out,
    closes_without_leaks,
)
