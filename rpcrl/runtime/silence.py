"""What does a process do that answers no heartbeat? /proc tells, where it runs on this machine."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from pathlib import Path

from rpcrl.runtime.membership import Member

__all__ = ["Seen", "look_at", "why_stopped"]

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
    peak_kib = fields.get("VmHWM", "").split()[:1]
    return Seen(
        is_stopped=letter in ("T", "t"),
        state=_STATES.get(letter, ""),
        peak_rss_bytes=int(peak_kib[0]) * 1024 if peak_kib else 0,
    )
