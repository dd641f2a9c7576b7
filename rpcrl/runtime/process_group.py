"""How do a group's ranks meet in torch.distributed without a race for MASTER_PORT?

Rank 0 binds a port before anybody hears of it and holds it, bound but not listening, until the store takes it over:
no other process can be given it in between. ``init_process_group`` hands the held socket itself to the store; a
plain ``torch.distributed.init_process_group("gloo")`` works too, because the store's own bind may share the address.
"""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import TYPE_CHECKING

from rpcrl import env
from rpcrl.errors import UsageError

if TYPE_CHECKING:
    from rpcrl.runtime.worker import WorkerContext

__all__ = ["hold_port", "init_process_group"]


def hold_port(address: str) -> socket.socket:
    """Return a socket bound to a free port of ``address`` that does not listen yet."""
    held = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    # The store binds with SO_REUSEADDR too: as long as nobody listens, both may have the port.
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind((address, 0))
    return held


def init_process_group(context: WorkerContext, backend: str | None, *, timeout_s: float) -> None:
    """Join the default process group of this worker group; see ``Worker.init_process_group``."""
    if context.is_thread:
        raise UsageError(
            "init_process_group needs a process for each rank; with Controller(transport='inproc') all ranks are "
            "threads of one. Use transport='ipc'"
        )
    import torch.distributed as dist

    if dist.is_initialized():
        return
    host, port = env.get("MASTER_ADDR"), env.get("MASTER_PORT")
    if host is None or port is None:
        raise UsageError("MASTER_ADDR and MASTER_PORT are not set: is this a worker of a WorkerGroup?")
    timeout = timedelta(seconds=timeout_s)
    held: socket.socket | None = context.held_port
    listen_fd = None
    if held is not None:
        held.listen(4_096)
        listen_fd = held.detach()  # the store owns it from here on
        context.held_port = None
    store = dist.TCPStore(  # type: ignore[attr-defined]  # torch exports it on some platforms only
        host,
        int(port),
        context.world_size,
        is_master=listen_fd is not None,
        timeout=timeout,
        master_listen_fd=listen_fd,
    )
    dist.init_process_group(
        backend or ("nccl" if context.device == "cuda" else "gloo"),
        store=store,
        rank=context.rank,
        world_size=context.world_size,
        timeout=timeout,
    )
