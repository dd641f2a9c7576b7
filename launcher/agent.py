"""What does the agent of a node do? It starts, watches and ends workers, and outlives everybody to clear up.

Everything that forks or waits happens in the main thread (a worker's parent-death signal follows that thread), in one
selector loop: the controller's messages, worker output, SIGCHLD, timers, and the driver's life (end of file on standard
input, and a pidfd). When the driver is gone all workers are killed at once; nothing asks the network for that.
"""

from __future__ import annotations

import json
import os
import platform
import selectors
import signal
import socket
import sys
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field

from launcher.devices import Inventory, find_devices
from launcher.link import Link
from launcher.plan import Node, plan_workers
from launcher.supervise import Supervisor
from launcher.sweep import become_subreaper, sweep_run
from rpcrl import env, logs
from rpcrl.errors import ConfigError, UsageError
from rpcrl.leftovers import machine_id
from rpcrl.transport.base import ClientKeys, KeyPair, Limits
from rpcrl.version import __version__
from rpcrl.wire.messages import Hello, Message, Shutdown, StartWorkers, StopWorkers

__all__ = ["Agent", "Bootstrap", "main", "read_bootstrap"]

_SHUTDOWN_GRACE_S = 1.0
_MAX_BACKLOG = 8
"""Messages that may wait for the transport before console lines are held back."""
_QUEUE_MESSAGES = 1000
"""The agent's share of memory for a controller that does not read: this many console batches."""
_log = logs.get_logger(__name__)


@dataclass(frozen=True)
class Bootstrap:
    """What the runtime hands to an agent at its start."""

    run_id: str
    run_dir: str
    log_dir: str
    address: str
    identity: str
    incarnation: str
    node_rank: int = 0
    driver_pid: int | None = None
    """None when the driver runs on another host; then only standard input tells of its end."""
    device: str | None = None
    console: str = "default"
    handshake_s: float = 30.0
    keys: Mapping[str, str] | None = field(default=None, repr=False)
    """``public``, ``secret`` and ``server_public`` in Z85; None for a Unix socket."""


def read_bootstrap() -> Bootstrap:
    """Read the inherited descriptor and close it. Raises UsageError when there is none or it is not valid."""
    number = env.get(env.BOOTSTRAP_FD, "")
    if not number or not number.isdecimal():
        raise UsageError(f"`python -m launcher` is started by rpcrl, which sets {env.BOOTSTRAP_FD}; it is {number!r}")
    try:
        with open(int(number), "rb") as file:
            fields = json.loads(file.read())
        return Bootstrap(**fields)
    except (OSError, ValueError, TypeError) as error:
        # Not the content: it holds a key.
        raise UsageError(
            f"file descriptor {number} does not hold an agent's bootstrap: {type(error).__name__}"
        ) from None


class Agent:
    """One node's agent; made and run in the main thread."""

    def __init__(self, bootstrap: Bootstrap) -> None:
        self._bootstrap = bootstrap
        self._host = socket.gethostname()
        self._environment = env.snapshot()
        self._inventory: Inventory | None = None
        self._selector = selectors.DefaultSelector()
        self._status: int | None = None
        self._shutting_down = False
        keys = bootstrap.keys
        self._link = Link(
            bootstrap.address,
            identity=bootstrap.identity,
            limits=Limits(handshake_s=bootstrap.handshake_s, max_queued_messages=_QUEUE_MESSAGES),
            keys=ClientKeys(KeyPair(keys["public"], keys["secret"]), keys["server_public"]) if keys else None,
        )
        self._supervisor = Supervisor(
            self._selector,
            self._link.send,
            run_id=bootstrap.run_id,
            host=self._host,
            console=bootstrap.console,
            console_has_room=lambda: self._link.backlog < _MAX_BACKLOG,
        )

    def run(self) -> int:
        """Serve until Shutdown, SIGTERM or the driver's end; return the exit status. Nothing of the run is left."""
        become_subreaper()
        self._watch_signals()
        self._selector.register(self._link.event_fd, selectors.EVENT_READ, self._on_messages)
        self._watch_driver()
        try:
            if self._status is None:
                self._link.send(self._hello())
                self._link.start()
            while self._status is None:
                self._turn()
            return self._status
        finally:
            # Also after an error of our own: the workers must not outlive their agent's knowledge of them.
            self._supervisor.kill_all()
            sweep_run(self._bootstrap.run_id, self._bootstrap.run_dir, self._bootstrap.log_dir)

    def _turn(self) -> None:
        deadline_s = self._supervisor.next_deadline_s()
        timeout_s = None if deadline_s is None else max(0.0, deadline_s - time.monotonic())
        for key, _ in self._selector.select(timeout_s):
            if key.fileobj in self._selector.get_map():
                key.data()
        self._supervisor.on_time()
        if self._shutting_down and not self._supervisor.running and self._status is None:
            self._link.close(timeout_s=Limits().linger_s + 1.0)
            self._status = 0

    # ---- what the loop listens to -----------------------------------------------------------------------------

    def _watch_signals(self) -> None:
        reading, writing = socket.socketpair()
        reading.setblocking(False)
        writing.setblocking(False)
        self._signals = (reading, writing)
        signal.set_wakeup_fd(writing.fileno(), warn_on_full_buffer=False)
        # Handlers that do nothing, not SIG_IGN: an ignored signal would stay ignored in the workers.
        for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda *_: None)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        self._selector.register(reading, selectors.EVENT_READ, self._on_signals)

    def _on_signals(self) -> None:
        numbers = self._signals[0].recv(4096)
        if signal.SIGTERM in numbers:
            self._shut_down("SIGTERM")
        if signal.SIGCHLD in numbers:
            self._supervisor.reap()

    def _watch_driver(self) -> None:
        try:
            self._selector.register(0, selectors.EVENT_READ, self._on_stdin)
        except (PermissionError, ValueError, OSError):
            _log.info("standard input is not a pipe: the driver's end is not seen there")
        if self._bootstrap.driver_pid is None:
            return
        try:
            driver = os.pidfd_open(self._bootstrap.driver_pid)
        except ProcessLookupError:
            self._driver_gone("its process does not exist")
        else:
            self._selector.register(driver, selectors.EVENT_READ, lambda: self._driver_gone("its process has ended"))

    def _on_stdin(self) -> None:
        if not os.read(0, 4096):
            self._driver_gone("its pipe is closed")

    def _driver_gone(self, how: str) -> None:
        _log.debug("the driver is gone (%s): ending all workers", how)
        self._status = 1

    # ---- the controller's messages ----------------------------------------------------------------------------

    def _hello(self) -> Hello:
        inventory = self._devices() if self._bootstrap.device == "cuda" else Inventory()
        return Hello(
            kind="agent",
            identity=self._bootstrap.identity,
            incarnation=self._bootstrap.incarnation,
            host=self._host,
            pid=os.getpid(),
            boot_id=machine_id(),
            versions={"python": platform.python_version(), "rpcrl": __version__},
            devices=inventory.devices,
        )

    def _on_messages(self) -> None:
        for message in self._link.received():
            self._obey(message)
        if self._link.failure is not None and self._status is None:
            error = self._link.failure
            _log.error("the agent has lost its controller: %s: %s", type(error).__name__, error)
            self._status = 1

    def _obey(self, message: Message) -> None:
        if isinstance(message, StartWorkers):
            self._start(message)
        elif isinstance(message, StopWorkers):
            self._supervisor.stop(message.identities, message.grace_s)
        elif isinstance(message, Shutdown):
            self._shut_down(message.reason)
        else:
            _log.warning("an agent does not understand a %s", type(message).__name__)

    def _start(self, message: StartWorkers) -> None:
        if self._shutting_down:
            problem = "the agent is shutting down"
        else:
            try:
                specs = plan_workers(message, self._node(message.device))
            except ConfigError as error:
                problem = str(error)
            else:
                self._supervisor.start(specs)
                return
        for worker in message.workers:
            self._supervisor.report_not_started(worker.identity, problem)

    def _shut_down(self, reason: str) -> None:
        _log.debug("shutting down: %s", reason)
        self._shutting_down = True
        self._supervisor.stop(None, _SHUTDOWN_GRACE_S)

    def _node(self, device: str | None) -> Node:
        return Node(
            run_id=self._bootstrap.run_id,
            log_dir=self._bootstrap.log_dir,
            python=sys.executable,
            agent_pid=os.getpid(),
            environment=self._environment,
            inventory=self._devices() if device == "cuda" else Inventory(),
        )

    def _devices(self) -> Inventory:
        """Look for devices once, and only when they are needed."""
        if self._inventory is None:
            self._inventory = find_devices(self._environment)
        return self._inventory


def main() -> int:
    """Run an agent with the bootstrap that the runtime hands over; returns only when there is none."""
    if os.getsid(0) != os.getpid():
        try:
            os.setsid()
        except PermissionError:
            # Leader of a process group already, as under some launchers: its terminal's signals are handled anyway.
            pass
    logs.set_up(prefix="[rpcrl agent] ")
    try:
        bootstrap = read_bootstrap()
    except UsageError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    status = 70
    try:
        status = Agent(bootstrap).run()
    except Exception:
        traceback.print_exc()
    finally:
        # Not through interpreter shutdown: that would wait for the link's thread and its sockets.
        sys.stderr.flush()
        os._exit(status)
