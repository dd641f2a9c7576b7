"""What does a worker class inherit? Its ranks, its neighbours in the process, and the group's process group."""

from __future__ import annotations

import operator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from rpcrl import env
from rpcrl.dispatch.register import register
from rpcrl.errors import UsageError
from rpcrl.runtime.store import Store

if TYPE_CHECKING:
    from rpcrl.runtime.router import Router

__all__ = ["Worker", "WorkerContext", "context", "enter_context", "in_worker", "refuse_in_worker", "set_context"]


@dataclass
class WorkerContext:
    """What one worker knows of itself. Kept outside of the Worker instances: a class may skip __init__."""

    identity: str
    group: str
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    device: str | None
    is_thread: bool = False
    """Whether this worker is threads of the driver's process, and no process."""
    held_port: Any = None
    """Rank 0: the socket that holds MASTER_PORT until the store takes it over."""
    router: Router | None = None
    """The way to other groups, for the handles that this worker is given."""
    store: Store = field(default_factory=Store)
    """Results that this worker keeps."""
    roles: dict[str, Any] = field(default_factory=dict)
    meshes: dict[tuple[int, str], tuple[int, bool]] = field(default_factory=dict)
    """(id of the role's instance, mesh) → (dp rank, does this rank collect?)."""


_context: WorkerContext | None = None
"""Of a worker process, for all its threads."""
_of_thread: ContextVar[WorkerContext | None] = ContextVar("rpcrl_worker", default=None)
"""Of a worker that is threads: its own thread and those that rpcrl or asyncio start for it."""


def set_context(value: WorkerContext | None) -> None:
    """Set what this process is; called once, by the worker's start."""
    global _context
    _context = value


def enter_context(value: WorkerContext) -> None:
    """Make this thread, and those that are made by ``new_thread`` from it, part of a worker."""
    _of_thread.set(value)


def in_worker() -> bool:
    """Tell whether this process, or this thread, is a worker that rpcrl started."""
    return _of_thread.get() is not None or _context is not None or env.get(env.BOOTSTRAP_FD) is not None


def refuse_in_worker() -> None:
    """Raise UsageError inside a worker: it has no controller, and loads the script of the one that it belongs to."""
    if in_worker():
        raise UsageError(
            "Controller() was called inside a worker process. A worker loads the driver's script once to find its "
            "classes, so the script must not start a run at its top level: put the part that runs under\n\n"
            '    if __name__ == "__main__":\n        main()\n'
        )


def context() -> WorkerContext:
    """Return this worker's context. Raises UsageError outside of a worker."""
    found = _of_thread.get() or _context
    if found is None:
        raise UsageError(
            "this is no worker: rank, world_size and colocated exist on the workers of a WorkerGroup only (with "
            "transport='inproc' not in a thread that a worker has started by itself; asyncio.to_thread works)"
        )
    return found


class Worker:
    """Base of the classes that run on a WorkerGroup; methods marked with ``@register`` can be called on the group."""

    allow_unregistered: ClassVar[bool] = False
    """True lets ``group.execute_all`` and ``execute_rank_zero`` call any public method of this class by its name."""

    @property
    def rank(self) -> int:
        """Rank in the group."""
        return context().rank

    @property
    def world_size(self) -> int:
        """Number of ranks in the group."""
        return context().world_size

    @property
    def local_rank(self) -> int:
        """Rank among the group's workers of this node."""
        return context().local_rank

    @property
    def local_world_size(self) -> int:
        """Number of the group's workers on this node."""
        return context().local_world_size

    @property
    def node_rank(self) -> int:
        """Rank of this node in the group's pool."""
        return context().node_rank

    @property
    def device(self) -> str | None:
        """``cpu``, ``cuda`` or None, as the pool says."""
        return context().device

    def colocated(self, role: str) -> Any:
        """Return the instance of another role in this process. Raises UsageError naming the roles that are here."""
        roles = context().roles
        if role not in roles:
            raise UsageError(
                f"no role {role!r} in this process; here are: {', '.join(roles) or 'none yet'}. Roles are built in the "
                "order in which the group lists them, and are colocated by giving WorkerGroup a dict of roles"
            )
        return roles[role]

    def register_mesh(self, name: str, dp_rank: int, *, is_collect: bool = True) -> None:
        """Say which part of a batch this rank works on in methods of mode ``mesh(name)``, and if its result counts.

        Call it on every rank, before the first such method, e.g. in the constructor. Exactly one rank for each dp
        rank collects. Raises UsageError if the mesh was registered by this role already.
        """
        meshes = context().meshes
        if (id(self), name) in meshes:
            raise UsageError(f"mesh {name!r} was registered by this worker already")
        try:
            number = operator.index(dp_rank)
        except TypeError:
            number = -1
        if number < 0 or isinstance(dp_rank, bool):
            raise UsageError(f"mesh {name!r}: dp_rank={dp_rank!r} must be an integer of 0 or more")
        meshes[id(self), name] = (number, bool(is_collect))

    @register
    def _query_mesh(self, name: str) -> tuple[int, bool]:
        """Return (dp rank, does it collect?) of this rank; asked by the group once."""
        meshes = context().meshes
        if (id(self), name) not in meshes:
            known = ", ".join(repr(mesh) for owner, mesh in meshes if owner == id(self)) or "none"
            raise UsageError(
                f"{type(self).__name__} has no mesh {name!r} on rank {self.rank} (registered: {known}); call "
                f"self.register_mesh({name!r}, dp_rank, is_collect=…) in its constructor"
            )
        return meshes[id(self), name]

    def init_process_group(self, backend: str | None = None, *, timeout_s: float = 1_800.0) -> None:
        """Join torch.distributed's default group over all ranks of this worker group (collective).

        ``backend``: ``gloo`` or ``nccl``; None takes nccl on cuda and gloo otherwise. Does nothing if it was done.
        """
        from rpcrl.runtime.process_group import init_process_group

        init_process_group(context(), backend, timeout_s=timeout_s)
