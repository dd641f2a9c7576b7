"""Who belongs to which group, and is it there yet? A plain table: events in, facts out; no clock and no socket.

A worker goes ``starting`` → ``hello`` → ``ready`` → ``gone``. A group is welcomed when every rank has said hello,
and is ready when every rank has built its roles. The first unexpected end breaks it for good.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

from rpcrl.errors import WorkerExit
from rpcrl.wire.messages import FailureInfo, Hello, WorkerExited

__all__ = ["Group", "GroupState", "Member", "MemberState", "Membership"]


class MemberState(Enum):
    """How far a worker has come."""

    STARTING = "starting"
    HELLO = "hello"
    READY = "ready"
    GONE = "gone"


class GroupState(Enum):
    """How far a group has come."""

    STARTING = "starting"
    READY = "ready"
    BROKEN = "broken"
    CLOSING = "closing"


@dataclass
class Member:
    """One worker, as the controller knows it."""

    identity: str
    incarnation: str
    rank: int
    roles: tuple[str, ...]
    public_key: str = ""
    """Its CURVE key, for its peers; empty on Unix sockets."""
    state: MemberState = MemberState.STARTING
    host: str = ""
    pid: int = 0
    log_path: str = ""
    master_port: int | None = None
    build_failure: FailureInfo | None = None


@dataclass
class Group:
    """One group and what happened to it, first event first."""

    name: str
    members: Sequence[Member]
    state: GroupState = GroupState.STARTING
    exits: list[WorkerExit] = field(default_factory=list)
    start_errors: list[str] = field(default_factory=list)
    is_being_ended: bool = False
    """The agent has been told to end what is left of it."""

    @property
    def identities(self) -> tuple[str, ...]:
        """All workers, in rank order."""
        return tuple(member.identity for member in self.members)

    @property
    def alive(self) -> tuple[str, ...]:
        """Workers whose end has not been reported."""
        return tuple(member.identity for member in self.members if member.state is not MemberState.GONE)

    def enter(self, end: WorkerExit) -> None:
        """Add an end. That of a worker which was given up before completes its entry: it is the same death."""
        for index, known in enumerate(self.exits):
            if known.identity == end.identity:
                self.exits[index] = replace(end, silent_s=known.silent_s, state=known.state)
                return
        self.exits.append(end)

    def all_in(self, *states: MemberState) -> bool:
        """Tell whether every member is in one of the states."""
        return all(member.state in states for member in self.members)

    def missing(self, state_of: Callable[[Member], str] = lambda _: "") -> str:
        """Say which ranks are not ready, what they lack, and where their logs are; ``state_of`` adds what it sees."""
        lines = []
        for member in self.members:
            if member.state is not MemberState.READY:
                lacks = {
                    MemberState.STARTING: "has not said hello (the process starts, or hangs in an import)",
                    MemberState.HELLO: "has said hello and is building its roles (or waits for a rank that is missing)",
                    MemberState.GONE: "has exited",
                }[member.state]
                pid = f", pid {member.pid}" if member.pid else ""
                if state := state_of(member):
                    lacks += f"; {state}"
                lines.append(f"  rank {member.rank}{pid} {lacks}; log: {member.log_path or 'none yet'}")
        return "\n".join(lines)


class Membership:
    """All groups of one controller."""

    def __init__(self) -> None:
        self.groups: dict[str, Group] = {}
        self._home: dict[str, tuple[Group, Member]] = {}

    def expect(self, group: Group) -> None:
        """Enter a group whose workers are about to be started."""
        self.groups[group.name] = group
        for member in group.members:
            self._home[member.identity] = (group, member)

    def find(self, identity: str) -> tuple[Group, Member] | None:
        """Return a worker and its group."""
        return self._home.get(identity)

    def forget(self, name: str) -> None:
        """Take out a group that is closed."""
        group = self.groups.pop(name, None)
        for identity in group.identities if group else ():
            self._home.pop(identity, None)

    def left_of(self, name: str) -> str:
        """Name the processes of a group whose end has not been reported."""
        group = self.groups.get(name)
        living = [member for member in group.members if member.state is not MemberState.GONE] if group else []
        return ", ".join(f"rank {member.rank} (pid {member.pid or 'not known'})" for member in living) or "none"

    def on_hello(self, hello: Hello) -> Group | None:
        """Take a worker's hello; returns its group when that was the last one missing."""
        found = self._home.get(hello.identity)
        if found is None:
            return None
        group, member = found
        if member.incarnation != hello.incarnation or member.state is not MemberState.STARTING:
            return None
        member.state, member.host, member.pid = MemberState.HELLO, hello.host, hello.pid
        member.master_port = hello.master_port
        return group if group.all_in(MemberState.HELLO) else None

    def on_ready(self, identity: str) -> Group | None:
        """Take a worker's ready; returns its group when every rank is ready now."""
        found = self._home.get(identity)
        if found is None:
            return None
        group, member = found
        if member.state is not MemberState.HELLO:
            return None
        member.state = MemberState.READY
        if group.state is GroupState.STARTING and group.all_in(MemberState.READY):
            group.state = GroupState.READY
            return group
        return None

    def on_exit(self, exited: WorkerExited, *, beside: str = "") -> Group | None:
        """Take a worker's end; returns its group, broken now unless it is being closed.

        ``beside`` tells of the memory of other workers.
        """
        found = self._home.get(exited.identity)
        if found is None:
            return None
        group, member = found
        if member.state is MemberState.GONE:
            return None
        member.state = MemberState.GONE
        if exited.start_error:
            group.start_errors.append(f"rank {member.rank}: {exited.start_error}")
        else:
            group.enter(replace(_describe(group, member, exited), beside=beside))
        if group.state is not GroupState.CLOSING:
            group.state = GroupState.BROKEN
        return group

    def on_silence(self, identity: str, silent_s: float, state: str, peak_rss_bytes: int) -> Group | None:
        """Take a worker that answers no heartbeat; returns its group, broken now. None if there is nothing to say."""
        found = self._home.get(identity)
        if found is None:
            return None
        group, member = found
        if member.state is MemberState.GONE or group.state is GroupState.CLOSING:
            return None
        exited = WorkerExited(identity, member.host, member.pid, None, None, peak_rss_bytes, False, (), member.log_path)
        group.enter(replace(_describe(group, member, exited), silent_s=silent_s, state=state))
        group.state = GroupState.BROKEN
        return group

    def alive(self) -> Iterable[Group]:
        """Groups that still have a process."""
        return [group for group in self.groups.values() if group.alive]


def _describe(group: Group, member: Member, exited: WorkerExited) -> WorkerExit:
    return WorkerExit(
        identity=member.identity,
        group=group.name,
        rank=member.rank,
        roles=member.roles,
        host=exited.host,
        pid=exited.pid,
        exit_code=exited.exit_code,
        signal=exited.signal,
        peak_rss_bytes=exited.peak_rss_bytes,
        out_of_memory=exited.out_of_memory,
        last_lines=exited.last_lines,
        log_path=exited.log_path,
    )
