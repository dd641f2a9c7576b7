"""What does the user's program own? A ``Controller``: the one driver of a run, its agent, its sockets, its groups."""

from __future__ import annotations

import atexit
import concurrent.futures
import json
import os
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from rpcrl.errors import ClosedError, RpcrlError, StartError, UsageError, WorkerExit
from rpcrl.leftovers import create_run_dir, remove_run_dir, remove_shared_memory, sweep_stale_runs
from rpcrl.runtime.agent_process import AgentProcess
from rpcrl.runtime.bookings import Admissions
from rpcrl.runtime.caller import Part
from rpcrl.runtime.console import Console
from rpcrl.runtime.deferred import Deferred
from rpcrl.runtime.hub import AGENT, CALLER, Hub
from rpcrl.runtime.lease import read_references_here
from rpcrl.runtime.main_module import class_path, describe_main
from rpcrl.runtime.membership import Group, Member
from rpcrl.runtime.pulse import PulseWatch
from rpcrl.runtime.run_logs import log_parent, note_workers, open_log_dir
from rpcrl.runtime.settings import check_settings
from rpcrl.runtime.sharing import place
from rpcrl.runtime.silence import why_stopped
from rpcrl.runtime.thread_agent import ThreadAgent, unsupported
from rpcrl.runtime.watchdog import Reports
from rpcrl.runtime.worker import refuse_in_worker
from rpcrl.shm.exchange import open_exchange
from rpcrl.topology import ResourcePool
from rpcrl.transport.base import KeyPair, Listener
from rpcrl.transport.keys import new_key_pair
from rpcrl.transport.open import listen
from rpcrl.wire.codec import encode
from rpcrl.wire.imports import MAIN, ImportPolicy
from rpcrl.wire.messages import Encoded, StartWorkers, WorkerStart

if TYPE_CHECKING:
    from rpcrl.runtime.future import PendingReplies

__all__ = ["Controller", "current_controller", "open_controller"]

WORKER_MODULE = "rpcrl.runtime.worker_main"
STOP_GRACE_S = 3.0
"""Between SIGTERM and SIGKILL when a group is closed in order."""

_open: list[Controller] = []


def current_controller() -> Controller:
    """Return the controller that was opened last in this process. Raises UsageError if none is open."""
    if not _open:
        raise UsageError(
            "no controller is open: start worker groups inside `with Controller() as controller:`, or pass controller=…"
        )
    return _open[-1]


def open_controller(run_id: str) -> Controller:
    """Return the controller of a run. Raises UsageError if it is not open in this process."""
    for controller in _open:
        if controller.run_id == run_id:
            return controller
    raise UsageError(f"the controller of run {run_id} is not open in this process")


class Controller:
    """The single driver of a run: starts worker groups, calls them, ends them.

    Use it as a context manager; leaving the block ends every process it has started. One I/O thread owns all sockets;
    every public method may be called from any thread.

    ``transport``: ``ipc`` (Unix sockets in a private directory), ``tcp`` (loopback, CURVE with a key per worker), or
    ``inproc`` to debug: no processes, each worker is threads of this one, so that breakpoints and prints work. Then
    there is no isolation, no environment of a group's own, no process group, no log, and a method that runs cannot be
    ended.
    ``log_dir``: where each worker's complete output goes; a directory under the system's temporary one by default.
    ``console``: what is shown of the workers' lines: ``default`` (rank 0, and warnings of all), ``all`` or ``off``;
    ``console_sink`` takes the lines instead of standard error.
    ``allow_imports``: further modules whose functions and classes may travel, beside those of the worker classes.
    ``start_timeout_s``: bound for a group's processes to start and build their roles.
    ``heartbeat_s``: a worker that is there and does not run (stopped, frozen, cut off) is given up within three of
    these; a long method or a large message is no silence. None watches for exits alone, e.g. under a debugger.
    ``report_after_s``: a call without a reply for so long is reported with the stack of each rank; None never does.
    ``shared_memory_bytes``: what all processes of the run on this host may use of /dev/shm together; None is half of
    what is free there, 0 sends everything through sockets.

    Raises UsageError inside a worker process, StartError if the agent does not come up.
    """

    def __init__(
        self,
        *,
        transport: str = "ipc",
        log_dir: str | Path | None = None,
        console: str = "default",
        console_sink: Callable[[str], None] | None = None,
        allow_imports: Sequence[str] = (),
        start_timeout_s: float = 120.0,
        heartbeat_s: float | None = 5.0,
        report_after_s: float | None = 300.0,
        shared_memory_bytes: int | None = None,
    ) -> None:
        refuse_in_worker()
        check_settings(transport, console, heartbeat_s, report_after_s, shared_memory_bytes)
        self.run_id = f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(4)}"
        self.start_timeout_s = start_timeout_s
        self._owner_pid = os.getpid()
        self._admissions = Admissions(patience_s=STOP_GRACE_S + 5.0)
        self._closed = False
        self._deferred = Deferred()
        self._allow_imports = {"rpcrl", MAIN, *allow_imports}
        self._keys = new_key_pair() if transport == "tcp" else None
        self._allowed: dict[str, str] = {}
        self._worker_keys: dict[str, dict[str, str]] = {}
        """Of workers that are about to be started."""
        read_references_here()
        self._in_process = transport == "inproc"
        self._run_dir: Path | None = None
        if self._in_process:
            self.log_dir = log_parent() / self.run_id  # nobody writes there
        else:
            sweep_stale_runs()
            self.log_dir = open_log_dir(self.run_id, log_dir)
            self._run_dir = create_run_dir(self.run_id)
        try:
            listener = self._listen()
        except BaseException:
            self._remove_run_dir()
            raise
        self._console = Console(console_sink)
        self.address = listener.address
        self.worker_address = listener.address
        """Where new workers connect: ``address``, unless something is put in between."""
        self._shared_memory_bytes = 0 if self._in_process else shared_memory_bytes
        self._exchange = open_exchange(self.run_id, CALLER, self._shared_memory_bytes, owns_run=True)
        reports = Reports(self._console if console != "off" else None, None if self._in_process else self.log_dir)
        self._hub = Hub(listener, self._console, self._exchange, report_after_s=report_after_s, report=reports)
        if console != "off" and not self._in_process:
            told = f"run {self.run_id}; complete output of the workers: {self.log_dir} (`rpcrl logs` shows it)"
            self._console.write("[rpcrl]", (told,), str(self.log_dir))
        self._pulse: PulseWatch | None = None
        try:
            self._pulse = self._watch_pulse(heartbeat_s)
            self._agent = self._start_agent(console)
        except BaseException:
            self._closed = True
            self._forget()
            self._remove_run_dir()
            raise
        _open.append(self)
        atexit.register(self.close)
        try:
            self._hub.agent_ready.result(start_timeout_s)
        except concurrent.futures.TimeoutError:
            self._close_now()
            raise StartError(f"the agent (pid {self._agent.pid}) said nothing within {start_timeout_s} s") from None
        except BaseException:
            self._close_now()
            raise

    def __enter__(self) -> Controller:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @property
    def imports(self) -> ImportPolicy:
        """Which modules' functions and classes may travel in this run."""
        return ImportPolicy(tuple(sorted(self._allow_imports)))

    def close(self) -> None:
        """End every group and the agent, in order; returns when all processes are reaped. Idempotent.

        A KeyboardInterrupt in the meantime ends everything at once.
        """
        if self._closed or os.getpid() != self._owner_pid:
            return
        self._closed = True
        try:
            self._hub.post(self._hub.shut_down_agent)
            self._agent.close(timeout_s=STOP_GRACE_S + 5.0)
        except BaseException:
            self._agent.kill()
            raise
        finally:
            self._forget()

    def _close_now(self) -> None:
        self._closed = True
        self._agent.kill()
        self._forget()

    def _forget(self) -> None:
        if self._pulse is not None:
            self._pulse.close()
        self._hub.stop()
        self._deferred.close()
        if self._exchange is not None:
            self._exchange.close()
            remove_shared_memory(self.run_id)
        self._console.close()
        atexit.unregister(self.close)
        if self in _open:
            _open.remove(self)

    def _remove_run_dir(self) -> None:
        if self._run_dir is not None:
            remove_run_dir(self._run_dir)

    # -- for worker groups -------------------------------------------------------------------------------------------

    def check_usable(self) -> None:
        """Raise ClosedError after close, UsageError in a forked child."""
        if os.getpid() != self._owner_pid:
            raise UsageError(
                f"this controller belongs to process {self._owner_pid} and was carried into process {os.getpid()} by a "
                "fork; its sockets and threads do not work here. Start helper processes by spawn, and call the "
                "controller from the process that opened it"
            )
        if self._closed:
            raise ClosedError(f"controller {self.run_id} is closed")

    def start_group(
        self,
        pool: ResourcePool,
        roles: Mapping[str, tuple[type, tuple[Any, ...], Mapping[str, Any]]],
        *,
        name: str | None,
        environment: Mapping[str, str],
    ) -> Group:
        """Start one group on a pool and wait until every rank has built its roles; see ``WorkerGroup``."""
        self.check_usable()
        if self._in_process and (refused := unsupported(pool.device, environment)):
            raise UsageError(f"Controller(transport='inproc') runs workers as threads and cannot give them {refused}")
        paths = {role: class_path(kind) for role, (kind, _, _) in roles.items()}
        self._allow(path.partition(":")[0].partition(".")[0] for path in paths.values())
        welcome = encode(
            {role: (args, dict(kwargs)) for role, (_, args, kwargs) in roles.items()},
            path="constructor arguments",
            imports=self.imports,
        )
        name = self._admissions.admit(pool, name or "+".join(roles))
        members = [self._new_member(name, seat.rank, tuple(roles)) for seat in pool.placements()]
        start = StartWorkers(
            group=name,
            module=WORKER_MODULE,
            device=pool.device,
            workers=tuple(
                WorkerStart(
                    identity=member.identity,
                    rank=seat.rank,
                    world_size=seat.world_size,
                    node_rank=seat.node_rank,
                    local_rank=seat.local_rank,
                    local_world_size=seat.local_world_size,
                    device_slot=seat.device_slot,
                    roles=tuple(roles),
                    bootstrap=self._worker_bootstrap(name, member, paths, pool.device),
                )
                for member, seat in zip(members, pool.placements(), strict=True)
            ),
            environment=dict(environment),
        )
        if not self._in_process:
            note_workers(self.log_dir, self.run_id, name, members)
        group = Group(name, members)
        started: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._hub.post(lambda: self._hub.start_group(group, start, welcome, "127.0.0.1", started))
        try:
            started.result(self.start_timeout_s)
        except concurrent.futures.TimeoutError:
            missing = self._hub.ask(lambda _: group.missing(why_stopped))
            self.stop_group(name)
            raise StartError(
                f"group {name!r} did not start within {self.start_timeout_s} s "
                f"(Controller(start_timeout_s=…)):\n{missing}"
            ) from None
        except KeyboardInterrupt:
            self._end_interrupted(name)
            raise
        except BaseException:
            self.stop_group(name)
            raise
        return group

    def _end_interrupted(self, name: str) -> None:
        """End a group whose start the user has broken off; a second Ctrl-C meanwhile ends everything at once."""
        try:
            self.stop_group(name)
        except BaseException:
            self._close_now()
            raise

    def stop_group(self, name: str, grace_s: float = STOP_GRACE_S) -> list[WorkerExit]:
        """End a group's workers and wait until they are reaped; returns their ends."""
        closed: concurrent.futures.Future[list[WorkerExit]] = concurrent.futures.Future()
        if self._closed:
            return []
        self._admissions.ends(name)
        self._hub.post(lambda: self._hub.stop_group(name, grace_s, closed))
        bound_s = grace_s + 10.0
        try:
            exits = closed.result(bound_s)
        except concurrent.futures.TimeoutError:
            left = self._hub.ask(lambda membership: membership.left_of(name))
            raise RpcrlError(f"group {name!r} was not reaped within {bound_s} s of its end; left: {left}") from None
        self._admissions.release(name)
        return exits

    def abandon_group(self, name: str) -> None:
        """End a group that nobody holds any more; does not wait, and takes no lock: a finalizer calls it."""
        if not self._closed and os.getpid() == self._owner_pid:
            self._admissions.ends(name)
            self._hub.abandon(name, STOP_GRACE_S, lambda: self._admissions.release(name))

    def defer(self, work: Callable[[], None]) -> None:
        """Run ``work``, which waits for nothing, outside of the I/O thread soon."""
        self._deferred.run(work)

    def place(self, payload: Encoded, receivers: Sequence[str]) -> Encoded:
        """Put large buffers into shared memory, for receivers that see it; see ``Router.place``."""
        return place(self._exchange, payload, receivers)

    def cancel(self, pending: PendingReplies) -> None:
        """Give a call up."""
        self._hub.post(lambda: self._hub.cancel(pending))

    def call(self, group: str, role: str, method: str, parts: Sequence[Part], pending: PendingReplies) -> None:
        """Send one call; ``pending`` settles with the replies."""
        self._hub.post(lambda: self._hub.call(group, role, method, parts, pending))

    # -- details -----------------------------------------------------------------------------------------------------

    def _allow(self, prefixes: Iterable[str]) -> None:
        """Let functions and classes of more modules travel, to workers that run already too."""
        new = set(prefixes) - self._allow_imports
        if new:
            self._allow_imports |= new
            self._hub.post(lambda: self._hub.allow_imports(sorted(new)))

    def _new_member(self, group: str, rank: int, roles: tuple[str, ...]) -> Member:
        member = Member(f"{group}.{rank}-{secrets.token_hex(3)}", secrets.token_hex(8), rank, roles)
        keys = self._new_peer_keys(member.identity)
        if keys is not None:
            self._worker_keys[member.identity] = keys
            member.public_key = keys["public"]
        return member

    def _worker_bootstrap(self, group: str, member: Member, paths: Mapping[str, str], device: str | None) -> bytes:
        bootstrap = {
            "run_id": self.run_id,
            "identity": member.identity,
            "incarnation": member.incarnation,
            "group": group,
            "address": self.worker_address,
            "host_address": "127.0.0.1",
            "device": device,
            "roles": paths,
            "main": describe_main(),
            "allow_imports": sorted(self._allow_imports),
            "keys": self._worker_keys.pop(member.identity, None),
            "pulse": None if self._pulse is None else self._pulse.address,
            "handshake_s": self.start_timeout_s,
            "shared_memory_bytes": 0 if self._exchange is None else self._shared_memory_bytes,
        }
        return json.dumps(bootstrap).encode()

    def _new_peer_keys(self, identity: str) -> dict[str, str] | None:
        if self._keys is None:
            return None
        own: KeyPair = new_key_pair()
        self._allowed[own.public] = identity
        return {"public": own.public, "secret": own.secret, "server_public": self._keys.public}

    def _listen(self) -> Listener:
        if self._in_process:
            return listen(f"inproc://{self.run_id}")
        return listen(
            f"ipc://{self._run_dir}/control.sock" if self._keys is None else "tcp://127.0.0.1:0",
            keys=self._keys,
            allowed=None if self._keys is None else self._allowed.get,
        )

    def _watch_pulse(self, heartbeat_s: float | None) -> PulseWatch | None:
        if heartbeat_s is None or self._in_process:
            return None
        # A Unix socket also where calls go by TCP: all workers are on this machine, and one port is enough to open.
        address = f"ipc://{self._run_dir}/pulse.sock"
        return PulseWatch(address, heartbeat_s, keys=self._keys, allowed=self._allowed.get, on_silent=self._on_silent)

    def _on_silent(self, identity: str, silent_s: float) -> None:
        self._hub.post(lambda: self._hub.take_silence(identity, silent_s))

    def _start_agent(self, console: str) -> AgentProcess | ThreadAgent:
        def gone(how: str) -> None:
            self._hub.post(lambda: self._hub.agent_exited(how))

        if self._in_process:
            return ThreadAgent(self.address, AGENT, secrets.token_hex(8), on_exit=gone)
        return AgentProcess(
            {
                "run_id": self.run_id,
                "run_dir": str(self._run_dir),
                "log_dir": str(self.log_dir),
                "address": self.address,
                "identity": AGENT,
                "incarnation": secrets.token_hex(8),
                "node_rank": 0,
                "driver_pid": os.getpid(),
                "device": None,
                "console": console,
                "keys": self._new_peer_keys(AGENT),
                "handshake_s": self.start_timeout_s,
            },
            on_exit=gone,
        )
