"""What happens when ``group.method(x)`` is called? This file reads from top to bottom in that order.

bind to the signature → ``mode.dispatch`` → encode each distinct share once → send → (the workers run) → gather in
rank order → ``mode.collect`` → take the padding off → return.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar, cast

from rpcrl.dispatch.mode import Arguments, CallShape, Dispatch, Dispatched, current
from rpcrl.dispatch.register import MethodSpec, bind
from rpcrl.dispatch.splitting import unpad_result
from rpcrl.runtime.caller import Part
from rpcrl.runtime.future import Future, PendingReplies
from rpcrl.wire.codec import decode, encode
from rpcrl.wire.messages import Encoded

if TYPE_CHECKING:
    from rpcrl.runtime.worker_group import WorkerGroup

__all__ = ["RemoteMethod"]

P = ParamSpec("P")
Value = TypeVar("Value")
Called = TypeVar("Called")


class RemoteMethod(Generic[P, Value, Called]):
    """A registered method of a group: call it and wait, or ``submit`` and go on.

    To type checkers: ``P`` are the parameters, ``Value`` is what the mode gives; the plain call returns ``Called``,
    which is ``Value``, or ``Future[Value]`` of a method registered with ``blocking=False``.

    With ``rank`` it is the method of that one worker: the arguments go there as they are, and its result comes back.
    """

    def __init__(
        self,
        group: WorkerGroup[Any],
        role: str,
        worker_cls: type,
        name: str,
        spec: MethodSpec,
        *,
        rank: int | None = None,
    ) -> None:
        if rank is not None:
            spec = replace(spec, dispatch_mode=Dispatch.RANK_ZERO, rank_zero=True)
        self._group = group
        self._first_rank = rank or 0
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
        router = self._group.router
        router.check_usable()
        arguments = self._bind(args, kwargs)
        dispatched = self._dispatch(arguments)
        parts = self._encode(dispatched, snapshot=snapshot)
        ranks = range(self._first_rank, self._first_rank + len(parts))
        pending = PendingReplies(self._describe(), ranks)
        router.call(self._group.name, self._role, self.__name__, parts, pending)
        num_padding, num_rows, sent = dispatched.num_padding, dispatched.num_rows, self._shape.sent(dispatched)
        return Future(
            pending,
            lambda replies: self._unpad(self._collect(self._gather(replies), sent), num_padding, num_rows),
            timeout_s=self._spec.timeout_s,
            cancel=router.cancel,
        )

    def _bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Arguments:
        bind(self._worker_cls, self.__name__, args, kwargs, call=self._shape.name)
        return Arguments(args, kwargs)

    def _dispatch(self, arguments: Arguments) -> Dispatched:
        return self._mode.dispatch(self._group, self._shape, arguments)

    def _encode(self, dispatched: Dispatched, *, snapshot: bool) -> list[Part]:
        imports = self._group.router.imports
        encoded: dict[int, Encoded] = {}
        for arguments in dispatched.per_rank:
            if id(arguments) not in encoded:
                name = self._shape.name
                value = encode(
                    (arguments.args, dict(arguments.kwargs)), path=(f"{name} args", f"{name} kwargs"), imports=imports
                )
                encoded[id(arguments)] = value.own_copy() if snapshot else value
        count = len(dispatched.per_rank)
        identities = self._group.identities[self._first_rank :][:count]
        mesh = self._mode.mesh_name
        wanted = (True,) * count if mesh is None else self._group.mesh(mesh).collects
        return [
            Part(identity, encoded[id(arguments)], wants_result)
            for identity, arguments, wants_result in zip(identities, dispatched.per_rank, wanted, strict=True)
        ]

    def _gather(self, replies: Sequence[Encoded]) -> list[Any]:
        imports = self._group.router.imports
        return [decode(reply, imports=imports) for reply in replies]

    def _collect(self, outputs: list[Any], sent: CallShape) -> Any:
        if self._spec.rank_zero:
            return outputs[0]
        return self._mode.collect(self._group, sent, outputs)

    def _unpad(self, result: Any, num_padding: int, num_rows: int) -> Any:
        return unpad_result(result, num_padding, num_rows, call=self._shape.name)

    def _describe(self) -> str:
        return f"{self._shape.name} on group {self._group.name!r}"
