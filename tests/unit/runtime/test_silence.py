"""What is said of the memory of others when a worker was killed: real processes, seen from outside."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rpcrl.runtime.membership import Group, Member, MemberState
from rpcrl.runtime.silence import largest, look_at
from rpcrl.wire.messages import WorkerExited

HOLD = "import sys; held = b'x' * int(sys.argv[1]); print(flush=True); sys.stdin.read()"
SMALL, BIG = 1 << 20, 96 << 20


@contextmanager
def holding(num_bytes: int) -> Iterator[int]:
    """Give the pid of a process that holds so many bytes."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(num_bytes)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process.pid


def member(pid: int, rank: int = 0, host: str = "") -> Member:
    made = Member(f"w{pid}", "i", rank, ("reward",))
    made.pid, made.host = pid, host or socket.gethostname()
    return made


def killed(peak_rss_bytes: int, host: str = "") -> WorkerExited:
    return WorkerExited(
        identity="w1",
        host=host or socket.gethostname(),
        pid=1,
        exit_code=None,
        signal="SIGKILL",
        peak_rss_bytes=peak_rss_bytes,
        out_of_memory=False,
        last_lines=(),
        log_path="/log",
    )


def test_p65_the_largest_of_those_that_live_is_named_with_its_memory():
    with holding(SMALL) as small, holding(BIG) as big:
        groups = [Group("actor", [member(small)]), Group("judge", [member(big, rank=3)])]
        told = largest(groups, killed(peak_rss_bytes=30 << 20))
        assert told.startswith("the largest worker on ")
        assert f"is rank 3 of group 'judge' (role reward, pid {big}) with " in told
        assert "which was not killed" in told
        megabytes = float(told.partition(" with ")[2].split()[0])
        assert BIG >> 20 <= megabytes < 2 * BIG >> 20
        assert look_at("", big).rss_bytes > BIG > look_at("", small).rss_bytes


def test_p65_the_killed_one_is_said_to_be_the_largest_where_it_was():
    with holding(SMALL) as small:
        told = largest([Group("actor", [member(small)])], killed(peak_rss_bytes=1 << 40))
        assert told.startswith("it was the largest worker on ")
        assert f"the next is rank 0 of group 'actor' (role reward, pid {small}) with " in told


def test_p65_nothing_is_said_of_the_dead_of_other_machines_and_of_the_killed_one_itself():
    gone = member(os.getpid())
    gone.state = MemberState.GONE
    elsewhere = member(os.getpid(), host="another")
    assert largest([Group("g", [gone, elsewhere, member(1)])], killed(peak_rss_bytes=1)) == ""
    assert largest([Group("g", [elsewhere])], killed(peak_rss_bytes=1, host="another")) == "", (
        "not to be seen from here"
    )
