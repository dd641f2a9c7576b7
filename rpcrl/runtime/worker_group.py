"""What happens when ``group.method(x)`` is called? This file reads from top to bottom in that order.

bind to the signature → ``mode.dispatch`` → encode each distinct share once → send → (the workers run) → gather in
rank order → ``mode.collect`` → take the padding off → return.
"""

from __future__ import annotations

import difflib
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, ParamSpec, Self, TypeVar, cast, overload

from rpcrl import env
from rpcrl.dispatch.mode import Arguments, CallShape, Dispatched, Mesh, current
from rpcrl.dispatch.register import PLAIN, MethodSpec, bind, callable_method, registered_methods
from rpcrl.dispatch.splitting import unpad_result
from rpcrl.errors import DispatchError, UnknownMethodError, UsageError, WorkerExit
from rpcrl.runtime.controller import STOP_GRACE_S, Controller, current_controller
from rpcrl.runtime.future import Future, PendingReplies
from rpcrl.runtime.hub import Part
from rpcrl.topology import ResourcePool
from rpcrl.wire.codec import decode, encode
from rpcrl.wire.messages import Encoded

__all__ = ["ClassWithInitArgs", "RemoteMethod", "WorkerGroup"]

W = TypeVar("W")
"""The worker class; of a group of several roles, ``rpcrl.mypy_plugin`` sets a TypedDict of them."""
Role = TypeVar("Role", covariant=True)
P = ParamSpec("P")
Value = TypeVar("Value")
Called = TypeVar("Called")


class ClassWithInitArgs(Generic[Role]):
    """A worker class and the arguments that every rank constructs it with."""

    def __init__(self, cls: type[Role], *args: Any, **kwargs: Any) -> None:
        self.cls = cls
        self.args = args
        self.kwargs = kwargs


@dataclass
class _Shared:
    """What a group and its views have in common."""

    controller: Controller
    pool: ResourcePool
    name: str
    identities: tuple[str, ...]
    classes: dict[str, type]
    exits: list[WorkerExit] | None = None


class WorkerGroup(Generic[W]):
    """One worker process per slot of a pool, called as if it were one object.

    ``WorkerGroup(pool, MyWorker, *args, **kwargs)`` constructs ``MyWorker(*args, **kwargs)`` on every rank; the
    registered methods of the class are methods of the group. ``WorkerGroup(pool, {"actor": ClassWithInitArgs(A, …),
    "rollout": ClassWithInitArgs(B, …)})`` colocates several roles in each process, built in this order; ``spawn()``
    gives a view for each role.

    ``name`` shows in logs and errors; ``environment`` sets variables of the workers (rank and device variables are
    refused); ``controller`` is the one opened last by default. Use ClassWithInitArgs where a constructor has
    parameters of these names.

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
        roles = _roles_of(worker_cls, args, kwargs, name)
        environment = dict(environment or {})
        _check_environment(environment)
        for role, item in roles.items():
            _check_names(role, item.cls)
        controller = controller or current_controller()
        specs = {role: (item.cls, item.args, item.kwargs) for role, item in roles.items()}
        group = controller.start_group(pool, specs, name=name, environment=environment)
        shared = _Shared(controller, pool, group.name, group.identities, {r: i.cls for r, i in roles.items()})
        # When the last handle of the group is gone, so is the use of its processes.
        weakref.finalize(shared, controller.abandon_group, group.name).atexit = False
        self._attach(shared, next(iter(roles)) if len(roles) == 1 else None)

    def _attach(self, shared: _Shared, role: str | None) -> None:
        """Make this object the group's handle for one role; None is the group of several roles as a whole."""
        self._shared = shared
        self._role = role
        self._meshes: dict[str, Mesh] = {}
        if role is not None:
            for name, spec in registered_methods(shared.classes[role]).items():
                setattr(self, name, RemoteMethod(self, role, shared.classes[role], name, spec))

    def __getattr__(self, name: str) -> RemoteMethod[..., Any, Any]:
        if name.startswith("_"):
            raise AttributeError(name)
        raise UnknownMethodError(self._unknown(name))

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
        worker_cls = None if self._role is None else self._shared.classes[self._role]
        if self._role is None or worker_cls is None or callable_method(worker_cls, name) is None:
            raise UnknownMethodError(self._unknown(name))
        return RemoteMethod(self, self._role, worker_cls, name, replace(PLAIN, rank_zero=rank_zero))

    def spawn(self) -> dict[str, WorkerGroup[W]]:
        """Return a view for each role: the same processes, the methods of that role alone."""
        return {role: self._view(role) for role in self._shared.classes}

    def close(self, *, grace_s: float = STOP_GRACE_S) -> list[WorkerExit]:
        """End the group's processes (SIGTERM, ``grace_s``, SIGKILL); returns their ends when all are reaped.

        Calls that run fail with ClosedError, and so do the group's other views. Idempotent.
        """
        if self._shared.exits is None:
            self._shared.exits = self._shared.controller.stop_group(self.name, grace_s)
        return self._shared.exits

    def _view(self, role: str) -> WorkerGroup[W]:
        view: WorkerGroup[W] = WorkerGroup.__new__(WorkerGroup)
        view._attach(self._shared, role)
        return view

    def _unknown(self, name: str) -> str:
        if self._role is None:
            roles = ", ".join(self._shared.classes)
            first = next(iter(self._shared.classes))
            return f"{self!r} hosts several roles ({roles}): take a view first, e.g. group.spawn()[{first!r}]"
        worker_cls = self._shared.classes[self._role]
        if callable(getattr(worker_cls, name, None)):
            return f"{worker_cls.__name__}.{name} is not registered: mark it with @register to call it on a group"
        names = registered_methods(worker_cls)
        near = difflib.get_close_matches(name, names, 1)
        hint = f"; did you mean {near[0]}?" if near else f"; registered: {', '.join(sorted(names)) or 'none'}"
        return f"{worker_cls.__name__} has no registered method {name!r}{hint}"


class RemoteMethod(Generic[P, Value, Called]):
    """A registered method of a group: call it and wait, or ``submit`` and go on.

    To type checkers: ``P`` are the parameters, ``Value`` is what the mode gives; the plain call returns ``Called``,
    which is ``Value``, or ``Future[Value]`` of a method registered with ``blocking=False``.
    """

    def __init__(self, group: WorkerGroup[Any], role: str, worker_cls: type, name: str, spec: MethodSpec) -> None:
        self._group = group
        self._role = role
        self._worker_cls = worker_cls
        self._spec = spec
        self._mode = current(spec.dispatch_mode)
        self._shape = CallShape(f"{role}.{name}", spec.uneven, spec.rank_zero, spec.merge)
        self.__name__ = name
        self.__doc__ = getattr(worker_cls, name).__doc__

    def __repr__(self) -> str:
        return f"<{self._shape.name} of {self._group!r}, {self._mode!r}>"

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Called:
        """Run the method on the group and wait for its result (unless it is registered with ``blocking=False``)."""
        if not self._spec.blocking:
            return cast("Called", self.submit(*args, **kwargs))
        # Only the caller who waits for the end, however long, leaves the arguments alone until they are not needed.
        return cast("Called", self._start(args, kwargs, snapshot=self._spec.timeout_s is not None).result())

    def submit(self, *args: P.args, **kwargs: P.kwargs) -> Future[Value]:
        """Start the method and return its Future; the arguments may be changed as soon as this returns."""
        return self._start(args, kwargs, snapshot=True)

    def _start(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, snapshot: bool) -> Future[Value]:
        controller = self._group._shared.controller
        controller.check_usable()
        arguments = self._bind(args, kwargs)
        dispatched = self._dispatch(arguments)
        parts = self._encode(dispatched, snapshot=snapshot)
        pending = PendingReplies(self._describe(), range(len(parts)))
        controller.call(self._group.name, self._role, self.__name__, parts, pending)
        num_padding, num_rows, sent = dispatched.num_padding, dispatched.num_rows, self._shape.sent(dispatched)
        return Future(
            pending,
            lambda replies: self._unpad(self._collect(self._gather(replies), sent), num_padding, num_rows),
            timeout_s=self._spec.timeout_s,
            cancel=controller.cancel,
        )

    def _bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Arguments:
        bind(self._worker_cls, self.__name__, args, kwargs, call=self._shape.name)
        return Arguments(args, kwargs)

    def _dispatch(self, arguments: Arguments) -> Dispatched:
        return self._mode.dispatch(self._group, self._shape, arguments)

    def _encode(self, dispatched: Dispatched, *, snapshot: bool) -> list[Part]:
        imports = self._group._shared.controller.imports
        encoded: dict[int, Encoded] = {}
        for arguments in dispatched.per_rank:
            if id(arguments) not in encoded:
                name = self._shape.name
                value = encode(
                    (arguments.args, dict(arguments.kwargs)), path=(f"{name} args", f"{name} kwargs"), imports=imports
                )
                encoded[id(arguments)] = value.own_copy() if snapshot else value
        count = len(dispatched.per_rank)
        identities = self._group._shared.identities[:count]
        mesh = self._mode.mesh_name
        wanted = (True,) * count if mesh is None else self._group.mesh(mesh).collects
        return [
            Part(identity, encoded[id(arguments)], wants_result)
            for identity, arguments, wants_result in zip(identities, dispatched.per_rank, wanted, strict=True)
        ]

    def _gather(self, replies: Sequence[Encoded]) -> list[Any]:
        imports = self._group._shared.controller.imports
        return [decode(reply, imports=imports) for reply in replies]

    def _collect(self, outputs: list[Any], sent: CallShape) -> Any:
        if self._spec.rank_zero:
            return outputs[0]
        return self._mode.collect(self._group, sent, outputs)

    def _unpad(self, result: Any, num_padding: int, num_rows: int) -> Any:
        return unpad_result(result, num_padding, num_rows, call=self._shape.name)

    def _describe(self) -> str:
        return f"{self._shape.name} on group {self._group.name!r}"


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
        if not isinstance(item.cls, type):
            raise UsageError(f"role {role!r} needs a worker class, got {type(item.cls).__name__}")
    return items


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
