"""What does a dispatch mode decide? How the arguments of one call become one call per rank, and how results come back.

The mode decides, never the shape of an argument: an argument that does not fit the mode is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Protocol

from rpcrl.dispatch.splitting import Merge, UnevenPolicy, chunk_all, concat_all, merge_all
from rpcrl.errors import DispatchError

__all__ = [
    "Arguments",
    "CallShape",
    "ConcatMode",
    "Dispatch",
    "DispatchMode",
    "Dispatched",
    "Execute",
    "GatherMode",
    "GroupShape",
    "Mesh",
    "OneMode",
    "PerRankMode",
    "current",
    "custom_mode",
    "mesh",
    "register_dispatch_mode",
    "update_dispatch_mode",
]


@dataclass(frozen=True)
class Arguments:
    """Positional and keyword arguments of one rank's call."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


@dataclass(frozen=True)
class Dispatched:
    """One ``Arguments`` per rank that runs, in rank order; equal objects are encoded once.

    ``num_padding`` rows were appended at the end of the whole batch, which has ``num_rows`` with them; the caller
    takes them off the result.
    """

    per_rank: Sequence[Arguments]
    num_padding: int = 0
    num_rows: int = 0
    rows: tuple[int, ...] | None = None
    """Rows of each rank's part that are no padding; None if the call is not split by rows."""


@dataclass(frozen=True)
class Mesh:
    """Which part of a batch each rank works on, and whose result counts, as the workers registered it."""

    name: str
    dp_ranks: tuple[int, ...]
    """rank → dp rank: ranks with the same dp rank (tensor or pipeline parallel peers) get the same part."""
    collects: tuple[bool, ...]
    """rank → is its result the one of its dp rank?"""

    def __post_init__(self) -> None:
        collecting = [dp_rank for dp_rank, counts in zip(self.dp_ranks, self.collects, strict=True) if counts]
        if sorted(collecting) != list(range(self.dp_size)):
            raise DispatchError(
                f"mesh {self.name!r}: each of its {self.dp_size} dp ranks needs exactly one rank that collects, but "
                f"the collecting ranks have the dp ranks {collecting} (rank → dp rank: {list(self.dp_ranks)}, "
                f"collects: {list(self.collects)}); see Worker.register_mesh"
            )

    @property
    def dp_size(self) -> int:
        """Number of parts that a batch is split into."""
        return max(self.dp_ranks) + 1


class GroupShape(Protocol):
    """What a mode may know of the group."""

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        ...

    def mesh(self, name: str) -> Mesh:
        """Return a mesh that the workers registered; asks them once. Raises DispatchError if they did not."""
        ...


@dataclass(frozen=True)
class CallShape:
    """The call that is being dispatched or collected: its name for error texts, and what the method has chosen."""

    name: str
    uneven: UnevenPolicy = "pad"
    rank_zero: bool = False
    merge: Merge | None = None
    rows: tuple[int, ...] | None = None
    """When collected: see ``Dispatched``."""
    num_padding: int = 0

    @property
    def policy(self) -> UnevenPolicy:
        """What happens to rows that do not divide: nothing is padded where padding would count in a figure."""
        rules = (self.merge,) if isinstance(self.merge, str) else (self.merge or {}).values()
        return "uneven" if self.uneven == "pad" and {"mean", "sum"} & set(rules) else self.uneven

    def sent(self, dispatched: Dispatched) -> CallShape:
        """Return the call as its results are collected."""
        return replace(self, rows=dispatched.rows, num_padding=dispatched.num_padding)


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
    mesh_name: str | None = None
    """Results come from the ranks that collect in this mesh alone; the others send none."""

    def __repr__(self) -> str:
        return f"Dispatch.{self.name}"


# What a call of a mode takes and gives, for a method ``def m(self, x: X) -> R``, is told to type checkers by the class
# of the mode (see rpcrl.mypy_plugin); of a mode that is a plain ``DispatchMode``, nothing is known.


class GatherMode(DispatchMode):
    """``group.m(x: X)`` gives ``list[R]``: the results of all ranks."""


class PerRankMode(DispatchMode):
    """``group.m(x: list[X] | tuple[X, ...])`` gives ``list[R]``: a value for each rank, a result of each rank."""


class ConcatMode(DispatchMode):
    """``group.m(x: X)`` gives one ``R``, put together from the results of the ranks."""


class OneMode(DispatchMode):
    """``group.m(x: X)`` gives ``R``: the result of one rank."""


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
    return _chunked(call, arguments, 1 if call.rank_zero else group.world_size)


def _function_and_chunks(group: GroupShape, call: CallShape, arguments: Arguments) -> Dispatched:
    if not arguments.args or not callable(arguments.args[0]):
        got = type(arguments.args[0]).__name__ if arguments.args else "no positional argument"
        raise DispatchError(f"{call.name} takes a function first and then batches, got {got}")
    function = arguments.args[0]
    rest = Arguments(arguments.args[1:], arguments.kwargs)
    chunked = _chunked(call, rest, 1 if call.rank_zero else group.world_size)
    return replace(chunked, per_rank=[Arguments((function, *part.args), part.kwargs) for part in chunked.per_rank])


def _called_directly(group: GroupShape, call: CallShape, arguments: Arguments) -> Dispatched:
    raise DispatchError(
        f"{call.name} is marked Dispatch.DIRECT_ROLLOUT_METHOD: the rollout is called directly, not through the group"
    )


def _chunked(call: CallShape, arguments: Arguments, num_parts: int) -> Dispatched:
    names = list(arguments.kwargs)
    values = [*arguments.args, *arguments.kwargs.values()]
    labels = [f"argument {index}" for index in range(1, len(arguments.args) + 1)] + names
    parts = chunk_all(values, labels, num_parts, policy=call.policy, call=call.name)
    chunks, count = parts.columns, len(arguments.args)
    return Dispatched(
        [
            Arguments(
                tuple(column[rank] for column in chunks[:count]),
                {name: column[rank] for name, column in zip(names, chunks[count:], strict=True)},
            )
            for rank in range(num_parts)
        ],
        parts.num_padding,
        num_rows=sum(parts.rows) + parts.num_padding,
        rows=parts.rows,
    )


def _chunk_per_dp_rank(name: str) -> DispatchFn:
    def dispatch(group: GroupShape, call: CallShape, arguments: Arguments) -> Dispatched:
        mesh = group.mesh(name)
        chunked = _chunked(call, arguments, mesh.dp_size)
        # The same object for all ranks of a dp rank, so that it is encoded once; ``rows`` stay those of the dp ranks,
        # whose results are collected.
        return replace(chunked, per_rank=[chunked.per_rank[dp_rank] for dp_rank in mesh.dp_ranks])

    return dispatch


def _collect_dp_ranks(name: str) -> CollectFn:
    def collect(group: GroupShape, call: CallShape, outputs: list[Any]) -> Any:
        mesh = group.mesh(name)
        by_dp_rank = {mesh.dp_ranks[rank]: outputs[rank] for rank, counts in enumerate(mesh.collects) if counts}
        return _collect_concat(group, call, [by_dp_rank[dp_rank] for dp_rank in range(mesh.dp_size)])

    return collect


def mesh(name: str) -> ConcatMode:
    """Return the mode that splits a batch over the dp ranks of a mesh which the workers registered by that name.

    Ranks with the same dp rank get the same part, encoded once; one rank for each dp rank sends its result.
    """
    return ConcatMode(f"mesh({name!r})", _chunk_per_dp_rank(name), _collect_dp_ranks(name), mesh_name=name)


def _chunk_without_padding(group: GroupShape, call: CallShape, arguments: Arguments) -> Dispatched:
    # Padding could not be taken off a list of figures, so none is put in.
    return _chunk_per_rank(group, replace(call, uneven="uneven") if call.uneven == "pad" else call, arguments)


def _collect_list(group: GroupShape, call: CallShape, outputs: list[Any]) -> Any:
    return outputs if call.merge is None else merge_all(outputs, call.merge, rows=call.rows, call=call.name)


def _collect_one(group: GroupShape, call: CallShape, outputs: list[Any]) -> Any:
    return outputs[0]


def _collect_concat(group: GroupShape, call: CallShape, outputs: list[Any]) -> Any:
    return concat_all(outputs, call=call.name, merge=call.merge, rows=call.rows, num_padding=call.num_padding)


class _Modes(type):
    """Lets ``Dispatch`` be looked up, searched and walked like an enumeration."""

    def __iter__(cls) -> Iterator[DispatchMode]:
        return iter([value for value in vars(cls).values() if isinstance(value, DispatchMode)])

    def __len__(cls) -> int:
        return len(list(iter(cls)))

    def __contains__(cls, item: object) -> bool:
        return any(item is mode or item == mode.name for mode in cls)

    def __getitem__(cls, name: str) -> DispatchMode:
        found = vars(cls).get(name)
        if not isinstance(found, DispatchMode):
            raise DispatchError(f"no dispatch mode {name!r}; there are: {', '.join(mode.name for mode in cls)}")
        return found


class Dispatch(metaclass=_Modes):
    """The dispatch modes, under verl's names.

    * ``ONE_TO_ALL``: every rank gets the same arguments; the result is the list of all ranks' results.
    * ``RANK_ZERO``: only rank 0 runs; the result is its result.
    * ``ALL_TO_ALL`` and ``DP_COMPUTE``: every argument is a list or tuple with one value per rank; list back.
    * ``DP_COMPUTE_PROTO``: every argument is a batch; it is split into one part per rank, padded if the rows do not
      divide (or as the method's ``uneven`` policy says); the results are concatenated and the padding is taken off.
    * ``DP_COMPUTE_PROTO_WITH_FUNC``: a function first, which every rank gets, then as ``DP_COMPUTE_PROTO``.
    * ``DP_COMPUTE_METRIC``: batches out as ``DP_COMPUTE_PROTO``, the list of all ranks' results back. Nothing is
      padded, because padding would reach the figures: parts differ by one row instead (and may be empty).
    * ``DIRECT_ROLLOUT_METHOD``: a marker for methods that are called on the rollout itself; a call by the group raises.

    ``mesh(name)`` is the mode for workers that are more than data parallel; ``register_dispatch_mode`` adds your own.
    """

    ONE_TO_ALL: ClassVar = GatherMode("ONE_TO_ALL", _same_to_all, _collect_list)
    RANK_ZERO: ClassVar = OneMode("RANK_ZERO", _same_to_all, _collect_one, rank_zero_only=True)
    ALL_TO_ALL: ClassVar = PerRankMode("ALL_TO_ALL", _one_per_rank, _collect_list)
    DP_COMPUTE: ClassVar = PerRankMode("DP_COMPUTE", _one_per_rank, _collect_list)
    DP_COMPUTE_PROTO: ClassVar = ConcatMode("DP_COMPUTE_PROTO", _chunk_per_rank, _collect_concat)
    DP_COMPUTE_PROTO_WITH_FUNC: ClassVar = ConcatMode(
        "DP_COMPUTE_PROTO_WITH_FUNC", _function_and_chunks, _collect_concat
    )
    DP_COMPUTE_METRIC: ClassVar = GatherMode("DP_COMPUTE_METRIC", _chunk_without_padding, _collect_list)
    DIRECT_ROLLOUT_METHOD: ClassVar = DispatchMode("DIRECT_ROLLOUT_METHOD", _called_directly, _collect_list)


class Execute:
    """Which ranks run a method: ``ALL`` of them, or ``RANK_ZERO`` alone (then its plain result comes back)."""

    ALL: ClassVar[Literal["ALL"]] = "ALL"
    RANK_ZERO: ClassVar[Literal["RANK_ZERO"]] = "RANK_ZERO"


def custom_mode(functions: Mapping[str, Callable[..., Any]], *, name: str = "") -> DispatchMode:
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

    name = name or f"custom({getattr(dispatch_fn, '__name__', '?')}, {getattr(collect_fn, '__name__', '?')})"
    return DispatchMode(name, dispatch, collect)


def register_dispatch_mode(name: str, dispatch_fn: Callable[..., Any], collect_fn: Callable[..., Any]) -> DispatchMode:
    """Add a mode of your own to ``Dispatch`` (as ``Dispatch[NAME]``, upper case) and return it.

    The functions have verl's signatures, see ``custom_mode``. Raises DispatchError if the name is taken. A worker
    process needs no registration of its own: modes act on the driver alone.
    """
    name = name.upper()
    if name in Dispatch or not name.isidentifier():
        raise DispatchError(f"dispatch mode {name!r} is registered already, or is no name")
    mode = custom_mode({"dispatch_fn": dispatch_fn, "collect_fn": collect_fn}, name=name)
    setattr(Dispatch, name, mode)
    return mode


def update_dispatch_mode(
    mode: DispatchMode | str, dispatch_fn: Callable[..., Any], collect_fn: Callable[..., Any]
) -> DispatchMode:
    """Replace the functions of a mode for all groups that are made from now on; those that exist keep theirs."""
    name = Dispatch[mode if isinstance(mode, str) else mode.name].name
    replaced = custom_mode({"dispatch_fn": dispatch_fn, "collect_fn": collect_fn}, name=name)
    setattr(Dispatch, name, replaced)
    return replaced


def current(mode: DispatchMode) -> DispatchMode:
    """Return what ``Dispatch`` holds now under the mode's name; the mode itself if it is not held there."""
    held = vars(Dispatch).get(mode.name)
    return held if isinstance(held, DispatchMode) else mode
