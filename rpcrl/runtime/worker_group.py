"""What is a worker group? Its processes on the driver's side, and a handle of them wherever it is passed to.

The handle is called like an object of the worker class, see ``remote_method``; in a worker it calls the group's
workers directly.
"""

from __future__ import annotations

import difflib
import inspect
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Generic, Self, TypeVar, overload

from rpcrl import env
from rpcrl.dispatch.mode import Mesh
from rpcrl.dispatch.register import PLAIN, callable_method, registered_methods
from rpcrl.errors import DispatchError, UnknownMethodError, UsageError, WorkerExit
from rpcrl.runtime.controller import STOP_GRACE_S, Controller, current_controller, open_controller
from rpcrl.runtime.future import Future
from rpcrl.runtime.main_module import class_path, find_class
from rpcrl.runtime.remote_method import RemoteMethod
from rpcrl.runtime.router import Router
from rpcrl.runtime.timing import Stopwatch
from rpcrl.runtime.worker import Worker, context, in_worker
from rpcrl.topology import ResourcePool
from rpcrl.wire.codec import register_codec

__all__ = ["ClassWithInitArgs", "WorkerGroup", "WorkerHandle", "register_handles"]

W = TypeVar("W")
"""The worker class; of a group of several roles, ``rpcrl.mypy_plugin`` sets a TypedDict of them."""
Role = TypeVar("Role", covariant=True)


class ClassWithInitArgs(Generic[Role]):
    """A worker class and the arguments that every rank constructs it with."""

    def __init__(self, cls: type[Role], *args: Any, **kwargs: Any) -> None:
        self.cls = cls
        self.args = args
        self.kwargs = kwargs


@dataclass
class _Shared:
    """What a group and its views have in common."""

    router: Router
    pool: ResourcePool
    name: str
    identities: tuple[str, ...]
    classes: dict[str, type]
    owner: Controller | None = None
    """The controller that ends the group's processes; None for a handle in a worker, which does not own them."""
    exits: list[WorkerExit] | None = None


_groups: weakref.WeakValueDictionary[tuple[str, str], _Shared] = weakref.WeakValueDictionary()
"""(run, name) → the driver's groups, for handles that come back from workers."""


class WorkerGroup(Generic[W]):
    """One worker process per slot of a pool, called as if it were one object.

    ``WorkerGroup(pool, MyWorker, *args, **kwargs)`` constructs ``MyWorker(*args, **kwargs)`` on every rank; the
    registered methods of the class are methods of the group. ``WorkerGroup(pool, {"actor": ClassWithInitArgs(A, …),
    "rollout": ClassWithInitArgs(B, …)})`` colocates several roles in each process, built in this order; ``spawn()``
    gives a view for each role.

    ``name`` shows in logs and errors; ``environment`` sets variables of the workers (rank and device variables are
    refused); ``controller`` is the one opened last by default. Use ClassWithInitArgs where a constructor has
    parameters of these names.

    A group may be an argument of another group's methods: there it is a handle, which calls these workers directly.

    Returns when every rank has built its roles. Raises StartError with the remote story if one has not (then all are
    ended), UsageError or DispatchError before anything is started.
    """

    @overload
    def __init__(
        self,
        pool: ResourcePool,
        worker_cls: type[W] | ClassWithInitArgs[W],
        *args: Any,
        name: str | None = None,
        environment: Mapping[str, str] | None = None,
        controller: Controller | None = None,
        **kwargs: Any,
    ) -> None: ...
    @overload
    def __init__(
        self: WorkerGroup[Any],
        pool: ResourcePool,
        worker_cls: Mapping[str, ClassWithInitArgs[Any] | type],
        *,
        name: str | None = None,
        environment: Mapping[str, str] | None = None,
        controller: Controller | None = None,
    ) -> None: ...

    def __init__(
        self,
        pool: ResourcePool,
        worker_cls: type[W] | ClassWithInitArgs[W] | Mapping[str, ClassWithInitArgs[Any] | type],
        *args: Any,
        name: str | None = None,
        environment: Mapping[str, str] | None = None,
        controller: Controller | None = None,
        **kwargs: Any,
    ) -> None:
        if not isinstance(pool, ResourcePool):
            raise UsageError(f"WorkerGroup needs a ResourcePool first, e.g. ResourcePool([2]), got {pool!r}")
        roles = _roles_of(worker_cls, args, kwargs, name)
        environment = dict(environment or {})
        _check_environment(environment)
        for role, item in roles.items():
            _check_names(role, item.cls)
        controller = controller or current_controller()
        specs = {role: (item.cls, item.args, item.kwargs) for role, item in roles.items()}
        group = controller.start_group(pool, specs, name=name, environment=environment)
        classes = {role: item.cls for role, item in roles.items()}
        shared = _Shared(controller, pool, group.name, group.identities, classes, owner=controller)
        _groups[controller.run_id, group.name] = shared
        # When the last handle of the group is gone, so is the use of its processes.
        weakref.finalize(shared, controller.abandon_group, group.name).atexit = False
        self._attach(shared, next(iter(roles)) if len(roles) == 1 else None)

    def _attach(self, shared: _Shared, role: str | None) -> None:
        """Make this object the group's handle for one role; None is the group of several roles as a whole."""
        self._shared = shared
        self._role = role
        self._watches: dict[str, list[Stopwatch]] = {}
        self._meshes: dict[str, Mesh] = {}
        self._methods = {} if role is None else registered_methods(shared.classes[role])

    def __getattr__(self, name: str) -> RemoteMethod[..., Any, Any]:
        # Made anew each time: a group that held its methods, which hold it, would outlive its last user.
        if self._role is not None and name in self.__dict__.get("_methods", {}):
            watches = self._watches.setdefault(name, [])
            worker_cls = self._shared.classes[self._role]
            return RemoteMethod(self, self._role, worker_cls, name, self._methods[name], watches=watches)
        if name.startswith("_"):
            raise AttributeError(name)
        raise UnknownMethodError(self._unknown(name))

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self._methods})

    def __repr__(self) -> str:
        role = self._role or "+".join(self._shared.classes)
        return f"<WorkerGroup {self.name!r}: {role} on {self.world_size} workers>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def name(self) -> str:
        """Name of the group in logs and errors."""
        return self._shared.name

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self._shared.identities)

    @property
    def identities(self) -> tuple[str, ...]:
        """Names of the workers, in rank order; each is given once in a run."""
        return self._shared.identities

    @property
    def router(self) -> Router:
        """The way to the workers: the controller, or a worker's own end."""
        return self._shared.router

    @property
    def workers(self) -> tuple[WorkerHandle[W], ...]:
        """A handle of each single worker, in rank order. Raises UnknownMethodError for a group of several roles."""
        role, worker_cls = self._one_role("workers")
        return tuple(WorkerHandle(self, role, worker_cls, rank) for rank in range(self.world_size))

    @property
    def resource_pool(self) -> ResourcePool:
        """The pool that the group runs on."""
        return self._shared.pool

    def mesh(self, name: str) -> Mesh:
        """Return the mesh that the role's workers registered (``Worker.register_mesh``); they are asked once.

        Raises RemoteError if a rank has not registered it, DispatchError if no rank or two collect for a dp rank.
        """
        if name not in self._meshes:
            answers = self._query_mesh(name)
            self._meshes[name] = Mesh(name, *(tuple(column) for column in zip(*answers, strict=True)))
        return self._meshes[name]

    def execute_all(self, method_name: str, *args: Any, **kwargs: Any) -> Future[list[Any]]:
        """Start a method by its name on every rank with the same arguments; returns the Future of the list of results.

        The method is registered, or its class has ``allow_unregistered = True``; how it is registered plays no part.
        """
        return self._by_name(method_name, rank_zero=False).submit(*args, **kwargs)

    def execute_rank_zero(self, method_name: str, *args: Any, **kwargs: Any) -> Future[Any]:
        """Start a method by its name on rank 0 alone; returns the Future of its result. See ``execute_all``."""
        return self._by_name(method_name, rank_zero=True).submit(*args, **kwargs)

    def _by_name(self, name: str, *, rank_zero: bool) -> RemoteMethod[..., Any, Any]:
        role, worker_cls = self._one_role(name)
        if callable_method(worker_cls, name) is None:
            raise UnknownMethodError(self._unknown(name))
        return RemoteMethod(self, role, worker_cls, name, replace(PLAIN, rank_zero=rank_zero))

    def _one_role(self, wanted: str) -> tuple[str, type]:
        if self._role is None:
            raise UnknownMethodError(self._unknown(wanted))
        return self._role, self._shared.classes[self._role]

    def spawn(self, prefix_set: Iterable[str] | None = None) -> dict[str, WorkerGroup[W]]:
        """Return a view for each role (or for those named): the same processes, the methods of that role alone.

        Names are whole: ``actor`` is never ``actor_rollout``. Raises UsageError for a role that the group has not.
        """
        roles = list(self._shared.classes if prefix_set is None else prefix_set)
        missing = [role for role in roles if role not in self._shared.classes]
        if missing:
            raise UsageError(
                f"{self!r} has no role {', '.join(map(repr, missing))}; its roles are {', '.join(self._shared.classes)}"
            )
        return {role: self._view(role) for role in roles}

    def close(self, *, grace_s: float = STOP_GRACE_S) -> list[WorkerExit]:
        """End the group's processes (SIGTERM, ``grace_s``, SIGKILL); returns their ends when all are reaped.

        Calls that run fail with ClosedError, and so do the group's other views. Idempotent. Raises UsageError for a
        handle in a worker: the driver ends groups.
        """
        if self._shared.owner is None:
            raise UsageError(f"{self!r} belongs to the driver, which alone can end it; this is a worker's handle of it")
        if self._shared.exits is None:
            self._shared.exits = self._shared.owner.stop_group(self.name, grace_s)
        return self._shared.exits

    def _view(self, role: str | None) -> WorkerGroup[W]:
        return _handle(self._shared, role)

    def _unknown(self, name: str) -> str:
        if self._role is None:
            roles = ", ".join(self._shared.classes)
            first = next(iter(self._shared.classes))
            return f"{self!r} hosts several roles ({roles}): take a view first, e.g. group.spawn()[{first!r}]"
        worker_cls = self._shared.classes[self._role]
        if callable(getattr(worker_cls, name, None)):
            return f"{worker_cls.__name__}.{name} is not registered: mark it with @register to call it on a group"
        names = [method for method in registered_methods(worker_cls) if not method.startswith("_")]
        near = difflib.get_close_matches(name, names, 1)
        hint = f"; did you mean {near[0]}?" if near else f"; registered: {', '.join(sorted(names)) or 'none'}"
        return f"{worker_cls.__name__} has no registered method {name!r}{hint}"


class WorkerHandle(Generic[W]):
    """One worker of a group: its methods take their arguments as they are and give the worker's own result.

    Made by ``group.workers[rank]``; may be an argument, as its group may.
    """

    def __init__(self, group: WorkerGroup[W], role: str, worker_cls: type, rank: int) -> None:
        self.group = group
        self.rank = rank
        self._role = role
        for name, spec in registered_methods(worker_cls).items():
            setattr(self, name, RemoteMethod(group, role, worker_cls, name, spec, rank=rank))

    def __getattr__(self, name: str) -> RemoteMethod[..., Any, Any]:
        if name.startswith("_"):
            raise AttributeError(name)
        raise UnknownMethodError(self.group._unknown(name))

    def __repr__(self) -> str:
        return f"<WorkerHandle: rank {self.rank} of {self.group!r}>"


def _handle(shared: _Shared, role: str | None) -> WorkerGroup[Any]:
    handle: WorkerGroup[Any] = WorkerGroup.__new__(WorkerGroup)
    handle._attach(shared, role)
    return handle


def register_handles(main: Mapping[str, Any] | None = None) -> None:
    """Let groups and single workers travel as handles; ``main`` is what a worker knows of the driver's main module."""

    def write_group(group: WorkerGroup[Any]) -> object:
        shared = group._shared
        return {
            "run": shared.router.run_id,
            "group": shared.name,
            "role": group._role,
            "identities": shared.identities,
            "classes": {role: class_path(kind) for role, kind in shared.classes.items()},
            "pool": shared.pool,
        }

    def read_group(plain: Any) -> WorkerGroup[Any]:
        key = (plain["run"], plain["group"])
        if not in_worker():
            open_controller(plain["run"])
            if key not in _groups:
                raise UsageError(f"group {plain['group']!r} has been closed; its handle is of no use any more")
            return _handle(_groups[key], plain["role"])
        router = context().router
        if router is None or router.run_id != plain["run"]:
            raise UsageError(f"a handle of group {plain['group']!r} belongs to another run, {plain['run']}")
        classes = {role: find_class(path, main or {}) for role, path in plain["classes"].items()}
        shared = _Shared(router, plain["pool"], plain["group"], tuple(plain["identities"]), classes)
        return _handle(shared, plain["role"])

    def write_worker(handle: WorkerHandle[Any]) -> object:
        return {"group": handle.group, "rank": handle.rank}

    register_codec(WorkerGroup, name="rpcrl.WorkerGroup", encode=write_group, decode=read_group, replace=True)
    register_codec(
        WorkerHandle,
        name="rpcrl.WorkerHandle",
        encode=write_worker,
        decode=lambda plain: plain["group"].workers[plain["rank"]],
        replace=True,
    )


def _refuse_future(future: Any) -> Any:
    raise UsageError(
        "a Future travels only as an argument of its own: pass the future itself, or future.result() inside of others"
    )


register_handles()
register_codec(Future, name="rpcrl.Future", encode=_refuse_future, decode=_refuse_future, replace=True)


def _roles_of(
    worker_cls: type | ClassWithInitArgs[Any] | Mapping[str, ClassWithInitArgs[Any] | type],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    name: str | None,
) -> dict[str, ClassWithInitArgs[Any]]:
    if isinstance(worker_cls, Mapping):
        if args or kwargs:
            raise UsageError("a group of several roles takes each role's arguments in its ClassWithInitArgs(Cls, …)")
        if not worker_cls:
            raise UsageError("a group needs at least one role")
        items = {role: _with_args(item) for role, item in worker_cls.items()}
    elif isinstance(worker_cls, ClassWithInitArgs):
        items = {name or str(worker_cls.cls.__name__): worker_cls}
    else:
        role = name or str(getattr(worker_cls, "__name__", "worker"))
        items = {role: ClassWithInitArgs(worker_cls, *args, **kwargs)}
    for role, item in items.items():
        if not isinstance(item.cls, type) or not issubclass(item.cls, Worker):
            got = item.cls.__name__ if isinstance(item.cls, type) else type(item.cls).__name__
            raise UsageError(f"role {role!r} needs a class that inherits from rpcrl.Worker, got {got}")
        _check_constructor(role, item)
    return items


def _check_constructor(role: str, item: ClassWithInitArgs[Any]) -> None:
    """Bind the arguments before a process is started for them."""
    try:
        signature = inspect.signature(item.cls)
    except (ValueError, TypeError):  # a constructor that does not say what it takes
        return
    try:
        signature.bind(*item.args, **item.kwargs)
    except TypeError as error:
        raise DispatchError(
            f"role {role!r} cannot be built: {item.cls.__name__}{signature}: {error}; nothing was started"
        ) from None


def _with_args(item: ClassWithInitArgs[Any] | type) -> ClassWithInitArgs[Any]:
    return item if isinstance(item, ClassWithInitArgs) else ClassWithInitArgs(item)


def _check_names(role: str, worker_cls: type) -> None:
    taken = sorted(set(registered_methods(worker_cls)) & {name for name in dir(WorkerGroup) if name[0] != "_"})
    if taken:
        raise UsageError(
            f"{worker_cls.__name__} (role {role!r}) registers {', '.join(taken)}, which every group has already; "
            "rename the method"
        )


def _check_environment(environment: Mapping[str, str]) -> None:
    refused = sorted(env.PROTECTED & set(environment))
    if refused:
        raise DispatchError(
            f"environment may not set {', '.join(refused)}: rpcrl sets these for each worker. Choose ranks and devices "
            "by the ResourcePool"
        )
    wrong = sorted(name for name, value in environment.items() if not isinstance(value, str))
    if wrong:
        raise DispatchError(f"environment values must be text; these are not: {', '.join(wrong)}")
