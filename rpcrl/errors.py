"""Which errors can a user of rpcrl meet, and what holds after each of them?

::

    RpcrlError
    ├── ConfigError                 every broken rule of a configuration at once; nothing was started
    ├── BatchError        (ValueError)      a batch or a column does not fit; the batch is unchanged
    ├── DispatchError     (ValueError)      arguments do not fit the method or its mode; nothing was sent
    ├── CollectError      (ValueError)      the method has run; its ranks' results do not go together and are lost
    ├── UnknownMethodError (AttributeError) no such registered method on that role; nothing was sent
    ├── UsageError        (RuntimeError)    used where it cannot work (after fork, inside a worker, …)
    ├── ClosedError       (RuntimeError)    *you* closed the controller, group or transport
    ├── WireError
    │   ├── EncodeError   (TypeError)       a value has no codec; nothing was sent
    │   ├── DecodeError   (ValueError)      bytes are not a valid message; the message was dropped
    │   └── ProtocolMismatchError           the peer speaks another version of the wire format
    ├── TransportError
    │   ├── PeerUnreachableError            no such peer is connected
    │   ├── MessageTooLargeError            over the limit of this connection; nothing was sent
    │   └── AuthenticationError             a wrong key, or a peer that is not on the allow-list
    ├── StartError                  a group or an agent did not come up; everything it started has been ended
    ├── WorkerLostError             *they* are gone: a worker exited or was killed; the group stays broken
    ├── AgentLostError              the agent of a node is gone, and every worker of that node with it
    ├── RemoteError                 a method raised on a worker; the worker lives on
    │   └── Remote<Builtin>Error    the same, and the builtin type that was raised (``except ValueError``)
    ├── ReplyDiscardedError         the method has run, but its reply is no longer kept; it is not run again
    ├── CallTimeoutError  (TimeoutError)    unknown: the method may still run, or have run
    ├── AgentTaskError              samples of agent loops were not made; each is named with its cause
    ├── WeightSyncError             weights did not get across; the sync group was thrown away, the next sync makes one
    └── CheckpointError             a checkpoint cannot be written, read, or does not belong to this run

*Closed* means that you did it, *Lost* that they did, *Timeout* that nobody knows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = [
    "AgentLostError",
    "AgentTaskError",
    "AuthenticationError",
    "BatchError",
    "CallTimeoutError",
    "CheckpointError",
    "ClosedError",
    "CollectError",
    "ConfigError",
    "DecodeError",
    "DispatchError",
    "EncodeError",
    "MessageTooLargeError",
    "PeerUnreachableError",
    "ProtocolMismatchError",
    "RemoteError",
    "ReplyDiscardedError",
    "RpcrlError",
    "StartError",
    "TransportError",
    "UnknownMethodError",
    "UsageError",
    "Violation",
    "WeightSyncError",
    "WireError",
    "WorkerExit",
    "WorkerLostError",
]


def name_ranks(ranks: Sequence[int]) -> str:
    """Return ranks in words: ``rank 3``, ``ranks 1–3, 7``."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    listed = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}–{run[-1]}" for run in runs)
    return f"rank{'' if len(ranks) == 1 else 's'} {listed}"


class RpcrlError(Exception):
    """Base of every error that rpcrl raises on purpose."""


@dataclass(frozen=True)
class Violation:
    """One broken rule of a configuration: what, with which numbers, and what to do."""

    key: str
    """Full path of the setting, e.g. ``actor_rollout_ref.rollout.tensor_model_parallel_size``."""
    problem: str
    """The rule with its arithmetic, e.g. ``8 rollout GPUs / (TP 3 x DP 1 x PP 1) leaves 2 over``."""
    remedies: tuple[str, ...] = ()
    """What to change, most likely first."""

    def __str__(self) -> str:
        text = f"{self.key}: {self.problem}"
        for remedy in self.remedies:
            text += f"\n      fix: {remedy}"
        return text


class ConfigError(RpcrlError):
    """A configuration breaks rules; all of them are listed, and nothing was started."""

    def __init__(self, violations: Sequence[Violation]) -> None:
        self.violations = tuple(violations)
        count = len(self.violations)
        noun = "mistake" if count == 1 else "mistakes"
        lines = [f"the configuration has {count} {noun}; nothing was started"]
        lines += [f"  {number}. {violation}" for number, violation in enumerate(self.violations, start=1)]
        super().__init__("\n".join(lines))


class BatchError(RpcrlError, ValueError):
    """A batch or a column does not fit; the batch is unchanged."""


class DispatchError(RpcrlError, ValueError):
    """Arguments do not fit a method or its dispatch mode; nothing was sent."""


class CollectError(RpcrlError, ValueError):
    """The method has run on every rank, but their results do not go together; what it has done stays done."""


class UnknownMethodError(RpcrlError, AttributeError):
    """The role has no registered method of that name; nothing was run."""


class UsageError(RpcrlError, RuntimeError):
    """The library was used where it cannot work, e.g. after a fork or inside a worker."""


class ClosedError(RpcrlError, RuntimeError):
    """You closed the controller, group or transport that this call needs."""


class WireError(RpcrlError):
    """Base of errors of the wire format."""


class EncodeError(WireError, TypeError):
    """A value has no codec; nothing was sent."""


class DecodeError(WireError, ValueError):
    """Bytes are not a valid message; the message was dropped."""


class ProtocolMismatchError(WireError):
    """The peer speaks another version of the wire format."""


class TransportError(RpcrlError):
    """Base of errors of the transports."""


class PeerUnreachableError(TransportError):
    """No peer of that name is connected."""


class MessageTooLargeError(TransportError):
    """A message is over the limit of its connection; nothing was sent."""


class AuthenticationError(TransportError):
    """A wrong key, or a peer that is not on the allow-list."""


@dataclass(frozen=True)
class WorkerExit:
    """How one worker process ended, as its agent saw it; or that it answers no heartbeat, as the controller did."""

    identity: str
    group: str
    rank: int
    roles: tuple[str, ...]
    host: str
    pid: int
    exit_code: int | None
    """Exit status; None when a signal ended the process."""
    signal: str | None
    """Name of the signal, e.g. ``SIGKILL``; None when the process exited by itself."""
    peak_rss_bytes: int
    out_of_memory: bool
    """The kernel's or the cgroup's out-of-memory count rose while the process lived."""
    last_lines: tuple[str, ...]
    log_path: str
    silent_s: float | None = None
    """It was given up after so many seconds without a heartbeat, and ended then; None: it ended by itself."""
    state: str = ""
    """What the process was doing when it was given up, e.g. ``it is stopped``; empty if that cannot be seen."""
    beside: str = ""
    """Of a process that was killed: which worker of its machine held the most memory then; empty if none is seen."""

    @property
    def cause(self) -> str:
        """One phrase for the end: ``killed by SIGKILL``, ``exited with code 3``, ``no heartbeat for 5.0 s``."""
        if self.silent_s is not None:
            return f"no heartbeat for {self.silent_s:.1f} s{'; ' if self.state else ''}{self.state}"
        if self.signal is not None:
            hint = ""
            if self.out_of_memory:
                hint = ", and the kernel reports an out-of-memory kill"
            elif self.signal == "SIGKILL":
                hint = "; SIGKILL often means that the machine or the job ran out of memory"
            return f"killed by {self.signal}{hint}"
        return f"exited with code {self.exit_code}"

    def __str__(self) -> str:
        role = "+".join(self.roles)
        text = (
            f"rank {self.rank} of group {self.group!r} (role {role}, pid {self.pid} on {self.host})"
            f"{': ' if self.silent_s is not None else ' '}{self.cause}; "
            f"peak memory {self.peak_rss_bytes / 2**20:.0f} MiB{'; ' if self.beside else ''}{self.beside}; "
            f"log: {self.log_path}"
        )
        if self.last_lines:
            text += "\n    last lines:\n" + "\n".join(f"    | {line}" for line in self.last_lines)
        return text


class StartError(RpcrlError):
    """A group or an agent did not come up; everything it had started was ended."""


class WorkerLostError(RpcrlError):
    """A worker is gone; calls of its group fail, and the group stays broken.

    ``exits`` holds the ends in the order in which they were seen: the first is the likely cause. ``raised`` holds what
    the call raised on ranks that were still there: what a lost peer looks like from their side.
    """

    def __init__(self, exits: Sequence[WorkerExit], *, during: str = "", raised: Sequence[RemoteError] = ()) -> None:
        self.exits = tuple(exits)
        self.during = during
        self.raised = tuple(raised)
        first = self.exits[0]
        self.rank = first.rank
        self.roles = first.roles
        text = str(first)
        if during:
            text += f"\n  during: {during}"
        later = [f"rank {end.rank} (role {'+'.join(end.roles)}) {end.cause}" for end in self.exits[1:]]
        later += [f"{name_ranks(error.ranks)} raised {error.type_name}: {error.message}" for error in self.raised]
        if later:
            text += "\n  consequences:" + "".join(f"\n    {line}" for line in later)
        super().__init__(text)

    def with_raised(self, raised: Sequence[RemoteError]) -> WorkerLostError:
        """Return the same loss, and what the call had raised before it was known."""
        return WorkerLostError(self.exits, during=self.during, raised=raised) if raised else self


class AgentLostError(RpcrlError):
    """The agent of a node is gone, and every worker of that node with it."""


class RemoteError(RpcrlError):
    """A method raised on a worker; the worker lives on.

    The far side's story is kept as text: it never needs the exception's class to be importable here. It is the story of
    the rank that failed first; ``ranks`` are all that raised the same, ``others`` what else was raised, in order, and
    ``still_running`` the ranks whose method had not ended: they may wait in a collective for one that raised.
    """

    ranks: tuple[int, ...]
    others: tuple[RemoteError, ...] = ()
    still_running: tuple[int, ...] = ()

    def __init__(
        self,
        *,
        type_name: str,
        message: str,
        traceback_text: str,
        method: str = "",
        role: str = "",
        group: str = "",
        rank: int = -1,
        host: str = "",
        pid: int = 0,
        call_id: str = "",
        causes: Sequence[str] = (),
        log_path: str = "",
    ) -> None:
        self.type_name = type_name
        self.message = message
        self.traceback_text = traceback_text
        self.method = method
        self.role = role
        self.group = group
        self.rank = rank
        self.ranks = (rank,)
        self.host = host
        self.pid = pid
        self.call_id = call_id
        self.causes = tuple(causes)
        self.log_path = log_path
        # not super(): in Remote<Builtin>Error that is a builtin which may insist on its own arguments
        Exception.__init__(self, message)

    def __str__(self) -> str:
        first = "" if len(self.ranks) == 1 else f"first: rank {self.rank}, "
        seat = f"{first}pid {self.pid} on {self.host}, call {self.call_id}"
        where = f"{name_ranks(self.ranks)} of group {self.group!r} ({seat})"
        head = f"{self.role}.{self.method} raised {self.type_name} on {where}: {self.message}"
        for other in self.others:
            head += f"\n  later: {name_ranks(other.ranks)} raised {other.type_name}: {other.message}"
        if self.still_running:
            head += f"\n  {name_ranks(self.still_running)} had not ended; close the group if it waits for the others"
        if self.log_path:
            head += f"\n  log: {self.log_path}"
        if not self.traceback_text:
            return head
        remote = "\n".join(f"  | {line}" for line in self.traceback_text.rstrip().splitlines())
        return f"{head}\n  remote traceback:\n{remote}"


class ReplyDiscardedError(RpcrlError):
    """The method has run, but its reply is no longer kept; it is not run a second time."""


class CallTimeoutError(RpcrlError, TimeoutError):
    """No reply within the deadline: the method may still run, or have run."""


class AgentTaskError(RpcrlError):
    """Samples of agent loops were not made, and the run does not go on with fewer; each is named with its cause."""


class WeightSyncError(RpcrlError):
    """Weights did not get from the trainer to the rollout.

    The sync group was thrown away, and the next sync makes a new one. A rollout that had begun to take weights samples
    no more until a sync has ended well.
    """


class CheckpointError(RpcrlError):
    """A checkpoint cannot be written or read, or does not belong to this run."""
