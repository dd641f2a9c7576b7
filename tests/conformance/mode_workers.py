"""Which methods show what each dispatch mode does? Each says what its rank has got, and gives it back."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import Any

import numpy as np

from rpcrl import DataProto, Dispatch, Execute, Worker, mesh, register, register_codec, register_dispatch_mode


class Counted:
    """A value that counts how often it is encoded in this process."""

    encoded = 0


def _encode(value: Counted) -> int:
    Counted.encoded += 1
    return 0


register_codec(Counted, name="tests.conformance.counted", encode=_encode, decode=lambda _: Counted(), replace=True)


def _deal(group: Any, cards: list[Any]) -> Any:
    """Deal cards one by one, as no mode of rpcrl's own does."""
    return ([cards[rank :: group.world_size] for rank in range(group.world_size)],), {}


def _gather(group: Any, outputs: list[Any]) -> Any:
    """Put the cards back in the order in which they were dealt."""
    return [outputs[number % group.world_size][number // group.world_size] for number in range(sum(map(len, outputs)))]


BY_NAME = register_dispatch_mode("conformance_deal", _deal, _gather)
del Dispatch.CONFORMANCE_DEAL  # type: ignore[attr-defined]  # other tests see rpcrl's own modes only


def reverse(batch: DataProto) -> DataProto:
    """A function that travels by its import path."""
    return batch[::-1]


def _seen(batch: DataProto, rank: int) -> DataProto:
    return batch.union(
        DataProto.from_dict(non_tensors={"rank": [rank] * len(batch), "part": [len(batch)] * len(batch)})
    )


class Modes(Worker):
    """Four ranks; in the mesh ``tp`` two of them share each dp rank, ``back`` counts dp ranks from the end."""

    def __init__(self) -> None:
        self.register_mesh("tp", self.rank // 2, is_collect=self.rank % 2 == 0)
        self.register_mesh("back", (self.world_size - 1 - self.rank) // 2, is_collect=self.rank % 2 == 0)
        self.register_mesh("first", 0, is_collect=self.rank == 0)
        self.calls = 0

    @register(Dispatch.ONE_TO_ALL)
    def one_to_all(self, x: Any, *, y: Any = 0) -> tuple[int, Any, Any]:
        return self.rank, x, y

    @register(concurrent=True)
    async def one_to_all_async(self, x: Any) -> tuple[int, Any]:
        await asyncio.sleep(0)
        return self.rank, x

    @register(Dispatch.RANK_ZERO)
    def rank_zero(self, x: Any) -> tuple[int, Any]:
        self.calls += 1
        return self.rank, x

    @register(Dispatch.ALL_TO_ALL, Execute.RANK_ZERO)
    def rank_zero_by_execution(self, x: Any) -> tuple[int, Any]:
        self.calls += 1
        return self.rank, x

    @register
    def calls_so_far(self) -> int:
        return self.calls

    @register
    def pid(self) -> int:
        return os.getpid()

    @register(Dispatch.ALL_TO_ALL)
    def all_to_all(self, x: Any, *, y: Any = 0) -> tuple[int, Any, Any]:
        return self.rank, x, y

    @register(Dispatch.DP_COMPUTE)
    def dp_compute(self, x: Any, *, y: Any = 0) -> tuple[int, Any, Any]:
        return self.rank, x, y

    @register(Dispatch.DP_COMPUTE_PROTO)
    def padded(self, batch: DataProto) -> DataProto:
        return _seen(batch, self.rank)

    @register(Dispatch.DP_COMPUTE_PROTO, uneven="uneven")
    def uneven(self, batch: DataProto) -> DataProto:
        return _seen(batch, self.rank)

    @register(Dispatch.DP_COMPUTE_PROTO, uneven="drop")
    def dropped(self, batch: DataProto) -> DataProto:
        return _seen(batch, self.rank)

    @register(Dispatch.DP_COMPUTE_PROTO, uneven="error")
    def refused(self, batch: DataProto) -> DataProto:
        return _seen(batch, self.rank)

    @register(Dispatch.DP_COMPUTE_PROTO)
    async def padded_async(self, batch: DataProto) -> DataProto:
        await asyncio.sleep(0)
        return _seen(batch, self.rank)

    @register(Dispatch.DP_COMPUTE_PROTO)
    def two(self, batch: DataProto, *, other: DataProto) -> DataProto:
        return batch.union(other)

    @register(Dispatch.DP_COMPUTE_PROTO)
    def echo(self, batch: Any) -> Any:
        return batch

    @register(Dispatch.DP_COMPUTE_PROTO, uneven="uneven")
    def echo_uneven(self, batch: Any) -> Any:
        return batch

    @register(Dispatch.DP_COMPUTE_METRIC)
    def ragged(self, batch: Any) -> dict[str, int]:
        """Return the ragged dimension of each jagged column."""
        columns = batch.batch if isinstance(batch, DataProto) else batch
        return {key: column._ragged_idx for key, column in columns.items() if getattr(column, "is_nested", False)}

    @register(Dispatch.DP_COMPUTE_PROTO_WITH_FUNC, uneven="error")
    def apply(self, function: Callable[[DataProto], DataProto], batch: DataProto) -> DataProto:
        return function(batch)

    @register(Dispatch.DP_COMPUTE_METRIC)
    def metric(self, batch: DataProto) -> tuple[int, list[int]]:
        return self.rank, batch.non_tensor_batch["row"].tolist()

    @register(Dispatch.DP_COMPUTE_PROTO, merge={"metrics.loss": "mean", "metrics.rows": "sum", "count": "list"})
    def figures(self, batch: DataProto) -> DataProto:
        """Return the batch with a mean over its rows, a count of them, and this rank's number."""
        metrics = {"loss": _mean(batch), "rows": len(batch), "rank": self.rank}
        return DataProto(batch.batch, batch.non_tensor_batch, {"metrics": metrics, "count": len(batch), "step": 3})

    @register(Dispatch.DP_COMPUTE_PROTO)
    def figures_without_rule(self, batch: DataProto) -> DataProto:
        return DataProto(batch.batch, batch.non_tensor_batch, {"metrics": {"loss": _mean(batch)}})

    @register(Dispatch.DP_COMPUTE_METRIC, merge="mean")
    def mean_loss(self, batch: DataProto) -> float:
        return _mean(batch)

    @register(merge={"rank": "list", "total": "sum"})
    def merged(self) -> dict[str, Any]:
        return {"rank": self.rank, "total": self.rank, "world": self.world_size}

    @register(merge={"rank": "first_equal"})
    def disagreeing(self) -> dict[str, int]:
        return {"rank": self.rank // 2}

    @register(Dispatch.DP_COMPUTE_PROTO)
    def step_of_rank(self, batch: DataProto) -> DataProto:
        return DataProto(batch.batch, batch.non_tensor_batch, {"step": self.rank // 3})

    @register(Dispatch.DIRECT_ROLLOUT_METHOD)
    def generate(self, prompt: str) -> str:
        return prompt

    @register({"dispatch_fn": _deal, "collect_fn": _gather})
    def dealt(self, cards: list[Any]) -> list[Any]:
        return [(card, self.rank) for card in cards]

    @register(BY_NAME)
    def dealt_by_name(self, cards: list[Any]) -> list[Any]:
        return [(card, self.rank) for card in cards]

    @register(mesh("tp"))
    def over_tp(self, batch: DataProto) -> DataProto:
        return _seen(batch, self.rank)

    @register(mesh("back"))
    def over_back(self, *, batch: DataProto) -> DataProto:
        return _seen(batch, self.rank)

    @register(mesh("tp"), uneven="uneven")
    async def over_tp_uneven(self, batch: DataProto) -> DataProto:
        return _seen(batch, self.rank)

    @register(mesh("tp"), merge={"metrics": "mean"})
    def tp_figures(self, batch: DataProto) -> DataProto:
        return DataProto(meta_info={"metrics": {"loss": _mean(batch)}})

    @register(mesh("tp"))
    def tp_without_facts(self, batch: DataProto) -> DataProto:
        return batch.select(meta_info_keys=[])

    @register(Dispatch.ONE_TO_ALL)
    def rows_of(self, batch: DataProto) -> int:
        return len(batch)

    @register(mesh("first"))
    def mebibyte(self, batch: DataProto) -> DataProto:
        return DataProto.from_dict(non_tensors={"x": np.full((1, 1 << 17), float(self.rank))})

    @register({"dispatch_fn": lambda group: ((), {}), "collect_fn": lambda group, outputs: outputs[0]})
    def mebibyte_of_all(self) -> Any:
        return np.full(1 << 17, float(self.rank))

    @register
    def boom(self, rank: int) -> int:
        if self.rank == rank:
            raise ValueError(f"rank {rank} fails on purpose")
        return self.rank

    @register(blocking=False)
    def not_blocking(self, x: int) -> int:
        return x + self.rank


class Pipeline(Worker):
    """Two stages of two tensor parallel ranks by two dp ranks: eight ranks; the last stage's first ranks collect."""

    def __init__(self) -> None:
        tp_rank, dp_rank, stage = self.rank % 2, self.rank // 2 % 2, self.rank // 4
        self.register_mesh("pp", dp_rank, is_collect=stage == 1 and tp_rank == 0)

    @register(mesh("pp"))
    def over_pp(self, batch: DataProto) -> DataProto:
        return _seen(batch, self.rank)

    @register(mesh("pp"))
    def over_pp_by_name(self, *, batch: DataProto, other: DataProto) -> DataProto:
        return _seen(batch, self.rank).union(other)

    @register(mesh("pp"))
    def only_the_collecting_send(self, batch: DataProto) -> Any:
        """Return what cannot be sent, on ranks that do not collect: nobody asks them for it."""
        return batch if self.rank in (4, 6) else object()


def _mean(batch: DataProto) -> float:
    values = batch.non_tensor_batch["value"].tolist()
    return sum(values) / len(values) if values else float("nan")
