"""How do workers run as threads of the driver's own process? An agent that starts threads instead of processes.

It speaks the agent's part of the protocol over the inproc transport, so that everything above it is the same. Each
worker is a set of threads with a context of its own: it has the same server, the same order of calls, and arguments of
its own. What it has not is a process: no isolation, no environment, no process group, and no way to end a method that
runs.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rpcrl.errors import ClosedError, DecodeError, PeerUnreachableError
from rpcrl.logs import get_logger
from rpcrl.runtime.io_thread import IoThread
from rpcrl.runtime.line import OnePeer
from rpcrl.runtime.serve import CallServer
from rpcrl.runtime.worker import WorkerContext, enter_context
from rpcrl.runtime.worker_life import live
from rpcrl.shm.buffers import Buffer
from rpcrl.transport.open import connect
from rpcrl.version import __version__
from rpcrl.wire.frames import from_frames, to_frames
from rpcrl.wire.messages import (
    Hello,
    Message,
    Shutdown,
    StartWorkers,
    StopWorkers,
    WorkerExited,
    WorkerStart,
    WorkerStarted,
)

__all__ = ["ThreadAgent", "unsupported"]

logger = get_logger(__name__)

RETRY_SEND_S = 0.05
STOP_GRACE_S = 3.0
"""How long workers may take to end when the controller closes."""


class _ThreadWorker:
    """One worker: its main thread, and the threads that its server starts."""

    def __init__(self, start: WorkerStart, device: str | None, ended: Callable[[_ThreadWorker], None]) -> None:
        bootstrap: dict[str, Any] = json.loads(start.bootstrap)
        # The classes of the driver's script are those that it has defined itself: nothing is loaded twice.
        self._bootstrap = {**bootstrap, "main": {}}
        self.identity = start.identity
        self.exit_code: int | None = None
        self.last_lines: tuple[str, ...] = ()
        self._context = WorkerContext(
            identity=start.identity,
            group=bootstrap["group"],
            rank=start.rank,
            world_size=start.world_size,
            local_rank=start.local_rank,
            local_world_size=start.local_world_size,
            node_rank=start.node_rank,
            device=device,
            is_thread=True,
        )
        self._server: CallServer | None = None
        self._told = threading.Lock()
        self._stop_reason: str | None = None
        self._ended = ended
        self.thread = threading.Thread(target=self._run, name=f"rpcrl-{start.identity}", daemon=True)
        self.thread.start()

    def stop(self, reason: str) -> None:
        """Have the worker end after the method that runs; returns at once."""
        with self._told:
            self._stop_reason = reason
            if self._server is not None:
                self._server.quit(reason)

    def _serving(self, server: CallServer) -> None:
        with self._told:
            self._server = server
            if self._stop_reason is not None:
                server.quit(self._stop_reason)

    def _run(self) -> None:
        enter_context(self._context)
        try:
            self.exit_code = live(self._context, self._bootstrap, serving=self._serving)
        except BaseException:
            self.exit_code = 1
            self.last_lines = tuple(traceback.format_exc().splitlines()[-20:])
        finally:
            self._ended(self)


class ThreadAgent:
    """Starts and ends workers as threads; stands where ``AgentProcess`` stands otherwise."""

    def __init__(self, address: str, identity: str, incarnation: str, *, on_exit: Callable[[str], None]) -> None:
        self.pid = os.getpid()
        self._identity = identity
        self._workers: dict[str, _ThreadWorker] = {}
        self._on_exit = on_exit
        self._closing = False
        self._end = OnePeer(connect(address, identity=identity))
        self._io = IoThread(self._end, self, name="rpcrl-agent")
        self._io.start()
        hello = Hello(
            kind="agent",
            identity=identity,
            incarnation=incarnation,
            host=socket.gethostname(),
            pid=self.pid,
            boot_id="",
            versions={"rpcrl": __version__},
        )
        self._io.post(lambda: self._send(hello))

    # -- the controller's thread -------------------------------------------------------------------------------------

    def close(self, timeout_s: float) -> None:
        """Wait until the workers have ended, which the controller has asked for; leaves those that do not."""
        self._io.join(timeout_s)
        self.kill()

    def kill(self, patience_s: float = 5.0) -> None:
        """End without waiting for methods that run; their threads go on until these return."""
        self._io.stop(self._leave)
        self._io.join(patience_s)

    def _leave(self) -> None:
        if not self._closing:
            self._closing = True
            for worker in self._workers.values():
                worker.stop("the controller is closed")

    # -- I/O thread --------------------------------------------------------------------------------------------------

    def take(self, peer: str, frames: Sequence[Buffer]) -> None:
        """Take a message of the controller."""
        try:
            message = from_frames(frames)
        except DecodeError as error:
            logger.error("a message of the controller was dropped: %s", error)
            return
        if isinstance(message, StartWorkers):
            for start in message.workers:
                self._workers[start.identity] = _ThreadWorker(start, message.device, self._worker_ended)
                self._send(WorkerStarted(start.identity, self.pid, ""))
        elif isinstance(message, StopWorkers):
            self._stop_workers(message.identities, message.grace_s)
        elif isinstance(message, Shutdown):
            self._closing = True
            self._stop_workers(tuple(self._workers), STOP_GRACE_S)
            self._leave_when_empty()
        else:
            logger.error("a message of kind %s is not for an agent; it was dropped", type(message).__name__)

    def tick(self) -> None:
        """Nothing is due by the clock alone."""

    def next_tick_at(self) -> float | None:
        """Nothing is due by the clock alone."""
        return None

    def failed(self, error: BaseException) -> None:
        """Tell the controller that nobody looks after its workers any more."""
        self._on_exit(f"the agent's thread failed: {type(error).__name__}: {error}")

    def _send(self, message: Message) -> None:
        try:
            self._end.send("", to_frames(message))
        except PeerUnreachableError:
            self._io.after(RETRY_SEND_S, lambda: self._send(message))
        except ClosedError:
            logger.debug("a message was dropped: this agent has ended")

    def _stop_workers(self, identities: Sequence[str], grace_s: float) -> None:
        for identity in identities:
            if (worker := self._workers.get(identity)) is not None:
                worker.stop("the group ends")
        self._io.after(grace_s, lambda: self._give_up(identities))

    def _give_up(self, identities: Sequence[str]) -> None:
        for identity in identities:
            worker = self._workers.get(identity)
            if worker is not None:
                logger.warning("worker %s does not end: a thread cannot be ended from outside", identity)
                worker.last_lines = ("its thread still runs: a thread cannot be ended from outside",)
                self._report(worker)

    def _worker_ended(self, worker: _ThreadWorker) -> None:
        """Hear of a worker's end; called in its thread."""
        self._io.post(lambda: self._report(worker))

    def _report(self, worker: _ThreadWorker) -> None:
        if self._workers.pop(worker.identity, None) is None:
            return
        self._send(
            WorkerExited(
                identity=worker.identity,
                host=socket.gethostname(),
                pid=self.pid,
                exit_code=worker.exit_code,
                signal=None,
                peak_rss_bytes=0,
                out_of_memory=False,
                last_lines=worker.last_lines,
                log_path="",
            )
        )
        self._leave_when_empty()

    def _leave_when_empty(self) -> None:
        if self._closing and not self._workers:
            self._io.end()


def unsupported(device: str | None, environment: Mapping[str, str]) -> str:
    """Return what a group of threads cannot have of what is asked for; empty if it can have all."""
    if device == "cuda":
        return "device='cuda': all ranks would share the driver's devices. Use Controller(transport='ipc')"
    if environment:
        return (
            f"environment={dict(environment)}: all ranks share the driver's environment. Set the variables before the "
            "program starts, or use Controller(transport='ipc')"
        )
    return ""
