"""What does a process do that answers no heartbeat, and who holds the most memory? /proc tells, on this machine."""

from __future__ import annotations

import socket
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from rpcrl.runtime.membership import Group, Member, MemberState
from rpcrl.wire.messages import WorkerExited

__all__ = ["Seen", "largest", "look_at", "why_stopped"]

_STATES = {
    "T": "the process is stopped (SIGSTOP, or Ctrl-Z)",
    "t": "the process is stopped by a debugger; Controller(heartbeat_s=None) lets it be",
    "D": "the process waits in the kernel (a disk or network file system that does not answer, or a frozen cgroup)",
    "R": "the process is there and does not answer: the machine is overloaded, or it is cut off",
    "S": "the process is there and does not answer: its cgroup is frozen, or it is cut off",
}
_ENDED = "the process has ended, and its agent does not say how"


@dataclass(frozen=True)
class Seen:
    """A process from outside."""

    has_ended: bool = False
    is_stopped: bool = False
    state: str = ""
    peak_rss_bytes: int = 0
    rss_bytes: int = 0


def largest(groups: Iterable[Group], killed: WorkerExited) -> str:
    """Say which process of this machine's workers holds the most memory now that one was killed, and how much.

    The killer takes what it finds, and that need not be what has grown. Empty when no other worker can be seen.
    """
    found = [
        (look_at(member.host, member.pid).rss_bytes, group, member)
        for group in groups
        for member in group.members
        if member.state is not MemberState.GONE and member.pid != killed.pid and member.host == killed.host
    ]
    rss_bytes, group, member = max(found, key=lambda each: each[0], default=(0, None, None))
    if not rss_bytes or group is None or member is None:
        return ""
    who = f"rank {member.rank} of group {group.name!r} (role {'+'.join(member.roles)}, pid {member.pid})"
    if rss_bytes < killed.peak_rss_bytes:
        return f"it was the largest worker on {killed.host}; the next is {who} with {rss_bytes / 2**20:.0f} MiB"
    return f"the largest worker on {killed.host} is {who} with {rss_bytes / 2**20:.0f} MiB, which was not killed"


def why_stopped(member: Member) -> str:
    """Say that a worker's process is stopped, and how; empty if it is not, or cannot be seen from here."""
    seen = look_at(member.host, member.pid)
    return seen.state if seen.is_stopped else ""


def look_at(host: str, pid: int) -> Seen:
    """Return what is seen of a process; an empty record when it runs elsewhere or is not known."""
    if not pid or (host and host != socket.gethostname()):
        return Seen()
    try:
        status = Path(f"/proc/{pid}/status").read_text(errors="replace")
    except OSError:
        return Seen(has_ended=True, state=_ENDED)
    fields = dict(line.partition(":")[::2] for line in status.splitlines())
    letter = fields.get("State", "").strip()[:1]
    if letter in ("Z", "X"):
        return Seen(has_ended=True, state=_ENDED)
    peak_kib, rss_kib = (fields.get(name, "").split()[:1] for name in ("VmHWM", "VmRSS"))
    return Seen(
        is_stopped=letter in ("T", "t"),
        state=_STATES.get(letter, ""),
        peak_rss_bytes=int(peak_kib[0]) * 1024 if peak_kib else 0,
        rss_bytes=int(rss_kib[0]) * 1024 if rss_kib else 0,
    )
