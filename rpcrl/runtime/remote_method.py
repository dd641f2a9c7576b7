"""What happens when ``group.method(x)`` is called? This file reads from top to bottom in that order.

bind to the signature (a Future among the arguments is waited for) → ``mode.dispatch`` → encode each distinct share
once → send → (the workers run) → gather in rank order → ``mode.collect`` → take the padding off → return.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Generic, Literal, ParamSpec, TypeVar, cast

from rpcrl.dispatch.mode import Arguments, CallShape, Dispatch, Dispatched, current
from rpcrl.dispatch.register import MethodSpec, Returns, bind, check_returns, check_timeout
from rpcrl.dispatch.splitting import unpad_result
from rpcrl.errors import UsageError
from rpcrl.runtime.caller import Part
from rpcrl.runtime.future import Finish, Future, PendingReplies, Reply, when_settled
from rpcrl.runtime.lease import check_run, materialize_stayed, references_in
from rpcrl.runtime.timing import CallTiming, Stopwatch
from rpcrl.wire.codec import decode, encode
from rpcrl.wire.messages import Encoded

if TYPE_CHECKING:
    from rpcrl.runtime.worker_group import WorkerGroup

__all__ = ["RemoteMethod"]

KEEP_FROM_BYTES = 64 << 10
"""From this size on the batch of a submitted call stays on its workers until somebody asks for it."""

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
        watches: list[Stopwatch] | None = None,
    ) -> None:
        if rank is not None:
            spec = replace(spec, dispatch_mode=Dispatch.RANK_ZERO, rank_zero=True)
        self._group = group
        self._rank = rank
        self._role = role
        self._worker_cls = worker_cls
        self._spec = spec
        self._mode = current(spec.dispatch_mode)
        self._shape = CallShape(f"{role}.{name}", spec.uneven, spec.rank_zero, spec.merge)
        self._last = [] if watches is None else watches
        """The stopwatch of the latest call, if there is one; shared with all other handles of the method."""
        self.__name__ = name
        self.__doc__ = getattr(worker_cls, name).__doc__

    def __repr__(self) -> str:
        return f"<{self._shape.name} of {self._group!r}, {self._mode!r}>"

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Called:
        """Run the method on the group and wait for its result (unless it is registered with ``blocking=False``)."""
        if not self._spec.blocking:
            return cast("Called", self.submit(*args, **kwargs))
        # Only the caller who waits for the end, however long, leaves the arguments alone until they are not needed.
        snapshot = self._spec.timeout_s is not None
        return cast("Called", self._start(args, kwargs, snapshot=snapshot, keep_from_bytes=None).result())

    def submit(self, *args: P.args, **kwargs: P.kwargs) -> Future[Value]:
        """Start the method and return its Future; the arguments may be changed as soon as this returns.

        A Future among the arguments is waited for in the background, and its rows go from worker to worker. A large
        batch that the method returns stays on its workers until ``result`` is asked for, or another call takes it.
        """
        return self._start(args, kwargs, snapshot=True, keep_from_bytes=KEEP_FROM_BYTES)

    def options(
        self, *, returns: Returns | None = None, timeout_s: float | Literal["as registered"] | None = "as registered"
    ) -> RemoteMethod[..., Any, Any]:
        """Return the same method with other settings for this call: ``group.m.options(returns="ref")(x)``.

        ``timeout_s=None`` waits as long as the workers live.
        """
        spec = self._spec
        if returns is not None:
            check_returns(returns)
            spec = replace(spec, returns=returns)
        if timeout_s != "as registered":
            if timeout_s is not None:
                check_timeout("options(timeout_s=…)", timeout_s)
            spec = replace(spec, timeout_s=timeout_s)
        name = self.__name__
        where = (self._group, self._role, self._worker_cls, name)
        return RemoteMethod(*where, spec, rank=self._rank, watches=self._last)

    @property
    def timing(self) -> CallTiming | None:
        """Where the time of this method's latest call went, and what it moved.

        None before the first call, while the latest one runs or its value is not asked for, and when it failed.
        """
        return self._last[0].timing if self._last else None

    def _start(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, snapshot: bool, keep_from_bytes: int | None
    ) -> Future[Value]:
        router = self._group.router
        router.check_usable()
        arguments = self._bind(args, kwargs)
        count = 1 if self._spec.rank_zero else self._group.world_size
        pending = PendingReplies(self._describe(), range(self._rank or 0, (self._rank or 0) + count))
        self._last[:] = [pending.watch]
        call = _Call(self, pending, snapshot, 0 if self._spec.returns == "ref" else keep_from_bytes)
        final = _as_it_is if self._spec.returns == "ref" else materialize_stayed
        finish = Finish(self._gather, call.collect, final)
        future: Future[Value] = Future(pending, finish, timeout_s=self._spec.timeout_s, cancel=router.cancel)
        waited = [value for value in (*args, *kwargs.values()) if isinstance(value, Future)]
        if waited:
            if self._mode.mesh_name is not None:
                self._group.mesh(self._mode.mesh_name)  # asked here: the thread of chained calls waits for nobody
            when_settled(waited, lambda: router.defer(lambda: call.send_after(arguments, waited)))
        else:
            call.send(arguments)
        return future

    def _bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Arguments:
        bind(self._worker_cls, self.__name__, args, kwargs, call=self._shape.name)
        return Arguments(args, kwargs)

    def _dispatch(self, arguments: Arguments) -> Dispatched:
        return self._mode.dispatch(self._group, self._shape, arguments)

    def _encode(self, dispatched: Dispatched, *, snapshot: bool, keep_from_bytes: int | None) -> list[Part]:
        imports = self._group.router.imports
        encoded: dict[int, Encoded] = {}
        count = len(dispatched.per_rank)
        identities = self._group.identities[self._rank or 0 :][:count]
        receivers: dict[int, list[str]] = {}
        for identity, arguments in zip(identities, dispatched.per_rank, strict=True):
            receivers.setdefault(id(arguments), []).append(identity)
        for arguments in dispatched.per_rank:
            if id(arguments) not in encoded:
                name = self._shape.name
                value = encode(
                    (arguments.args, dict(arguments.kwargs)), path=(f"{name} args", f"{name} kwargs"), imports=imports
                )
                value = self._group.router.place(value, receivers[id(arguments)])
                encoded[id(arguments)] = value.own_copy() if snapshot else value
        mesh = self._mode.mesh_name
        wanted = (True,) * count if mesh is None else self._group.mesh(mesh).collects
        return [
            Part(identity, encoded[id(arguments)], wants_result, keep_from_bytes)
            for identity, arguments, wants_result in zip(identities, dispatched.per_rank, wanted, strict=True)
        ]

    def _gather(self, replies: Sequence[Reply]) -> list[Any]:
        return [self._output(index, reply) for index, reply in enumerate(replies)]

    def _output(self, index: int, reply: Reply) -> Any:
        value = decode(reply.payload, imports=self._group.router.imports)
        if reply.lease is None:
            return value
        from rpcrl.runtime.references import from_store

        group, rank = self._group, (self._rank or 0) + index
        return from_store(value, group=group.name, rank=rank, lease=reply.lease, router=group.router)

    def _collect(self, outputs: list[Any], sent: CallShape) -> Any:
        if self._spec.rank_zero:
            return outputs[0]
        return self._mode.collect(self._group, sent, outputs)

    def _unpad(self, result: Any, num_padding: int, num_rows: int) -> Any:
        return unpad_result(result, num_padding, num_rows, call=self._shape.name)

    def _describe(self) -> str:
        return f"{self._shape.name} on group {self._group.name!r}"


class _Call:
    """One call from its arguments to its result; what is known once they are dispatched."""

    def __init__(
        self, method: RemoteMethod[..., Any, Any], pending: PendingReplies, snapshot: bool, keep_from_bytes: int | None
    ) -> None:
        self._method = method
        self._pending = pending
        self._snapshot = snapshot
        self._keep_from_bytes = keep_from_bytes
        self._sent: CallShape | None = None
        self._num_padding = 0
        self._num_rows = 0

    def send(self, arguments: Arguments) -> None:
        """Dispatch, encode and send."""
        method = self._method
        references = references_in([*arguments.args, *arguments.kwargs.values()])
        check_run(references, method._group.router.run_id, call=method._shape.name)
        dispatched = method._dispatch(arguments)
        self._sent = method._shape.sent(dispatched)
        self._num_padding, self._num_rows = dispatched.num_padding, dispatched.num_rows
        parts = method._encode(dispatched, snapshot=self._snapshot, keep_from_bytes=self._keep_from_bytes)
        payloads = [part.payload for part in parts]
        self._pending.watch.encoded({id(each): each for each in payloads}.values(), payloads, copied=self._snapshot)
        # As long as the call is open, its references keep their rows where they are.
        self._pending.keeps = references
        method._group.router.call(method._group.name, method._role, method.__name__, parts, self._pending)

    def send_after(self, arguments: Arguments, waited: Sequence[Future[Any]]) -> None:
        """Send with the values of futures that are settled; their failure, or any refusal, is the call's."""
        if self._pending.settled.done():
            return  # cancelled meanwhile
        try:
            known = {id(future): future.reference() for future in waited}
            args = tuple(known.get(id(value), value) for value in arguments.args)
            kwargs = {name: known.get(id(value), value) for name, value in arguments.kwargs.items()}
            self.send(Arguments(args, kwargs))
        except BaseException as error:
            self._pending.fail(error)

    def collect(self, outputs: list[Any]) -> Any:
        """Make one result of the outputs of all ranks."""
        method = self._method
        if self._sent is None:
            raise UsageError(f"{method._shape.name} has a reply to a call that was not sent; this is a bug of rpcrl")
        return method._unpad(method._collect(outputs, self._sent), self._num_padding, self._num_rows)


def _as_it_is(value: Any) -> Any:
    return value
