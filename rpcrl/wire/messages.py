"""What do the processes of a run say to each other?

One frozen dataclass per message. ``frames.to_frames`` and ``frames.from_frames`` move them over any
transport. A payload (arguments or a result) travels as ``Encoded``: it is encoded once and sent to as many
peers as need it.

Life of a worker: ``Hello`` → (all ranks of the group are here) ``Welcome`` → roles are built → ``Ready`` or
``Failure`` of call ``BUILD`` → ``Call`` … ``Result`` → ``Shutdown``.
Life of an agent: ``Hello`` → ``StartWorkers`` → ``WorkerStarted`` … ``WorkerOutput`` … ``WorkerExited`` →
``Shutdown``.
A worker that calls another group: ``Introduce`` → (to each member ``ExpectPeer``, answered ``PeerExpected``) →
``Introduction``; then it talks to the members without the controller, until ``GroupEnded``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rpcrl.errors import WorkerExit
from rpcrl.shm.buffers import Buffer, Lent, Placed, num_bytes
from rpcrl.traffic import count

__all__ = [
    "BUILD",
    "PROTOCOL_VERSION",
    "AllowImports",
    "AskProgress",
    "Call",
    "CallId",
    "Cancel",
    "Encoded",
    "ExpectPeer",
    "Failure",
    "FailureInfo",
    "ForgetPeer",
    "Free",
    "GroupEnded",
    "Hello",
    "Introduce",
    "Introduction",
    "Message",
    "PeerAddress",
    "PeerExpected",
    "Probe",
    "Progress",
    "Ready",
    "Result",
    "Shutdown",
    "StartWorkers",
    "Status",
    "Step",
    "StopWorkers",
    "Welcome",
    "WorkerExited",
    "WorkerOutput",
    "WorkerStart",
    "WorkerStarted",
]

PROTOCOL_VERSION = 1


@dataclass(frozen=True)
class Encoded:
    """A value in wire form: a msgpack tree that refers to raw buffers by position."""

    tree: bytes
    buffers: tuple[Buffer, ...] = ()

    @property
    def num_bytes(self) -> int:
        """Size on the wire, in bytes."""
        return len(self.tree) + sum(num_bytes(buffer) for buffer in self.buffers)

    def own_copy(self) -> Encoded:
        """Return the same with buffers of its own: what was encoded may be changed from now on."""
        own = tuple(buffer if isinstance(buffer, Placed | Lent) else bytes(buffer) for buffer in self.buffers)
        count(copied_bytes=sum(len(buffer) for buffer in own if isinstance(buffer, bytes)))
        return Encoded(self.tree, own)


@dataclass(frozen=True)
class CallId:
    """Names one call for ever: who calls, which life of the worker it is for, and the caller's count."""

    caller: str
    incarnation: str
    sequence: int

    def __str__(self) -> str:
        return f"{self.caller}#{self.sequence}@{self.incarnation}"


BUILD = CallId("controller", "", 0)
"""Stands for the construction of a worker's roles in a ``Failure``."""


@dataclass(frozen=True)
class Hello:
    """First message of a worker or an agent."""

    kind: str
    """``worker`` or ``agent``."""
    identity: str
    incarnation: str
    host: str
    pid: int
    boot_id: str
    """Same boot id and namespace: same machine, whatever the host is called."""
    protocol_version: int = PROTOCOL_VERSION
    versions: Mapping[str, str] = field(default_factory=dict)
    """Versions of python and rpcrl on that side."""
    master_port: int | None = None
    """Rank 0 only: the port that it holds for the group's torch.distributed store."""
    devices: tuple[str, ...] = ()
    """Agents only: the devices of the node."""


@dataclass(frozen=True)
class Welcome:
    """Every rank of the group said hello: build the roles."""

    environment: Mapping[str, str]
    """MASTER_ADDR and MASTER_PORT of the group."""
    payload: Encoded
    """Encoded ``{role: (args, kwargs)}`` of the constructors."""


@dataclass(frozen=True)
class Ready:
    """The roles are built; calls may come."""

    identity: str


@dataclass(frozen=True)
class Call:
    """Run one method of one role."""

    call_id: CallId
    role: str
    method: str
    payload: Encoded
    """Encoded ``(args, kwargs)``."""
    answered_below: int = 0
    """Every sequence number below this one has its reply: the worker may forget those replies."""
    wants_result: bool = True
    """False: the reply is sent without the result, which nobody would collect."""
    keep_from_bytes: int | None = None
    """A batch of at least so many bytes stays on the worker, and the reply says what it looks like; None: never."""


@dataclass(frozen=True)
class Result:
    """A method returned."""

    call_id: CallId
    payload: Encoded
    kept: int = 0
    """Number of the batch that stays on the worker; the payload then says what it looks like. 0: it is the result."""
    times: tuple[float, ...] = ()
    """The worker's monotonic clock when the call arrived, when the method could begin, and when it had ended."""


@dataclass(frozen=True)
class Free:
    """Nobody refers to these kept results any more."""

    keys: tuple[int, ...]


@dataclass(frozen=True)
class FailureInfo:
    """An exception as text."""

    type_name: str
    message: str
    traceback_text: str
    builtin_bases: tuple[str, ...] = ()
    """Names of the builtin exception types that it is, most specific first."""
    causes: tuple[str, ...] = ()
    host: str = ""
    pid: int = 0


@dataclass(frozen=True)
class Failure:
    """A method (or the construction of the roles) raised."""

    call_id: CallId
    kind: str
    """``raised``, ``unknown_method``, ``unencodable``, ``build``, ``discarded`` or ``cancelled``."""
    info: FailureInfo


@dataclass(frozen=True)
class Probe:
    """What became of these calls? Costs nothing and repeats nothing."""

    caller: str
    incarnation: str
    sequences: tuple[int, ...]
    answered_below: int = 0


@dataclass(frozen=True)
class Cancel:
    """Nobody waits for this call any more: do not start it; an ``async def`` that runs is cancelled."""

    call_id: CallId


@dataclass(frozen=True)
class Status:
    """Answer to a probe; a call that has its reply is answered by that reply, sent again."""

    caller: str
    running: Mapping[int, float] = field(default_factory=dict)
    """sequence → seconds since the call arrived (queued or running)."""
    unknown: tuple[int, ...] = ()
    """Never arrived: the caller sends them again under the same id."""
    running_method: str = ""


@dataclass(frozen=True)
class AskProgress:
    """What are these calls doing? Asked when they take long, for a report."""

    call_ids: tuple[CallId, ...]


@dataclass(frozen=True)
class Step:
    """Where one call is."""

    call_id: CallId
    runs: bool
    """False: it waits for its turn, and ``method`` and ``stack`` are those of what runs meanwhile."""
    method: str
    seconds: float
    """For which that synchronous method has run."""
    stack: str


@dataclass(frozen=True)
class Progress:
    """Answer to ``AskProgress``."""

    steps: tuple[Step, ...]


@dataclass(frozen=True)
class Shutdown:
    """End in order."""

    reason: str = ""


@dataclass(frozen=True)
class WorkerStart:
    """One process that an agent starts."""

    identity: str
    rank: int
    world_size: int
    node_rank: int
    local_rank: int
    local_world_size: int
    device_slot: int | None
    roles: tuple[str, ...]
    bootstrap: bytes = field(repr=False)
    """Handed over by an inherited file descriptor; holds the worker's key."""


@dataclass(frozen=True)
class StartWorkers:
    """Start the processes of one group on this node."""

    group: str
    module: str
    """Run as ``python -m launcher.shim MODULE``."""
    device: str | None
    workers: tuple[WorkerStart, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    """The group's own variables; protected names are refused."""


@dataclass(frozen=True)
class StopWorkers:
    """End these processes: SIGTERM, ``grace_s``, SIGKILL. Each end is reported as ``WorkerExited``."""

    identities: tuple[str, ...]
    grace_s: float = 1.0


@dataclass(frozen=True)
class WorkerStarted:
    """A process runs."""

    identity: str
    pid: int
    log_path: str


@dataclass(frozen=True)
class WorkerExited:
    """A process has ended and is reaped, or could not be started (``start_error``)."""

    identity: str
    host: str
    pid: int
    exit_code: int | None
    signal: str | None
    peak_rss_bytes: int
    out_of_memory: bool
    last_lines: tuple[str, ...]
    log_path: str
    start_error: str = ""


@dataclass(frozen=True)
class WorkerOutput:
    """Complete lines that a worker wrote and that belong on the console."""

    identity: str
    lines: tuple[str, ...]


@dataclass(frozen=True)
class AllowImports:
    """From now on functions and classes of these modules may travel."""

    prefixes: tuple[str, ...]


@dataclass(frozen=True)
class Introduce:
    """A worker asks the controller: how do I reach the workers of this group?"""

    group: str


@dataclass(frozen=True)
class ExpectPeer:
    """The controller tells a worker: this one may call you."""

    identity: str
    public_key: str = ""
    """Its CURVE key; empty on Unix sockets, which only this user can reach."""


@dataclass(frozen=True)
class PeerExpected:
    """A worker's answer: I listen for it here."""

    identity: str
    """The peer that was announced."""
    address: str


@dataclass(frozen=True)
class PeerAddress:
    """Where one member of a group listens for its peers."""

    identity: str
    incarnation: str
    rank: int
    address: str
    public_key: str = ""


@dataclass(frozen=True)
class Introduction:
    """The controller's answer to ``Introduce``: every member expects you."""

    group: str
    members: tuple[PeerAddress, ...]


@dataclass(frozen=True)
class GroupEnded:
    """To a worker that was or wanted to be introduced: this group takes no calls any more."""

    group: str
    kind: str
    """``lost`` or ``closed``."""
    reason: str
    exits: tuple[WorkerExit, ...] = ()
    """What was seen of its workers' ends, first event first."""


@dataclass(frozen=True)
class ForgetPeer:
    """To a worker: this peer is gone and will ask for nothing any more."""

    identity: str


Message = (
    Hello
    | Welcome
    | Ready
    | Call
    | Result
    | Failure
    | Probe
    | Cancel
    | Status
    | Shutdown
    | StartWorkers
    | StopWorkers
    | WorkerStarted
    | WorkerExited
    | WorkerOutput
    | AllowImports
    | Introduce
    | ExpectPeer
    | PeerExpected
    | Introduction
    | GroupEnded
    | ForgetPeer
    | Free
    | AskProgress
    | Progress
)
