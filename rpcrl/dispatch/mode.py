"""What does a dispatch mode decide? How the arguments of one call become one call per rank, and how results come back.

The mode decides, never the shape of an argument: an argument that does not fit the mode is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol

from rpcrl.dispatch.splitting import UnevenPolicy, chunk_all, concat_all
from rpcrl.errors import DispatchError

__all__ = [
    "Arguments",
    "CallShape",
    "Dispatch",
    "DispatchMode",
    "Dispatched",
    "Execute",
    "GroupShape",
    "custom_mode",
]


@dataclass(frozen=True)
class Arguments:
    """Positional and keyword arguments of one rank's call."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


@dataclass(frozen=True)
class Dispatched:
    """One ``Arguments`` per rank that runs, in rank order; equal objects are encoded once.

    ``num_padding`` rows were appended at the end of the whole batch; the caller takes them off the result.
    """

    per_rank: Sequence[Arguments]
    num_padding: int = 0


class GroupShape(Protocol):
    """What a mode may know of the group."""

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        ...


@dataclass(frozen=True)
class CallShape:
    """The call that is being dispatched: for error texts, and the method's policy for uneven batches."""

    name: str
    uneven: UnevenPolicy = "pad"
    rank_zero: bool = False


DispatchFn = Callable[[GroupShape, CallShape, Arguments], Dispatched]
CollectFn = Callable[[GroupShape, CallShape, list[Any]], Any]


@dataclass(frozen=True)
class DispatchMode:
    """A pair of functions: arguments out, results in."""

    name: str
    dispatch: DispatchFn
    collect: CollectFn
    rank_zero_only: bool = False
    """Only rank 0 runs, whatever the execute mode."""

    def __repr__(self) -> str:
        return f"Dispatch.{self.name}"


def _same_to_all(group: GroupShape, call: CallShape, arguments: Arguments) -> Dispatched:
    return Dispatched([arguments] * (1 if call.rank_zero else group.world_size))


def _one_per_rank(group: GroupShape, call: CallShape, arguments: Arguments) -> Dispatched:
    if call.rank_zero:
        return Dispatched([arguments])
    named = [(f"argument {index}", value) for index, value in enumerate(arguments.args, start=1)]
    named += list(arguments.kwargs.items())
    for name, value in named:
        if not isinstance(value, list | tuple):
            raise DispatchError(
                f"{call.name} takes one value per rank: {name} must be a list or tuple of {group.world_size} values, "
                f"got {type(value).__name__}. To give every rank the same value, register the method with "
                "Dispatch.ONE_TO_ALL"
            )
        if len(value) != group.world_size:
            raise DispatchError(
                f"{call.name} takes one value per rank: {name} has {len(value)} values for {group.world_size} ranks"
            )
    return Dispatched(
        [
            Arguments(
                tuple(value[rank] for value in arguments.args),
                {name: value[rank] for name, value in arguments.kwargs.items()},
            )
            for rank in range(group.world_size)
        ]
    )


def _chunk_per_rank(group: GroupShape, call: CallShape, arguments: Arguments) -> Dispatched:
    num_parts = 1 if call.rank_zero else group.world_size
    names = list(arguments.kwargs)
    values = [*arguments.args, *arguments.kwargs.values()]
    labels = [f"argument {index}" for index in range(1, len(arguments.args) + 1)] + names
    chunks, num_padding = chunk_all(values, labels, num_parts, policy=call.uneven, call=call.name)
    count = len(arguments.args)
    return Dispatched(
        [
            Arguments(
                tuple(column[rank] for column in chunks[:count]),
                {name: column[rank] for name, column in zip(names, chunks[count:], strict=True)},
            )
            for rank in range(num_parts)
        ],
        num_padding,
    )


def _chunk_without_padding(group: GroupShape, call: CallShape, arguments: Arguments) -> Dispatched:
    # Padding could not be taken off a list of figures, so none is put in.
    return _chunk_per_rank(group, replace(call, uneven="uneven") if call.uneven == "pad" else call, arguments)


def _collect_list(group: GroupShape, call: CallShape, outputs: list[Any]) -> Any:
    return outputs


def _collect_one(group: GroupShape, call: CallShape, outputs: list[Any]) -> Any:
    return outputs[0]


def _collect_concat(group: GroupShape, call: CallShape, outputs: list[Any]) -> Any:
    return concat_all(outputs, call=call.name)


class Dispatch:
    """The dispatch modes, under verl's names.

    * ``ONE_TO_ALL``: every rank gets the same arguments; the result is the list of all ranks' results.
    * ``RANK_ZERO``: only rank 0 runs; the result is its result.
    * ``ALL_TO_ALL`` and ``DP_COMPUTE``: every argument is a list or tuple with one value per rank; list back.
    * ``DP_COMPUTE_PROTO``: every argument is a batch; it is split into one part per rank, padded if the rows do not
      divide (or as the method's ``uneven`` policy says); the results are concatenated and the padding is taken off.
    * ``DP_COMPUTE_METRIC``: batches out as ``DP_COMPUTE_PROTO``, the list of all ranks' results back. Nothing is
      padded, because padding would reach the figures: parts differ by one row instead (and may be empty).
    """

    ONE_TO_ALL: ClassVar = DispatchMode("ONE_TO_ALL", _same_to_all, _collect_list)
    RANK_ZERO: ClassVar = DispatchMode("RANK_ZERO", _same_to_all, _collect_one, rank_zero_only=True)
    ALL_TO_ALL: ClassVar = DispatchMode("ALL_TO_ALL", _one_per_rank, _collect_list)
    DP_COMPUTE: ClassVar = DispatchMode("DP_COMPUTE", _one_per_rank, _collect_list)
    DP_COMPUTE_PROTO: ClassVar = DispatchMode("DP_COMPUTE_PROTO", _chunk_per_rank, _collect_concat)
    DP_COMPUTE_METRIC: ClassVar = DispatchMode("DP_COMPUTE_METRIC", _chunk_without_padding, _collect_list)


class Execute:
    """Which ranks run a method: ``ALL`` of them, or ``RANK_ZERO`` alone (then its plain result comes back)."""

    ALL: ClassVar[str] = "ALL"
    RANK_ZERO: ClassVar[str] = "RANK_ZERO"


def custom_mode(functions: Mapping[str, Callable[..., Any]]) -> DispatchMode:
    """Return the mode of a dict with ``dispatch_fn`` and ``collect_fn``, with verl's signatures.

    ``dispatch_fn(group, *args, **kwargs) -> (args, kwargs)``, each a list with one value per rank;
    ``collect_fn(group, outputs) -> result``. Raises DispatchError if a function is missing.
    """
    missing = [key for key in ("dispatch_fn", "collect_fn") if not callable(functions.get(key))]
    if missing:
        raise DispatchError(
            "a custom dispatch mode is a dict with the functions dispatch_fn and collect_fn; missing: "
            + ", ".join(missing)
        )
    dispatch_fn, collect_fn = functions["dispatch_fn"], functions["collect_fn"]

    def dispatch(group: GroupShape, call: CallShape, arguments: Arguments) -> Dispatched:
        args, kwargs = dispatch_fn(group, *arguments.args, **arguments.kwargs)
        return _one_per_rank(group, call, Arguments(tuple(args), dict(kwargs)))

    def collect(group: GroupShape, call: CallShape, outputs: list[Any]) -> Any:
        return collect_fn(group, outputs)

    name = f"custom({getattr(dispatch_fn, '__name__', '?')}, {getattr(collect_fn, '__name__', '?')})"
    return DispatchMode(name, dispatch, collect)
