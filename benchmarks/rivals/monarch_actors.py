"""What does the same cost with Monarch's actor meshes? Arguments are dicts of torch tensors."""

from __future__ import annotations

import importlib.metadata
import time
from typing import Any

import torch
from monarch.actor import Actor, endpoint, this_host

from rpcrl.bench.driver import Action, Setup, Task, Unsupported, serve, shape_of

CALLS_IN_FLIGHT = 1_000

Columns = dict[str, torch.Tensor]


class Echo(Actor):
    @endpoint
    async def ping(self) -> None:
        return None

    @endpoint
    async def echo(self, columns: Columns) -> Columns:
        return columns

    @endpoint
    async def touch(self, columns: Columns) -> Columns:
        total = sum(float(column.sum()) for column in columns.values())
        del total
        return {name: column + 1 for name, column in columns.items()}

    @endpoint
    async def hold(self, columns: Columns) -> int:
        return len(columns)

    @endpoint
    async def read(self, columns: Columns) -> float:
        return float(sum(float(column.sum()) for column in columns.values()))


class MonarchActors:
    """The driver."""

    def __init__(self, setup: Setup) -> None:
        self.about = f"torchmonarch {importlib.metadata.version('torchmonarch')}"
        self._workers = setup.workers
        self._procs, self._actors = self._start("first")
        self._single = [self._actors.slice(gpus=rank) for rank in range(self._workers)]

    def close(self) -> None:
        self._procs.stop().get()

    def _start(self, name: str) -> tuple[Any, Any]:
        procs = this_host().spawn_procs(per_host={"gpus": self._workers})
        actors = procs.spawn(name, Echo)
        actors.ping.call().get()
        return procs, actors

    def prepare(self, task: Task) -> Action:
        if task.case == "ping":
            return lambda: self._done(self._actors.ping.call().get())
        if task.case == "in_flight":
            return self._in_flight
        if task.case == "cold_start":
            return self._cold_start
        if task.case not in ("scatter_gather", "broadcast"):
            raise Unsupported("not measured of Monarch")
        rows, ids, probs = shape_of(task.mib)
        columns = {"ids": torch.randint(0, 50_000, (rows, ids)), "probs": torch.rand(rows, probs)}
        touched = task.variant == "touched"
        if task.case == "broadcast":
            method = self._actors.read if touched else self._actors.hold
            return lambda: self._done(method.call(columns).get())

        def scatter_gather() -> None:
            split = {name: column.tensor_split(self._workers) for name, column in columns.items()}
            parts = [{name: pieces[rank] for name, pieces in split.items()} for rank in range(self._workers)]
            futures = [
                (actor.touch if touched else actor.echo).call_one(part)
                for actor, part in zip(self._single, parts, strict=True)
            ]
            replies = [future.get() for future in futures]
            whole = {name: torch.cat([reply[name] for reply in replies]) for name in columns}
            if touched:
                sum(float(column.sum()) for column in whole.values())

        return scatter_gather

    @staticmethod
    def _done(_: object) -> None:
        return None

    def _in_flight(self) -> None:
        futures = [self._single[number % self._workers].ping.call_one() for number in range(CALLS_IN_FLIGHT)]
        for future in futures:
            future.get()

    def _cold_start(self) -> float:
        started = time.perf_counter()
        procs, _ = self._start(f"cold{time.monotonic_ns()}")
        seconds = time.perf_counter() - started
        procs.stop().get()
        return seconds


if __name__ == "__main__":
    from monarch_actors import MonarchActors as Named  # a name that the processes can import

    serve(Named)
