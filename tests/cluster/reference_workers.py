"""Workers that keep results, and read what others keep."""

from __future__ import annotations

import os
import signal
from typing import Any

import torch
from tensordict import TensorDict

from rpcrl import DataProto, Dispatch, Worker, mesh, register

ROW_FLOATS = 8_192
"""32 KiB a row: a few rows are more than what a reply carries along."""


class Producer(Worker):
    """Makes batches."""

    def __init__(self) -> None:
        self.last: Any = None

    @register(Dispatch.DP_COMPUTE_PROTO, returns="ref")
    def make(self, batch: DataProto) -> DataProto:
        rows = batch.batch["x"]
        self.last = rows[:, None].expand(-1, ROW_FLOATS).clone()
        names = [f"row {int(row)} of rank {self.rank}" for row in rows]
        return DataProto.from_dict({"wide": self.last, "y": rows * 2}, {"name": names}, {"step": 7})

    @register(Dispatch.DP_COMPUTE_PROTO)
    def plain(self, batch: DataProto) -> DataProto:
        rows = batch.batch["x"]
        return DataProto.from_dict({"wide": rows[:, None].expand(-1, ROW_FLOATS).clone()})

    @register(Dispatch.DP_COMPUTE_PROTO)
    def widen(self, batch: TensorDict) -> TensorDict:
        return TensorDict({"wide": batch["x"][:, None].expand(-1, ROW_FLOATS).clone()}, [len(batch)])

    @register(Dispatch.DP_COMPUTE_PROTO)
    def take_back(self, batch: DataProto) -> DataProto:
        return DataProto.from_dict({"first": batch.batch["wide"][:, 0]})

    @register
    def each(self, num_rows: int) -> DataProto:
        return DataProto.from_dict({"wide": torch.ones(num_rows, ROW_FLOATS)})

    @register
    def overwrite(self) -> None:
        self.last.fill_(-1)

    @register
    def wait(self, seconds: float) -> None:
        import threading

        threading.Event().wait(seconds)

    @register(returns="ref")
    def not_a_batch(self) -> int:
        return 3

    @register
    def kept(self) -> int:
        from rpcrl.runtime.worker import context

        return context().store.num_kept()

    @register
    def die(self, rank: int) -> None:
        if self.rank == rank:
            os.kill(os.getpid(), signal.SIGKILL)


class Consumer(Worker):
    """Takes batches."""

    def __init__(self) -> None:
        self.register_mesh("tp", self.rank // 2, is_collect=self.rank % 2 == 0)

    @register(Dispatch.DP_COMPUTE_PROTO)
    def add_one(self, batch: DataProto) -> DataProto:
        if batch.batch is None or "wide" not in batch.batch.keys():  # noqa: SIM118 - a TensorDict
            raise ValueError(f"got {batch}")
        made = {"z": batch.batch["wide"][:, 0] + 1, "rank": torch.full((len(batch),), self.rank)}
        return DataProto.from_dict(made, dict(batch.non_tensor_batch))

    @register(Dispatch.DP_COMPUTE_PROTO)
    def seen(self, batch: DataProto) -> DataProto:
        columns = ",".join(sorted([*batch.batch.keys(), *batch.non_tensor_batch]))
        return DataProto.from_dict(non_tensors={"seen": [f"{columns}:{len(batch)}"] * len(batch)})

    @register(mesh("tp"))
    def by_mesh(self, batch: DataProto) -> DataProto:
        return DataProto.from_dict({"z": batch.batch["wide"][:, 0] + 1})

    @register(Dispatch.DP_COMPUTE_PROTO)
    async def asynchronously(self, batch: DataProto) -> DataProto:
        return DataProto.from_dict({"z": batch.batch["wide"][:, 0] + 1})

    @register(Dispatch.DP_COMPUTE_PROTO)
    def fail(self, batch: DataProto) -> DataProto:
        raise KeyError("no")

    @register(materialize_futures=False)
    def look(self, ref: Any) -> tuple[str, int, list[float]]:
        return type(ref).__name__, len(ref), ref["y"].tolist()

    @register
    def type_of(self, batch: Any) -> str:
        return type(batch).__name__

    @register
    def types_in(self, batches: list[Any]) -> list[str]:
        return [type(batch).__name__ for batch in batches]

    @register
    def relay(self, producers: Any, batch: DataProto) -> dict[str, Any]:
        return {"ref": producers.make(batch)}

    @register(Dispatch.RANK_ZERO, materialize_futures=False)
    def given_back(self, ref: Any) -> Any:
        return ref
