"""The controller's side of an agent, for tests: starts ``python -m launcher`` as the runtime does and speaks to it.

``python -m tests.cluster.fake_controller RUN_DIR LOG_DIR MODE`` is a driver to be killed: it starts an agent with two
workers that each have a grandchild, prints one JSON line with all pids, and waits. MODE ``pipe`` keeps its pid from
the agent, which then has only its standard input to go by; ``held`` leaves that pipe open in another process.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path

from rpcrl import env
from rpcrl.leftovers import create_run_dir
from rpcrl.transport.base import KeyPair
from rpcrl.transport.keys import new_key_pair
from rpcrl.transport.open import listen
from rpcrl.wire.frames import from_frames, to_frames
from rpcrl.wire.messages import (
    Hello,
    Message,
    Shutdown,
    StartWorkers,
    StopWorkers,
    WorkerExited,
    WorkerOutput,
    WorkerStart,
    WorkerStarted,
)

WORKER = "tests.cluster.small_worker"


class FakeController:
    """One run with one agent. ``until`` receives messages; ``close`` ends the run in order."""

    def __init__(
        self,
        run_dir: Path | None,
        log_dir: Path,
        *,
        tcp: bool = False,
        device: str | None = "cpu",
        console: str = "default",
        tell_pid: bool = True,
        admit: bool = True,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        self.run_id = uuid.uuid4().hex[:12]
        self.run_dir = create_run_dir(self.run_id, run_dir)
        self.log_dir = log_dir
        self.identity = f"agent-{self.run_id}"
        self.messages: list[Message] = []
        self.closed = False
        own = new_key_pair() if tcp else None
        server = new_key_pair() if tcp else None
        allowed = {own.public: self.identity} if own and admit else {}
        self.listener = listen(
            "tcp://127.0.0.1:0" if tcp else f"ipc://{self.run_dir}/c.sock",
            keys=server,
            allowed=allowed.get if tcp else None,
        )
        self.bootstrap = {
            "run_id": self.run_id,
            "run_dir": str(self.run_dir),
            "log_dir": str(log_dir),
            "address": self.listener.address,
            "identity": self.identity,
            "incarnation": "1",
            "node_rank": 0,
            "driver_pid": os.getpid() if tell_pid else None,
            "device": device,
            "console": console,
            "keys": _keys(own, server),
            "handshake_s": 30.0,
        }
        self.process = self._start_agent({**os.environ, **(variables or {})})

    def _start_agent(self, variables: dict[str, str]) -> subprocess.Popen[bytes]:
        handover = os.memfd_create("bootstrap")
        os.write(handover, json.dumps(self.bootstrap).encode())
        os.lseek(handover, 0, os.SEEK_SET)
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "launcher"],
            stdin=subprocess.PIPE,
            env={**variables, **env.child_path(), env.RUN_ID: self.run_id, env.BOOTSTRAP_FD: str(handover)},
            pass_fds=(handover,),
            start_new_session=True,
        )
        os.close(handover)
        return process

    def send(self, message: Message) -> None:
        self.listener.send(self.identity, to_frames(message))

    def start(
        self,
        *steps_by_rank: list[list[object]],
        name: str = "g",
        module: str = WORKER,
        device: str | None = "cpu",
        **more,
    ) -> None:
        """Start a group whose workers do these steps; waits for the agent's hello first."""
        self.until(self.hello)
        count = len(steps_by_rank)
        workers = tuple(
            WorkerStart(f"{name}-{rank}", rank, count, 0, rank, count, rank, (), json.dumps({"steps": steps}).encode())
            for rank, steps in enumerate(steps_by_rank)
        )
        self.send(StartWorkers(name, module, device, workers, **more))

    def stop(self, *identities: str, grace_s: float = 1.0) -> None:
        self.send(StopWorkers(identities, grace_s))

    def until(self, condition: Callable[[], object], within_s: float = 30.0) -> None:
        """Receive until ``condition`` holds. Raises AssertionError when it takes too long or the agent has died."""
        deadline = time.monotonic() + within_s
        while not condition():
            left = deadline - time.monotonic()
            if left <= 0:
                raise AssertionError(f"not within {within_s} s; messages: {self.messages}")
            received = self.listener.receive(min(left, 0.1))
            if received is not None:
                self.messages.append(from_frames(received[1]))
            elif self.process.poll() is not None and not condition():
                raise AssertionError(f"the agent ended with {self.process.poll()}; messages: {self.messages}")

    def hello(self) -> Hello | None:
        return next((message for message in self.messages if isinstance(message, Hello)), None)

    def started(self) -> dict[str, int]:
        return {message.identity: message.pid for message in self.messages if isinstance(message, WorkerStarted)}

    def exits(self) -> dict[str, WorkerExited]:
        return {message.identity: message for message in self.messages if isinstance(message, WorkerExited)}

    def lines(self, identity: str = "g-0") -> list[str]:
        outputs = [message for message in self.messages if isinstance(message, WorkerOutput)]
        return [line for message in outputs if message.identity == identity for line in message.lines]

    def grandchildren(self) -> list[int]:
        """Return the pids that workers have printed as those of their grandchildren."""
        lines = [line for message in self.messages if isinstance(message, WorkerOutput) for line in message.lines]
        return [int(line.removeprefix("GRANDCHILD ")) for line in lines if line.startswith("GRANDCHILD ")]

    def close(self) -> int:
        """End the run in order and return the agent's exit status; may be called again."""
        if self.closed:
            return self.process.wait()
        self.closed = True
        if self.process.poll() is None:
            self.until(self.hello)
            self.send(Shutdown("test over"))
        try:
            status = self.process.wait(timeout=20)
        finally:
            self.release()
        while (received := self.listener.receive(0)) is not None:
            self.messages.append(from_frames(received[1]))
        self.listener.close()
        return status

    def release(self) -> None:
        """Close what the process holds; the agent is killed when it still runs."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        if self.process.stdin is not None:
            self.process.stdin.close()


def _keys(own: KeyPair | None, server: KeyPair | None) -> dict[str, str] | None:
    if own is None or server is None:
        return None
    return {"public": own.public, "secret": own.secret, "server_public": server.public}


def main(run_dir: str, log_dir: str, mode: str) -> None:
    """Be the driver of the module's docstring."""
    controller = FakeController(Path(run_dir), Path(log_dir), console="all", tell_pid=mode != "pipe")
    pids = [os.getpid(), controller.process.pid]
    if mode == "held" and controller.process.stdin is not None:
        held = controller.process.stdin.fileno()
        pids.append(subprocess.Popen(["sleep", "600"], pass_fds=(held,), stdout=subprocess.DEVNULL).pid)
    controller.start(
        [["grandchild", "plain"], ["print", "up"], ["wait"]],
        [["ignore_sigterm"], ["grandchild", "session"], ["print", "up"], ["wait"]],
    )
    controller.until(lambda: len(controller.grandchildren()) == 2)
    facts = {
        "run_id": controller.run_id,
        "driver": pids[0],
        "agent": pids[1],
        "holder": pids[2:],
        "workers": list(controller.started().values()),
        "grandchildren": controller.grandchildren(),
    }
    sys.stdout.write(json.dumps(facts) + "\n")
    sys.stdout.flush()
    signal.pause()


if __name__ == "__main__":
    main(*sys.argv[1:])
