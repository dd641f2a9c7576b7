"""What does a worker do from its first word to its last? The same as a process and as threads of the driver's process.

It connects, says hello, waits until every rank of its group is there, builds its roles, says that it is ready, and
serves calls until it is told to end.
"""

from __future__ import annotations

import os
import socket
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rpcrl import env
from rpcrl.runtime.main_module import find_class
from rpcrl.runtime.peers import Me, Peers, listening_address
from rpcrl.runtime.serve import CallServer, Terminated
from rpcrl.runtime.worker import WorkerContext
from rpcrl.shm.exchange import open_exchange
from rpcrl.transport.base import ClientKeys, Connection, KeyPair, Limits
from rpcrl.transport.open import connect
from rpcrl.version import __version__
from rpcrl.wire.codec import decode
from rpcrl.wire.failures import describe
from rpcrl.wire.imports import ImportPolicy
from rpcrl.wire.messages import BUILD, Failure, Hello, Ready, Shutdown, Welcome

__all__ = ["live"]


def live(
    context: WorkerContext, bootstrap: Mapping[str, Any], *, serving: Callable[[CallServer], None] | None = None
) -> int:
    """Be a worker until the controller says goodbye; returns the exit status.

    ``serving`` is given the server before anything is said.
    """
    connection = _connect(bootstrap)
    imports = ImportPolicy(tuple(bootstrap["allow_imports"]))
    exchange = open_exchange(bootstrap["run_id"], bootstrap["identity"], bootstrap["shared_memory_bytes"])
    server = CallServer(
        connection, imports, incarnation=bootstrap["incarnation"], store=context.store, exchange=exchange
    )
    peers = Peers(server, _me(bootstrap))
    context.router = peers
    server.on_peers = peers.take
    if serving is not None:
        serving(server)
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


def _connect(bootstrap: Mapping[str, Any]) -> Connection:
    keys = bootstrap["keys"]
    return connect(
        bootstrap["address"],
        identity=bootstrap["identity"],
        limits=Limits(handshake_s=bootstrap["handshake_s"]),
        keys=ClientKeys(KeyPair(keys["public"], keys["secret"]), keys["server_public"]) if keys else None,
    )


def _me(bootstrap: Mapping[str, Any]) -> Me:
    keys = bootstrap["keys"]
    return Me(
        run_id=bootstrap["run_id"],
        identity=bootstrap["identity"],
        incarnation=bootstrap["incarnation"],
        address=listening_address(bootstrap["address"], bootstrap["host_address"], bootstrap["incarnation"]),
        keys=KeyPair(keys["public"], keys["secret"]) if keys else None,
    )


def _hello(context: WorkerContext, bootstrap: Mapping[str, Any]) -> Hello:
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
    server: CallServer, context: WorkerContext, bootstrap: Mapping[str, Any], welcome: Welcome, imports: ImportPolicy
) -> bool:
    """Build the roles in their order; on failure tell the controller why, and wait to be ended."""
    if not context.is_thread:
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
        if not context.is_thread:
            traceback.print_exc()  # the rank's log tells it too
        server.post(Failure(BUILD, "build", describe(error)))
        while not isinstance(server.next_message(), Shutdown):
            pass
        return False
    server.add_roles(context.roles)
    return True
