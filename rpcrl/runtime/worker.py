"""What does a worker class inherit? Its ranks, its neighbours in the process, and the group's process group."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rpcrl import env
from rpcrl.errors import UsageError

__all__ = ["Worker", "WorkerContext", "context", "in_worker", "set_context"]


@dataclass
class WorkerContext:
    """What one worker process knows of itself. Kept outside of the Worker instances: a class may skip __init__."""

    identity: str
    group: str
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    device: str | None
    held_port: Any = None
    """Rank 0: the socket that holds MASTER_PORT until the store takes it over."""
    roles: dict[str, Any] = field(default_factory=dict)


_context: WorkerContext | None = None


def set_context(value: WorkerContext | None) -> None:
    """Set what this process is; called once, by the worker's start."""
    global _context
    _context = value


def in_worker() -> bool:
    """Tell whether this process is a worker that rpcrl started."""
    return _context is not None or env.get(env.BOOTSTRAP_FD) is not None


def context() -> WorkerContext:
    """Return this worker's context. Raises UsageError outside of a worker."""
    if _context is None:
        raise UsageError(
            "this is no worker process: rank, world_size and colocated exist on the workers of a WorkerGroup only"
        )
    return _context


class Worker:
    """Base of the classes that run on a WorkerGroup; methods marked with ``@register`` can be called on the group."""

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

    def init_process_group(self, backend: str | None = None, *, timeout_s: float = 1_800.0) -> None:
        """Join torch.distributed's default group over all ranks of this worker group (collective).

        ``backend``: ``gloo`` or ``nccl``; None takes nccl on cuda and gloo otherwise. Does nothing if it was done.
        """
        from rpcrl.runtime.process_group import init_process_group

        init_process_group(context(), backend, timeout_s=timeout_s)
