"""What do rpcrl's workers do in the benchmark? As little as the case allows."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from rpcrl import DataProto, Dispatch, Worker, register
from rpcrl.runtime.loading import loading

if TYPE_CHECKING:
    import torch

    from rpcrl import WorkerGroup

__all__ = ["BenchWorker", "column_sums", "make_batch", "new_columns"]


def make_batch(rows: int, ids: int, probs: int) -> DataProto:
    """Return a batch of two columns, ``ids`` int64 [rows, ids] and ``probs`` float32 [rows, probs]."""
    with loading():
        import torch

    return DataProto.from_dict(
        {"ids": torch.randint(0, 50_000, (rows, ids)), "probs": torch.rand(rows, probs)},
    )


def column_sums(batch: DataProto) -> float:
    """Read every byte."""
    return float(sum(float(column.sum()) for column in batch.batch.values())) if batch.batch is not None else 0.0


def new_columns(batch: DataProto) -> DataProto:
    """Return a batch of new tensors of the same sizes."""
    columns = {} if batch.batch is None else {name: column + 1 for name, column in batch.batch.items()}
    return DataProto.from_dict(columns)


class BenchWorker(Worker):
    """Takes part in every case."""

    def __init__(self) -> None:
        self._made: DataProto | None = None

    @register(Dispatch.ONE_TO_ALL)
    def ping(self) -> None:
        """Do nothing."""

    @register(Dispatch.DP_COMPUTE_PROTO)
    def echo(self, batch: DataProto) -> DataProto:
        """Return the rows unread."""
        return batch

    @register(Dispatch.DP_COMPUTE_PROTO)
    def touch(self, batch: DataProto) -> DataProto:
        """Sum every column and return new ones."""
        column_sums(batch)
        return new_columns(batch)

    @register(Dispatch.ONE_TO_ALL)
    def hold(self, batch: DataProto) -> int:
        """Take a batch that all get, unread."""
        return len(batch)

    @register(Dispatch.ONE_TO_ALL)
    def read(self, batch: DataProto) -> float:
        """Sum every column of a batch that all get."""
        return column_sums(batch)

    @register(Dispatch.ONE_TO_ALL)
    def prepare(self, rows: int, ids: int, probs: int) -> None:
        """Make this rank's part of the batch that ``made`` returns; 0 rows frees it."""
        self._made = make_batch(rows, ids, probs) if rows else None

    @register(Dispatch.DP_COMPUTE_PROTO, returns="ref")
    def made(self, trigger: DataProto) -> DataProto:
        """Leave the prepared rows on this worker."""
        return trigger if self._made is None else self._made

    @register(Dispatch.DP_COMPUTE_PROTO)
    def take(self, batch: DataProto) -> DataProto:
        """Get rows from wherever they are, unread."""
        return DataProto.from_dict({"count": _one(float(len(batch)))})

    @register(Dispatch.DP_COMPUTE_PROTO)
    def take_read(self, batch: DataProto) -> DataProto:
        """Get rows from wherever they are and sum every column."""
        return DataProto.from_dict({"sum": _one(column_sums(batch))})

    @register(Dispatch.ONE_TO_ALL)
    def call_peer(self, peers: WorkerGroup[BenchWorker], count: int) -> float:
        """Call the peer of the same rank ``count`` times, one after the other; returns the seconds of one call."""
        peer = peers.workers[self.rank % peers.world_size]
        started = time.perf_counter()
        for _ in range(count):
            peer.ping()
        return (time.perf_counter() - started) / count


def _one(value: float) -> torch.Tensor:
    import torch

    return torch.tensor([value])
