"""How does a worker class say what can be called on it? With ``@register``, which leaves a note on the function."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Generic, Literal, TypeVar, cast, get_args, overload

from rpcrl.batch.merging import check_rule
from rpcrl.dispatch.mode import Dispatch, DispatchMode, Execute, custom_mode
from rpcrl.dispatch.splitting import Merge, UnevenPolicy
from rpcrl.errors import BatchError, DispatchError, UsageError

__all__ = [
    "PLAIN",
    "Marker",
    "MethodSpec",
    "Returns",
    "bind",
    "callable_method",
    "check_returns",
    "check_timeout",
    "register",
    "registered_methods",
]

_NOTE = "__rpcrl_method__"
F = TypeVar("F", bound=Callable[..., Any])
Shape = TypeVar("Shape")
"""What a call through a group takes and gives, as ``rpcrl.mypy_plugin`` writes it down; nothing to people."""


Returns = Literal["value", "ref"]
"""Whether a result comes back, or stays on its worker and is referred to."""


@dataclass(frozen=True)
class MethodSpec:
    """What ``@register`` says about one method."""

    dispatch_mode: DispatchMode
    rank_zero: bool
    blocking: bool
    concurrent: bool
    uneven: UnevenPolicy
    timeout_s: float | None
    merge: Merge | None = None
    returns: Returns = "value"
    materialize_futures: bool = True


@dataclass(frozen=True)
class Marker(Generic[Shape]):
    """What ``register(…)`` returns: it notes on a function how it may be called, and leaves it as it is."""

    spec: MethodSpec

    def __call__(self, function: F) -> F:
        """Mark ``function``. Raises UsageError if it is none, or cannot run as it is registered."""
        if not inspect.isfunction(function):
            raise UsageError(f"@register marks a function of a Worker class, got {type(function).__name__}")
        if self.spec.concurrent and not inspect.iscoroutinefunction(function):
            raise UsageError(f"@register(concurrent=True) needs an async def; {function.__qualname__} is not one")
        setattr(function, _NOTE, self.spec)
        return function


@overload
def register(function: F, /) -> F: ...
@overload
def register(
    dispatch_mode: DispatchMode | Mapping[str, Callable[..., Any]] = ...,
    execute_mode: str = ...,
    blocking: bool = ...,
    *,
    concurrent: bool = ...,
    uneven: UnevenPolicy = ...,
    timeout_s: float | None = ...,
    merge: Merge | None = ...,
    returns: Returns = ...,
    materialize_futures: bool = ...,
) -> Marker[Any]: ...


def register(
    dispatch_mode: Any = Dispatch.ONE_TO_ALL,
    execute_mode: str = Execute.ALL,
    blocking: bool = True,
    *,
    concurrent: bool = False,
    uneven: UnevenPolicy = "pad",
    timeout_s: float | None = None,
    merge: Merge | None = None,
    returns: Returns = "value",
    materialize_futures: bool = True,
) -> Any:
    """Mark a method of a Worker as callable on a WorkerGroup.

    ``dispatch_mode``: a member of Dispatch, or a dict with ``dispatch_fn`` and ``collect_fn``.
    ``execute_mode``: ``Execute.ALL``, or ``Execute.RANK_ZERO`` for rank 0 alone.
    ``blocking``: False makes the plain call return a Future, as ``submit`` always does.
    ``concurrent``: the method may run beside other methods of its role (only for ``async def``).
    ``uneven``: what to do when the rows of a batch do not divide by the ranks.
    ``merge``: how figures of the ranks become one: ``first_equal``, ``mean`` (weighted by each rank's rows), ``sum`` or
    ``list``. One rule for all, or a dict by name: ``"metrics.loss"`` and ``"tokens"`` for metrics and meta_info of a
    DataProto, keys of a dict that a mode with a list of results returns (the result is then one dict, not a list).
    Where a rule is ``mean`` or ``sum``, ``uneven="pad"`` splits unevenly, so that padding counts in no figure.
    ``timeout_s``: deadline of a waiting call; None waits as long as the workers live.
    ``returns``: ``ref`` leaves a result (a DataProto or TensorDict) on its workers and gives the caller a BatchRef.
    ``materialize_futures``: False gives the method a BatchRef as it is; else it gets the rows, read from their keepers.

    Raises DispatchError or UsageError for values that are none of these. The function itself is left as it is.
    """
    if inspect.isfunction(dispatch_mode):
        return register()(dispatch_mode)
    mode = custom_mode(dispatch_mode) if isinstance(dispatch_mode, Mapping) else dispatch_mode
    if not isinstance(mode, DispatchMode):
        raise DispatchError(f"dispatch_mode must be a member of Dispatch or a dict of two functions, got {mode!r}")
    if execute_mode not in (Execute.ALL, Execute.RANK_ZERO):
        raise DispatchError(f"execute_mode must be Execute.ALL or Execute.RANK_ZERO, got {execute_mode!r}")
    if uneven not in get_args(UnevenPolicy):
        raise DispatchError(f"uneven must be one of {', '.join(get_args(UnevenPolicy))}, got {uneven!r}")
    rank_zero = execute_mode == Execute.RANK_ZERO or mode.rank_zero_only
    if rank_zero and mode.mesh_name is not None:
        raise DispatchError(f"{mode.name} runs on every rank of its mesh; it does not go with Execute.RANK_ZERO")
    if merge is not None:
        _check_merge(merge, rank_zero=rank_zero, custom=isinstance(dispatch_mode, Mapping))
    check_returns(returns)
    if timeout_s is not None:
        check_timeout("@register(timeout_s=…)", timeout_s)
    return Marker(
        MethodSpec(mode, rank_zero, blocking, concurrent, uneven, timeout_s, merge, returns, materialize_futures)
    )


def check_returns(returns: object) -> None:
    """Raise DispatchError unless ``returns`` is ``value`` or ``ref``."""
    if returns not in get_args(Returns):
        raise DispatchError(f"returns must be one of {', '.join(get_args(Returns))}, got {returns!r}")


def check_timeout(setting: str, timeout_s: float) -> float:
    """Return a deadline as it is; raises UsageError unless it is a number of seconds above 0."""
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float) or not timeout_s > 0:
        raise UsageError(f"{setting} is a number of seconds above 0, or None to wait without bound; got {timeout_s!r}")
    return timeout_s


def _check_merge(merge: Merge, *, rank_zero: bool, custom: bool) -> None:
    if rank_zero or custom:
        whose = "the result of rank 0" if rank_zero else "what its own collect_fn returns"
        raise DispatchError(f"merge={merge!r} has nothing to merge: the method's result is {whose}")
    try:
        for name, rule in [("the result", merge)] if isinstance(merge, str) else merge.items():
            check_rule(name, rule)
    except BatchError as error:
        raise DispatchError(str(error)) from None


PLAIN = MethodSpec(Dispatch.ONE_TO_ALL, rank_zero=False, blocking=True, concurrent=False, uneven="pad", timeout_s=None)
"""A method that is not registered, in a class that allows it."""


def registered_methods(worker_class: type) -> dict[str, MethodSpec]:
    """Return the registered methods of a class, inherited ones included, by name."""
    found: dict[str, MethodSpec] = {}
    for name in dir(worker_class):
        spec = getattr(inspect.getattr_static(worker_class, name), _NOTE, None)
        if isinstance(spec, MethodSpec):
            found[name] = spec
    return found


@cache
def _signature(function: Callable[..., Any]) -> inspect.Signature:
    return inspect.signature(function)


def callable_method(worker_class: type, name: str) -> MethodSpec | None:
    """Return how a method may be called by its name: as it is registered, or plainly where the class allows that."""
    attribute = inspect.getattr_static(worker_class, name, None)
    spec = getattr(attribute, _NOTE, None)
    if isinstance(spec, MethodSpec):
        return spec
    open_to_all = getattr(worker_class, "allow_unregistered", False) and not name.startswith("_")
    return PLAIN if open_to_all and inspect.isfunction(attribute) else None


class _Bare(str):
    """An annotation that was written as text; it shows without quotes."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def _bare(annotation: Any) -> Any:
    return _Bare(annotation) if isinstance(annotation, str) else annotation


def bind(worker_class: type, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, call: str) -> None:
    """Check arguments against the method's signature. Raises DispatchError with the signature in the text."""
    signature = _signature(cast("Callable[..., Any]", inspect.getattr_static(worker_class, name)))
    try:
        signature.bind(None, *args, **kwargs)
    except TypeError as error:
        parameters = [
            parameter.replace(annotation=_bare(parameter.annotation)) for parameter in signature.parameters.values()
        ]
        shown = signature.replace(parameters=parameters[1:], return_annotation=_bare(signature.return_annotation))
        raise DispatchError(f"{call}{shown}: {error}; nothing was sent") from None
