"""What do forks, slow readers and real processes meet?"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from rpcrl.errors import PeerUnreachableError, UsageError
from rpcrl.testing.transport_harness import Harness, greet, receive_from
from rpcrl.transport.base import Limits
from rpcrl.transport.open import listen

SCHEMES = ["inproc", "ipc", "tcp"]


@pytest.fixture(params=SCHEMES)
def harness(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Harness]:
    directory: Path = tmp_path_factory.mktemp("q")
    directory.chmod(0o700)
    with Harness(request.param, directory) as opened:
        yield opened


@pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")
def test_p29_a_fork_gets_a_clear_error_and_leaves_the_parent_alone(harness: Harness) -> None:
    listener, connection = harness.pair()
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        report = []
        try:
            for call in (
                lambda: listener.send("peer", [b"x"]),
                lambda: listener.receive(0.0),
                lambda: connection.send([b"x"]),
                lambda: connection.receive(0.0),
            ):
                try:
                    call()
                    report.append("no error")
                except UsageError as error:
                    report.append("clear" if "cannot be used after a fork" in str(error) else str(error))
            listener.close()
            connection.close()
        except BaseException as error:
            report.append(repr(error))
        finally:
            os.write(writer, ",".join(report).encode())
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        assert pipe.read() == b"clear,clear,clear,clear"
    assert os.waitpid(pid, 0)[1] == 0
    for _ in range(100):
        greet(listener, connection, "peer")
    if harness.scheme == "ipc":
        assert Path(listener.address.removeprefix("ipc://")).is_socket()


def test_p67_a_slow_reader_loses_nothing_silently(harness: Harness) -> None:
    """5,000 messages to a reader that stalls: every one that was accepted arrives, in order."""
    limits = replace(harness.limits, max_queued_messages=1_000)
    listener, connection = harness.pair(limits=limits)
    accepted, refused = 0, ""
    for number in range(5_000):
        try:
            listener.send("peer", [str(number).encode(), b"x" * 1_000])
            accepted += 1
        except PeerUnreachableError as error:
            refused = str(error)
            break
    arrived = []
    while len(arrived) < accepted:
        frames = connection.receive(20.0)
        assert frames is not None, f"{accepted - len(arrived)} of {accepted} accepted messages were lost"
        arrived.append(int(frames[0]))
    assert arrived == list(range(accepted))
    assert accepted == 5_000 or "does not read" in refused


CHILD = """
import sys
from rpcrl.transport.open import connect
connection = connect(sys.argv[1], identity="child")
connection.send([b"last words", b"x" * 1_000_000])
connection.close()
print(sorted({"torch", "numpy"} & set(sys.modules)))
"""


def test_what_was_sent_before_close_arrives_from_another_process(tmp_path_factory: pytest.TempPathFactory) -> None:
    directory = tmp_path_factory.mktemp("c")
    directory.chmod(0o700)
    listener = listen(f"ipc://{directory}/s", limits=Limits(linger_s=5.0))
    try:
        child = subprocess.run(
            [sys.executable, "-c", CHILD, listener.address], timeout=60, check=True, capture_output=True, text=True
        )
        peer, frames = receive_from(listener, "the child's message")
        assert (peer, bytes(frames[0]), len(frames[1])) == ("child", b"last words", 1_000_000)
        assert child.stdout.strip() == "[]"
    finally:
        listener.close()


def test_importing_wire_and_transport_is_light() -> None:
    program = (
        "import sys\n"
        "import rpcrl.wire.codec, rpcrl.wire.frames, rpcrl.wire.failures, rpcrl.transport.open\n"
        "print(sorted({'torch', 'numpy', 'zmq', 'pydantic', 'tensordict'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
