"""What does a call on a group cost, next to bare ZeroMQ in the same run?

``ping``: an empty call to every worker and back. ``scatter_gather``: a float32 batch is split over the workers,
each returns its part, and the parts are put together again. ``untouched``: nobody reads the rows. ``touched``: every
worker and the driver read every byte, as a real stage would.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from harness import Case, Row, measure, options, report

import rpcrl
from rpcrl import Controller, DataProto, Dispatch, ResourcePool, Worker, WorkerGroup, register

COLUMNS = 1024
BYTES_PER_ROW = COLUMNS * 4


class Echo(Worker):
    """Gives back what it gets."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def ping(self) -> None:
        """Do nothing."""

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def echo(self, batch: DataProto) -> DataProto:
        """Return the rows unread."""
        return batch

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def touch(self, batch: DataProto) -> DataProto:
        """Read every byte, then return the rows."""
        batch.batch["x"].numpy().sum()
        return batch


def measure_with(workers: int, sizes_mib: list[int], *, rounds: int, budget_s: float) -> list[Row]:
    """Return the rows of both systems for one number of workers."""
    import torch
    from rivals.raw_zmq import RawZmq

    rows: list[Row] = []
    with RawZmq(workers) as raw, Controller(console="off") as controller:
        group = WorkerGroup(ResourcePool([workers]), Echo, name="echo", controller=controller)
        pings = [
            Case("raw zmq", "ping", raw.ping, workers=workers),
            Case("rpcrl", "ping", group.ping, workers=workers),
        ]
        rows += measure(pings, rounds=rounds * 20, warm_up=50, budget_s=budget_s)
        for mib in sizes_mib:
            batch = DataProto.from_dict(tensors={"x": torch.rand(mib * 2**20 // BYTES_PER_ROW, COLUMNS)})
            chunks = [part.batch["x"].numpy() for part in batch.chunk(workers)]

            def touched(batch: DataProto = batch) -> None:
                group.touch(batch).batch["x"].numpy().sum()

            same = {"workers": workers, "mib": float(mib)}
            cases = [
                Case(
                    "raw zmq",
                    "scatter_gather",
                    lambda c=chunks: raw.scatter_gather(c, touch=False),
                    "untouched",
                    **same,
                ),
                Case("rpcrl", "scatter_gather", lambda b=batch: group.echo(b), "untouched", **same),
                Case(
                    "raw zmq", "scatter_gather", lambda c=chunks: raw.scatter_gather(c, touch=True), "touched", **same
                ),
                Case("rpcrl", "scatter_gather", touched, "touched", **same),
            ]
            rows += measure(cases, rounds=rounds, budget_s=budget_s)
    return rows


def main() -> None:
    chosen = options(__doc__ or "")
    if chosen.quick:
        rows = measure_with(2, [1], rounds=10, budget_s=5.0)
    else:
        rows = [row for workers in (1, 2, 4) for row in measure_with(workers, [1, 16, 64], rounds=50, budget_s=20.0)]
    report(f"bench_dispatch: rpcrl {rpcrl.__version__} against raw ZeroMQ", rows, chosen.json)


if __name__ == "__main__":
    main()
