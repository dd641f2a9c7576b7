"""How does a worker process start? Started by an agent as ``python -m launcher.shim rpcrl.runtime.worker_main``.

It reads its bootstrap from an inherited file descriptor and lives as ``worker_life`` says.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import sys
import threading
from types import FrameType
from typing import Any, NoReturn

from rpcrl import env, logs
from rpcrl.runtime.lease import read_references_here
from rpcrl.runtime.process_group import hold_port
from rpcrl.runtime.serve import Terminated
from rpcrl.runtime.worker import WorkerContext, set_context
from rpcrl.runtime.worker_group import register_handles
from rpcrl.runtime.worker_life import live
from rpcrl.transport.base import ClientKeys, KeyPair
from rpcrl.transport.pulse import Pulse

__all__ = ["main"]

_pulse: Pulse | None = None
EXIT_S = 2.0
"""How long a process's exit handlers may take."""


def main() -> int:
    """Run one worker; returns its exit status."""
    signal.signal(signal.SIGTERM, _on_sigterm)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the controller decides when a run ends
    bootstrap = _read_bootstrap()
    _start_pulse(bootstrap)
    context = _make_context(bootstrap)
    set_context(context)
    logs.set_up()
    register_handles(bootstrap["main"])
    read_references_here()
    for entry in bootstrap["main"]["sys_path"]:
        if entry not in sys.path:
            sys.path.append(entry)
    return live(context, bootstrap)


def _start_pulse(bootstrap: dict[str, Any]) -> None:
    """Answer heartbeats from now on, until the process ends: nobody closes this."""
    if bootstrap["pulse"] is not None:
        global _pulse
        keys = bootstrap["keys"]
        own = ClientKeys(KeyPair(keys["public"], keys["secret"]), keys["server_public"]) if keys else None
        _pulse = Pulse(bootstrap["pulse"], bootstrap["identity"], keys=own)


def _on_sigterm(number: int, frame: FrameType | None) -> None:
    raise Terminated(128 + number)


def _read_bootstrap() -> dict[str, Any]:
    fd = env.get(env.BOOTSTRAP_FD)
    if fd is None:
        raise SystemExit("rpcrl.runtime.worker_main is started by rpcrl's agent, not by hand")
    env.drop(env.BOOTSTRAP_FD)  # a grandchild is no worker
    with os.fdopen(int(fd), "rb") as pipe:
        bootstrap: dict[str, Any] = json.loads(pipe.read())
    return bootstrap


def _make_context(bootstrap: dict[str, Any]) -> WorkerContext:
    def number(name: str) -> int:
        return int(env.get(name) or 0)

    rank = number("RANK")
    return WorkerContext(
        identity=bootstrap["identity"],
        group=bootstrap["group"],
        rank=rank,
        world_size=number("WORLD_SIZE"),
        local_rank=number("LOCAL_RANK"),
        local_world_size=number("LOCAL_WORLD_SIZE"),
        node_rank=number("NODE_RANK"),
        device=bootstrap["device"],
        held_port=hold_port(bootstrap["host_address"]) if rank == 0 else None,
    )


def _leave(status: int) -> NoReturn:
    """End this process now. Taking an interpreter with torch in it apart lasts a second and more, for nobody."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    impatient = threading.Timer(EXIT_S, os._exit, [status])
    impatient.daemon = True
    impatient.start()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    try:
        code: object = main()
    except SystemExit as end:
        code = end.code
        if isinstance(code, str):
            sys.stderr.write(f"{code}\n")
    _leave(code if isinstance(code, int) else int(code is not None))
