"""What happens in the controller's one I/O thread?

The hub joins two plain tables (``calls``, ``membership``) to a transport: it takes messages and commands, changes the
tables, and sends what they say. Other threads only ``post`` commands. When the thread has ended, for whatever reason,
everything that was open has failed, and commands only say so: nobody waits for a thread that is gone.
"""

from __future__ import annotations

import concurrent.futures
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rpcrl.errors import (
    AgentLostError,
    ClosedError,
    PeerUnreachableError,
    ReplyDiscardedError,
    RpcrlError,
    StartError,
    UnknownMethodError,
    WorkerExit,
    WorkerLostError,
)
from rpcrl.logs import get_logger
from rpcrl.runtime.calls import CallTable, OpenCall
from rpcrl.runtime.commands import Commands
from rpcrl.runtime.console import Console
from rpcrl.runtime.future import PendingReplies
from rpcrl.runtime.membership import Group, GroupState, Membership, MemberState
from rpcrl.transport.base import Frame, Listener
from rpcrl.wire.failures import rebuild
from rpcrl.wire.frames import from_frames, to_frames
from rpcrl.wire.messages import (
    Call,
    Cancel,
    Encoded,
    Failure,
    Hello,
    Message,
    Ready,
    Result,
    Shutdown,
    StartWorkers,
    Status,
    StopWorkers,
    Welcome,
    WorkerExited,
    WorkerOutput,
    WorkerStarted,
)

__all__ = ["AGENT", "CALLER", "Hub", "Part"]

AGENT = "agent-0"
CALLER = "controller"
BUILD_GRACE_S = 0.3
"""After the first failed construction, other ranks get this long to report theirs: the causes come together."""
IDLE_S = 5.0
MESSAGES_PER_TURN = 64
"""Between two looks at the commands: neither calls nor replies wait for ever."""
RETRY_SEND_S = 0.05
"""Pace at which a message is offered again to an agent or worker that cannot be reached just now."""

logger = get_logger(__name__)


@dataclass(frozen=True)
class Part:
    """One rank's share of a call."""

    identity: str
    payload: Encoded
    wants_result: bool = True


@dataclass
class _Starting:
    started: concurrent.futures.Future[None]
    welcome: Encoded
    address: str


@dataclass(frozen=True)
class _Slot:
    """Where a reply goes."""

    pending: PendingReplies
    index: int


class Hub:
    """Runs the I/O thread of one controller."""

    def __init__(self, listener: Listener, console: Console) -> None:
        self._listener = listener
        self._console = console
        self._commands = Commands()
        self._calls: CallTable[_Slot] = CallTable(CALLER)
        self._membership = Membership()
        self._starting: dict[str, _Starting] = {}
        self._closing: dict[str, list[concurrent.futures.Future[list[WorkerExit]]]] = {}
        self._timers: list[tuple[float, Callable[[], None]]] = []
        self._agent_lost = ""
        self._stopping = False
        self.agent_ready: concurrent.futures.Future[Hello] = concurrent.futures.Future()
        self._thread = threading.Thread(target=self._run, name="rpcrl-controller", daemon=True)
        self._thread.start()

    # -- any thread --------------------------------------------------------------------------------------------------

    def post(self, command: Callable[[], None]) -> None:
        """Run ``command`` in the I/O thread soon; here and now when that thread has ended."""
        self._commands.put(command)
        self._listener.wake()

    def stop(self) -> None:
        """End the thread and close the transport; open calls fail with ClosedError."""
        self.post(self._stop)
        self._thread.join(timeout=30.0)

    def ask(self, question: Callable[[Membership], str]) -> str:
        """Answer a question about the groups from within the I/O thread."""
        answer: concurrent.futures.Future[str] = concurrent.futures.Future()
        self.post(lambda: answer.set_result(question(self._membership)))
        return answer.result(10.0)

    # -- commands (I/O thread) ---------------------------------------------------------------------------------------

    def start_group(
        self,
        group: Group,
        start: StartWorkers,
        welcome: Encoded,
        address: str,
        started: concurrent.futures.Future[None],
    ) -> None:
        """Have the agent start a group; ``started`` settles when every role is built, or with the reason."""
        if self._stopping:
            started.set_exception(ClosedError(f"the controller was closed; group {group.name!r} was not started"))
            return
        if self._agent_lost:
            started.set_exception(AgentLostError(self._agent_lost))
            return
        self._membership.expect(group)
        for member in group.members:
            self._calls.add_peer(member.identity, member.incarnation)
        self._starting[group.name] = _Starting(started, welcome, address)
        try:
            self._send(AGENT, start)
        except RpcrlError as error:
            for member in group.members:
                member.state = MemberState.GONE  # nobody will report their ends
            self._fail_start(group, StartError(f"group {group.name!r} could not be handed to the agent: {error}"))

    def call(self, group_name: str, role: str, method: str, parts: Sequence[Part], pending: PendingReplies) -> None:
        """Send one call to the ranks that it is for."""
        group = self._membership.groups.get(group_name)
        if group is None or group.state is not GroupState.READY:
            pending.fail(self._unusable(group_name, group, f"{role}.{method}"))
            return
        now = time.monotonic()
        for index, part in enumerate(parts):
            slot, wanted = _Slot(pending, index), part.wants_result
            call = self._calls.open(part.identity, role, method, part.payload, slot, now=now, wants_result=wanted)
            self._send_call(part.identity, call)

    def cancel(self, pending: PendingReplies) -> None:
        """Give a call up: its caller hears at once, its workers drop it unless it runs already."""
        pending.fail(concurrent.futures.CancelledError(f"{pending.description} was cancelled"))
        for identity, entry in self._calls.withdraw(lambda slot: slot.pending is pending):
            self._send_call(identity, Cancel(entry.call.call_id))

    def stop_group(self, name: str, grace_s: float, closed: concurrent.futures.Future[list[WorkerExit]]) -> None:
        """End a group's workers; ``closed`` settles with their ends once all are reaped."""
        group = self._membership.groups.get(name)
        if group is None:
            closed.set_result([])
            return
        group.state = GroupState.CLOSING
        self._fail_calls(group, lambda _: ClosedError(f"group {name!r} was closed while the call ran"))
        self._fail_start(group, ClosedError(f"group {name!r} was closed while it started"))
        self._closing.setdefault(name, []).append(closed)
        if self._agent_lost or not group.alive:
            self._finish_closing(group)
        else:
            self._insist(AGENT, StopWorkers(group.alive, grace_s))

    def shut_down_agent(self) -> None:
        """Tell the agent to end in order."""
        if not self._agent_lost:
            self._insist(AGENT, Shutdown("the controller closes"))

    def agent_exited(self, how: str) -> None:
        """Take the end of the agent: every worker of its node is gone with it."""
        self._agent_lost = how
        error = AgentLostError(f"{how}\n  its workers are gone with it")
        if not self.agent_ready.done():
            self.agent_ready.set_exception(StartError(how))
        for group in list(self._membership.groups.values()):
            for member in group.members:
                member.state = MemberState.GONE
            if group.state is not GroupState.CLOSING:
                group.state = GroupState.BROKEN
            self._fail_calls(group, lambda _: error)
            self._fail_start(group, error)
            self._finish_closing(group)

    def _stop(self) -> None:
        closed = ClosedError("the controller was closed while the group started")
        for group in list(self._membership.groups.values()):
            group.state = GroupState.CLOSING
            self._fail_calls(group, lambda _: ClosedError("the controller was closed while the call ran"))
            self._fail_start(group, closed)
            for member in group.members:
                member.state = MemberState.GONE
            self._finish_closing(group)
        self._agent_lost = self._agent_lost or "the controller is closed"
        self._stopping = True

    # -- the loop ----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._stopping:
                received = self._listener.receive(self._patience_s())
                self._commands.run()
                self._take_messages(received)
                self._run_timers()
        except BaseException as error:
            logger.exception("the controller's I/O thread failed")
            self.agent_exited(f"the controller's I/O thread failed: {type(error).__name__}: {error}")
        finally:
            self._commands.end()
            self._listener.close()

    def _take_messages(self, received: tuple[str, list[Frame]] | None) -> None:
        for _ in range(MESSAGES_PER_TURN):
            if received is None:
                return
            self._take(*received)
            received = self._listener.receive(0.0)
        if received is not None:
            self._take(*received)

    def _patience_s(self) -> float:
        if self._commands:
            return 0.0
        due = [at for at, _ in self._timers]
        if (probe_at := self._calls.next_probe_at()) is not None:
            due.append(probe_at)
        return max(0.0, min(due) - time.monotonic()) if due else IDLE_S

    def _run_timers(self) -> None:
        now = time.monotonic()
        for identity, probe in self._calls.probes(now=now):
            self._send_call(identity, probe)
        due = [entry for entry in self._timers if entry[0] <= now]
        for entry in due:
            self._timers.remove(entry)
            entry[1]()

    def _send(self, peer: str, message: Message) -> None:
        self._listener.send(peer, to_frames(message))

    def _insist(self, peer: str, message: Message) -> None:
        """Send what nobody asks for again: offer it until it is taken, or until the peer's end is known."""
        found = self._membership.find(peer)
        if self._agent_lost or (peer != AGENT and (found is None or found[1].state is MemberState.GONE)):
            return
        try:
            self._send(peer, message)
        except PeerUnreachableError as error:
            # One that is about to end cannot be reached either; its exit is reported by others.
            logger.debug("%s to %s waits: %s", type(message).__name__, peer, error)
            self._timers.append((time.monotonic() + RETRY_SEND_S, lambda: self._insist(peer, message)))

    def _send_call(self, identity: str, message: Message) -> None:
        """Send what a probe will send again if it does not arrive."""
        try:
            self._send(identity, message)
        except PeerUnreachableError as error:
            logger.debug("%s to %s waits: %s", type(message).__name__, identity, error)
        except RpcrlError as error:
            if isinstance(message, Call) and (entry := self._calls.close(identity, message.call_id)) is not None:
                entry.token.pending.fail(error)

    def _take(self, peer: str, frames: Sequence[bytes | bytearray | memoryview]) -> None:
        try:
            message = from_frames(frames)
        except RpcrlError as error:
            logger.error("a message of %s was dropped: %s", peer, error)
            return
        match message:
            case Result():
                entry = self._calls.close(peer, message.call_id)
                if entry is not None:
                    entry.token.pending.deliver(entry.token.index, message.payload)
            case Failure():
                self._take_failure(peer, message)
            case Status():
                for call in self._calls.on_status(peer, message, now=time.monotonic()):
                    self._send_call(peer, call)
            case Hello():
                self._take_hello(peer, message)
            case Ready():
                self._take_ready(peer)
            case WorkerStarted() | WorkerExited() | WorkerOutput() if peer == AGENT:
                self._take_report(message)
            case _:
                logger.error("a message of kind %s from %s is out of place", type(message).__name__, peer)

    # -- messages of workers -----------------------------------------------------------------------------------------

    def _take_failure(self, peer: str, failure: Failure) -> None:
        found = self._membership.find(peer)
        if found is None:
            return
        group, member = found
        if failure.kind == "build":
            member.build_failure = failure.info
            if len([other for other in group.members if other.build_failure]) == 1:
                self._timers.append((time.monotonic() + BUILD_GRACE_S, lambda: self._fail_build(group)))
            return
        entry = self._calls.close(peer, failure.call_id)
        if entry is None:
            return
        call = entry.call
        error: RpcrlError
        if failure.kind == "discarded":
            error = ReplyDiscardedError(failure.info.message)
        elif failure.kind == "unknown_method":
            error = UnknownMethodError(failure.info.message)
        else:
            error = rebuild(
                failure.info,
                method=call.method,
                role=call.role,
                group=group.name,
                rank=member.rank,
                call_id=str(call.call_id),
            )
        entry.token.pending.fail(error)

    def _take_hello(self, peer: str, hello: Hello) -> None:
        if hello.identity != peer:
            logger.error("%s says that it is %s; its hello was dropped", peer, hello.identity)
            return
        if hello.kind == "agent":
            if not self.agent_ready.done():
                self.agent_ready.set_result(hello)
            return
        group = self._membership.on_hello(hello)
        if group is None or group.name not in self._starting:
            return
        starting = self._starting[group.name]
        environment = {"MASTER_ADDR": starting.address, "MASTER_PORT": str(group.members[0].master_port)}
        for identity in group.identities:
            self._insist(identity, Welcome(environment, starting.welcome))

    def _take_ready(self, peer: str) -> None:
        group = self._membership.on_ready(peer)
        if group is not None and group.name in self._starting:
            self._starting.pop(group.name).started.set_result(None)

    def _fail_build(self, group: Group) -> None:
        failures: dict[str, list[int]] = {}
        for member in group.members:
            if member.build_failure is not None:
                info = member.build_failure
                failures.setdefault(f"{info.type_name}: {info.message}\n{info.traceback_text}", []).append(member.rank)
        lines = [f"group {group.name!r} did not start: its roles could not be built"]
        for text, ranks in failures.items():
            log_path = group.members[ranks[0]].log_path
            lines.append(f"ranks {ranks} (log of the first: {log_path}): {text}")
        self._fail_start(group, StartError("\n".join(lines)))

    # -- reports of the agent ----------------------------------------------------------------------------------------

    def _take_report(self, report: WorkerStarted | WorkerExited | WorkerOutput) -> None:
        found = self._membership.find(report.identity)
        if found is None:
            return
        _, member = found
        if isinstance(report, WorkerStarted):
            member.pid, member.log_path = report.pid, report.log_path
        elif isinstance(report, WorkerOutput):
            self._console.write(f"[{'+'.join(member.roles)} {member.rank}]", report.lines, member.log_path)
        else:
            self._take_exit(report)

    def _take_exit(self, exited: WorkerExited) -> None:
        group = self._membership.on_exit(exited)
        if group is None:
            return
        if group.state is GroupState.CLOSING:
            self._finish_closing(group)
            return
        self._fail_calls(group, lambda during: WorkerLostError(group.exits, during=during))
        if any(member.build_failure for member in group.members):
            self._fail_build(group)
        else:
            events = [*group.start_errors, *map(str, group.exits)]
            self._fail_start(group, StartError("\n  ".join([f"group {group.name!r} did not start:", *events])))
        if group.alive and len(group.exits) + len(group.start_errors) == 1:
            # The others may sit in a collective with the dead rank, which nothing else ends.
            self._insist(AGENT, StopWorkers(group.alive))

    # -- common ------------------------------------------------------------------------------------------------------

    def _unusable(self, name: str, group: Group | None, during: str) -> RpcrlError:
        if group is None or group.state is GroupState.CLOSING:
            return ClosedError(f"group {name!r} is closed; {during} was not sent")
        if group.exits:
            return WorkerLostError(group.exits, during=f"{during} was called after that; the group stays broken")
        if self._agent_lost:
            return AgentLostError(f"{self._agent_lost}; {during} was not sent")
        return StartError(f"group {name!r} has not started; {during} was not sent")

    def _fail_calls(self, group: Group, reason: Callable[[str], RpcrlError]) -> None:
        failed: set[int] = set()
        entries: list[OpenCall[_Slot]] = self._calls.drop_peers(group.identities)
        for entry in entries:
            pending = entry.token.pending
            if id(pending) not in failed:
                failed.add(id(pending))
                pending.fail(reason(pending.description))

    def _fail_start(self, group: Group, error: RpcrlError) -> None:
        starting = self._starting.pop(group.name, None)
        if starting is not None and not starting.started.done():
            starting.started.set_exception(error)

    def _finish_closing(self, group: Group) -> None:
        if group.alive and not self._agent_lost:
            return
        waiting = self._closing.pop(group.name, [])
        if waiting:
            self._membership.forget(group.name)
        for closed in waiting:
            closed.set_result(list(group.exits))
