"""What happens in the controller's one I/O thread?

The hub joins the calling half (``caller``), a plain table of groups (``membership``) and the introductions between
workers to a transport: it takes messages and commands, changes the tables, and sends what they say. Other threads
only ``post`` commands. When the thread has ended, everything that was open has failed, and commands only say so.
"""

from __future__ import annotations

import concurrent.futures
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rpcrl.errors import (
    AgentLostError,
    ClosedError,
    PeerUnreachableError,
    RpcrlError,
    StartError,
    WorkerExit,
    WorkerLostError,
    name_ranks,
)
from rpcrl.logs import get_logger
from rpcrl.runtime.caller import Caller, Part, Seat
from rpcrl.runtime.console import Console
from rpcrl.runtime.future import PendingReplies
from rpcrl.runtime.introductions import Introductions
from rpcrl.runtime.io_thread import IoThread
from rpcrl.runtime.membership import Group, GroupState, Membership, MemberState
from rpcrl.runtime.sharing import place, sharing
from rpcrl.runtime.silence import largest, look_at
from rpcrl.runtime.watchdog import Watchdog
from rpcrl.shm.buffers import Buffer
from rpcrl.shm.exchange import Exchange
from rpcrl.transport.base import ManyPeers
from rpcrl.wire.frames import from_frames, to_frames
from rpcrl.wire.messages import (
    AllowImports,
    Encoded,
    Failure,
    GroupEnded,
    Hello,
    Introduce,
    Message,
    PeerExpected,
    Progress,
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

__all__ = ["AGENT", "CALLER", "Hub"]

AGENT = "agent-0"
CALLER = "controller"
BUILD_GRACE_S = 0.3
"""After the first failed construction, other ranks get this long to report theirs: the causes come together."""
RETRY_SEND_S = 0.05
"""Pace at which a message is offered again to an agent or worker that cannot be reached just now."""

AGENT_PATIENCE_S = 15.0
"""Silent for so long, a worker whose process has ended is reported without its agent's word on how it did."""
SILENCE_AGAIN_S = 1.0

logger = get_logger(__name__)


@dataclass
class _Starting:
    started: concurrent.futures.Future[None]
    welcome: Encoded
    address: str


class Hub:
    """Runs the I/O thread of one controller."""

    def __init__(
        self,
        listener: ManyPeers,
        console: Console,
        exchange: Exchange | None = None,
        *,
        report_after_s: float | None = None,
        report: Callable[[str], None] = logger.warning,
    ) -> None:
        self._listener = sharing(listener, exchange)
        self._exchange = exchange
        self._console = console
        self._membership = Membership()
        self._caller = Caller(CALLER, self._send, self._seat_of)
        self._watchdog = Watchdog(self._caller, self._send, report_after_s=report_after_s, tell=report)
        self._introductions = Introductions(self._insist)
        self._starting: dict[str, _Starting] = {}
        self._closing: dict[str, list[concurrent.futures.Future[list[WorkerExit]]]] = {}
        self._agent_lost = ""
        self._allowed: list[str] = []
        self._abandoned: deque[tuple[str, float, Callable[[], None]]] = deque()
        self._stopped = False
        self.agent_ready: concurrent.futures.Future[Hello] = concurrent.futures.Future()
        self._io = IoThread(self._listener, self, name="rpcrl-controller")
        self._io.start()

    # -- any thread --------------------------------------------------------------------------------------------------

    def post(self, command: Callable[[], None]) -> None:
        """Run ``command`` in the I/O thread soon; here and now when that thread has ended."""
        self._io.post(command)

    def stop(self) -> None:
        """End the thread and close the transport; open calls fail with ClosedError."""
        self._io.stop(self._stop)

    def abandon(self, group: str, grace_s: float, released: Callable[[], None]) -> None:
        """End a group soon that nobody holds; takes no lock: a finalizer may interrupt whoever holds one."""
        self._abandoned.append((group, grace_s, released))

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
        if self._stopped:
            started.set_exception(ClosedError(f"the controller was closed; group {group.name!r} was not started"))
            return
        if self._agent_lost:
            started.set_exception(AgentLostError(self._agent_lost))
            return
        self._membership.expect(group)
        for member in group.members:
            self._caller.add_peer(member.identity, member.incarnation)
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
        if pending.settled.done():
            return  # cancelled on its way here
        if group is None or group.state is not GroupState.READY:
            pending.fail(self._unusable(group_name, group, pending.description))
            return
        self._caller.call(role, method, parts, pending)

    def cancel(self, pending: PendingReplies) -> None:
        """Give a call up: its caller hears at once, its workers drop it unless it runs already."""
        self._caller.cancel(pending)

    def allow_imports(self, prefixes: Sequence[str]) -> None:
        """Tell all workers, and those that are still to come, that functions and classes of these may travel."""
        self._allowed += prefixes
        for group in self._membership.groups.values():
            for identity in group.alive:
                self._insist(identity, AllowImports(tuple(prefixes)))

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
        self._stopped = True

    # -- the thread's calls ------------------------------------------------------------------------------------------

    def tick(self) -> None:
        """Ask about silent calls, and end groups that nobody holds."""
        while self._abandoned:
            name, grace_s, released = self._abandoned.popleft()
            closed: concurrent.futures.Future[list[WorkerExit]] = concurrent.futures.Future()
            closed.add_done_callback(lambda _, released=released: released())  # type: ignore[misc]
            self.stop_group(name, grace_s, closed)
        self._caller.ask()
        self._watchdog.tick(now=time.monotonic())

    def next_tick_at(self) -> float | None:
        """Return when ``tick`` has something to do next."""
        due = [at for at in (self._caller.next_ask_at(), self._watchdog.next_tick_at()) if at is not None]
        return min(due, default=None)

    def failed(self, error: BaseException) -> None:
        """Fail everything: this thread is gone, and with it the way to every worker."""
        self.agent_exited(f"the controller's I/O thread failed: {type(error).__name__}: {error}")

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
            self._io.after(RETRY_SEND_S, lambda: self._insist(peer, message))

    def take(self, peer: str, frames: Sequence[Buffer]) -> None:
        """Take a message of the agent or of a worker."""
        try:
            message = from_frames(frames)
        except RpcrlError as error:
            logger.error("a message of %s was dropped: %s", peer, error)
            return
        match message:
            case Failure() if message.kind == "build":
                self._take_build_failure(peer, message)
            case Result() | Failure() | Status():
                self._caller.take(peer, message)
            case Progress():
                self._watchdog.take(message)
            case Hello():
                self._take_hello(peer, message)
            case Ready():
                self._take_ready(peer)
            case Introduce():
                self._introduce(peer, message.group)
            case PeerExpected():
                self._introductions.expected(peer, message)
            case WorkerStarted() | WorkerExited() | WorkerOutput() if peer == AGENT:
                self._take_report(message)
            case _:
                logger.error("a message of kind %s from %s is out of place", type(message).__name__, peer)

    # -- messages of workers -----------------------------------------------------------------------------------------

    def _take_build_failure(self, peer: str, failure: Failure) -> None:
        found = self._membership.find(peer)
        if found is None:
            return
        group, member = found
        member.build_failure = failure.info
        if len([other for other in group.members if other.build_failure]) == 1:
            self._io.after(BUILD_GRACE_S, lambda: self._fail_build(group))

    def _introduce(self, peer: str, name: str) -> None:
        """Bring a worker together with a group that it wants to call."""
        found, group = self._membership.find(peer), self._membership.groups.get(name)
        if found is None:
            return
        if group is None or group.state is not GroupState.READY:
            self._insist(peer, self._end_of(name, group))
        else:
            self._introductions.begin(found[1], group)

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
        welcome = place(self._exchange, starting.welcome, group.identities)
        environment = {"MASTER_ADDR": starting.address, "MASTER_PORT": str(group.members[0].master_port)}
        for identity in group.identities:
            if self._allowed:  # it may have been started before the last of them
                self._insist(identity, AllowImports(tuple(self._allowed)))
            self._insist(identity, Welcome(environment, welcome))

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
            lines.append(f"{name_ranks(ranks)} (log of the first: {log_path}): {text}")
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
        killed = exited.signal == "SIGKILL" or exited.out_of_memory
        beside = largest(self._membership.groups.values(), exited) if killed else ""
        group = self._membership.on_exit(exited, beside=beside)
        if group is None:
            return
        self._introductions.gone(exited.identity)
        if self._exchange is not None:
            self._exchange.gone(exited.identity, remove=True)
        if group.state is GroupState.CLOSING:
            self._finish_closing(group)
            return
        self._break(group)

    def take_silence(self, identity: str, silent_s: float) -> None:
        """Take a worker that answers no heartbeat: its group is given up, and the agent ends it."""
        found = self._membership.find(identity)
        if found is None:
            return
        seen = look_at(found[1].host, found[1].pid)
        if seen.has_ended and silent_s < AGENT_PATIENCE_S:
            # Its agent knows more about the end, and says it soon.
            self._io.after(SILENCE_AGAIN_S, lambda: self.take_silence(identity, silent_s + SILENCE_AGAIN_S))
            return
        group = self._membership.on_silence(identity, silent_s, seen.state, seen.peak_rss_bytes)
        if group is not None:
            self._break(group)

    def _break(self, group: Group) -> None:
        self._fail_calls(group, lambda during: WorkerLostError(group.exits, during=during))
        if any(member.build_failure for member in group.members):
            self._fail_build(group)
        else:
            events = [*group.start_errors, *map(str, group.exits)]
            self._fail_start(group, StartError("\n  ".join([f"group {group.name!r} did not start:", *events])))
        if group.alive and not group.is_being_ended:
            group.is_being_ended = True
            # The others may sit in a collective with the dead rank, which nothing else ends.
            self._insist(AGENT, StopWorkers(group.alive))

    # -- common ------------------------------------------------------------------------------------------------------

    def _seat_of(self, identity: str) -> Seat | None:
        found = self._membership.find(identity)
        return None if found is None else Seat(found[0].name, found[1].rank, found[1].log_path)

    def _end_of(self, name: str, group: Group | None) -> GroupEnded:
        """Say to a worker why a group takes no calls."""
        error = self._unusable(name, group, "a call of another worker")
        kind = "lost" if isinstance(error, WorkerLostError | AgentLostError) else "closed"
        return GroupEnded(name, kind, str(error).partition(";")[0], tuple(group.exits) if group else ())

    def _unusable(self, name: str, group: Group | None, during: str) -> RpcrlError:
        if group is None or group.state is GroupState.CLOSING:
            return ClosedError(f"group {name!r} is closed; {during} was not sent")
        if group.exits:
            return WorkerLostError(group.exits, during=f"{during} was called after that; the group stays broken")
        if self._agent_lost:
            return AgentLostError(f"{self._agent_lost}; {during} was not sent")
        return StartError(f"group {name!r} has not started; {during} was not sent")

    def _fail_calls(self, group: Group, reason: Callable[[str], RpcrlError]) -> None:
        self._caller.drop(group.identities, reason)
        self._introductions.end(group, self._end_of(group.name, group))

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
