"""How does a worker process start? Started by an agent as ``python -m launcher.shim rpcrl.runtime.worker_main``.

It reads its bootstrap from an inherited file descriptor, says hello, waits until every rank of its group is there,
builds its roles, says that it is ready, and serves calls until it is told to end.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import socket
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from rpcrl import env, logs
from rpcrl.runtime.lease import read_references_here
from rpcrl.runtime.main_module import find_class
from rpcrl.runtime.peers import Me, Peers, listening_address
from rpcrl.runtime.process_group import hold_port
from rpcrl.runtime.serve import CallServer, Terminated
from rpcrl.runtime.worker import WorkerContext, set_context
from rpcrl.runtime.worker_group import register_handles
from rpcrl.transport.base import ClientKeys, Connection, KeyPair, Limits
from rpcrl.transport.open import connect
from rpcrl.version import __version__
from rpcrl.wire.codec import decode
from rpcrl.wire.failures import describe
from rpcrl.wire.imports import ImportPolicy
from rpcrl.wire.messages import BUILD, Failure, Hello, Ready, Shutdown, Welcome

__all__ = ["main"]

EXIT_S = 2.0
"""How long a process's exit handlers may take."""


def main() -> int:
    """Run one worker; returns its exit status."""
    signal.signal(signal.SIGTERM, _on_sigterm)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the controller decides when a run ends
    bootstrap = _read_bootstrap()
    context = _make_context(bootstrap)
    set_context(context)
    logs.set_up()
    register_handles(bootstrap["main"])
    read_references_here()
    for entry in bootstrap["main"]["sys_path"]:
        if entry not in sys.path:
            sys.path.append(entry)
    connection = _connect(bootstrap)
    imports = ImportPolicy(tuple(bootstrap["allow_imports"]))
    server = CallServer(connection, imports, incarnation=bootstrap["incarnation"], store=context.store)
    peers = Peers(server, _me(bootstrap))
    context.router = peers
    server.on_peers = peers.take
    server.start()
    try:
        server.post(_hello(context, bootstrap))
        message = server.next_message()
        if isinstance(message, Welcome):
            if not _build(server, context, bootstrap, message, imports):
                return 1
            server.post(Ready(context.identity))
            server.run()
    finally:
        peers.close()
        server.close()
    return 0 if server.failure is None else 1


def _me(bootstrap: dict[str, Any]) -> Me:
    keys = bootstrap["keys"]
    return Me(
        run_id=bootstrap["run_id"],
        identity=bootstrap["identity"],
        incarnation=bootstrap["incarnation"],
        address=listening_address(bootstrap["address"], bootstrap["host_address"], bootstrap["incarnation"]),
        keys=KeyPair(keys["public"], keys["secret"]) if keys else None,
    )


def _connect(bootstrap: dict[str, Any]) -> Connection:
    keys = bootstrap["keys"]
    return connect(
        bootstrap["address"],
        identity=bootstrap["identity"],
        limits=Limits(handshake_s=bootstrap["handshake_s"]),
        keys=ClientKeys(KeyPair(keys["public"], keys["secret"]), keys["server_public"]) if keys else None,
    )


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


def _hello(context: WorkerContext, bootstrap: dict[str, Any]) -> Hello:
    held = context.held_port
    return Hello(
        kind="worker",
        identity=context.identity,
        incarnation=bootstrap["incarnation"],
        host=socket.gethostname(),
        pid=os.getpid(),
        boot_id=Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
        versions={"python": sys.version.split()[0], "rpcrl": __version__},
        master_port=held.getsockname()[1] if held is not None else None,
    )


def _build(
    server: CallServer, context: WorkerContext, bootstrap: dict[str, Any], welcome: Welcome, imports: ImportPolicy
) -> bool:
    """Build the roles in their order; on failure tell the controller why, and wait to be ended."""
    env.put(welcome.environment)
    try:
        classes = {role: find_class(path, bootstrap["main"]) for role, path in bootstrap["roles"].items()}
        arguments = decode(welcome.payload, imports=imports)
        for role, kind in classes.items():
            args, kwargs = arguments[role]
            context.roles[role] = kind(*args, **kwargs)
    except Terminated:
        raise
    except BaseException as error:
        server.post(Failure(BUILD, "build", describe(error)))
        while not isinstance(server.next_message(), Shutdown):
            pass
        return False
    server.add_roles(context.roles)
    return True


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
