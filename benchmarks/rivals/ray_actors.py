"""What does the same cost with plain Ray actors? Arguments are dicts of NumPy arrays, which Ray maps without a copy."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import ray

from rpcrl.bench.driver import Action, Setup, Task, Unsupported, serve, shape_of

CALLS_IN_FLIGHT = 1_000
PEER_CALLS = 50

Columns = dict[str, np.ndarray]


def make_columns(rows: int, ids: int, probs: int) -> Columns:
    return {"ids": np.random.randint(0, 50_000, (rows, ids)), "probs": np.random.rand(rows, probs).astype(np.float32)}


def sums(columns: Columns) -> float:
    return float(sum(float(column.sum()) for column in columns.values()))


class Echo:
    def __init__(self) -> None:
        self._made: Columns = {}

    def ping(self) -> None:
        return None

    def echo(self, columns: Columns) -> Columns:
        return columns

    def touch(self, columns: Columns) -> Columns:
        total = sum(float(column.sum()) for column in columns.values())
        del total
        return {name: column + column.dtype.type(1) for name, column in columns.items()}

    def hold(self, columns: Columns) -> int:
        return len(columns)

    def read(self, columns: Columns) -> float:
        return float(sum(float(column.sum()) for column in columns.values()))

    def prepare(self, rows: int, ids: int, probs: int) -> None:
        ones = {"ids": np.ones((rows, ids), np.int64), "probs": np.ones((rows, probs), np.float32)}
        self._made = ones

    def made(self) -> Columns:
        return self._made

    def call_peer(self, peer: Any, count: int) -> float:
        started = time.perf_counter()
        for _ in range(count):
            ray.get(peer.ping.remote())
        return (time.perf_counter() - started) / count


class RayActors:
    """The driver."""

    def __init__(self, setup: Setup) -> None:
        self.about = f"ray {ray.__version__}"
        self._workers = setup.workers
        ray.init(
            num_cpus=64,
            include_dashboard=False,
            object_store_memory=4 << 30,
            log_to_driver=False,
            logging_level="error",
        )
        self._actors = self._start()
        self._second: list[Any] = []

    def close(self) -> None:
        ray.shutdown()

    def prepare(self, task: Task) -> Action:
        for actor in self._second:
            ray.kill(actor)
        self._second = []
        actors = self._actors
        if task.case == "ping":
            return lambda: self._done(ray.get([actor.ping.remote() for actor in actors]))
        if task.case == "in_flight":
            return lambda: self._done(
                ray.get([actors[number % len(actors)].ping.remote() for number in range(CALLS_IN_FLIGHT)])
            )
        if task.case in ("scatter_gather", "broadcast"):
            return self._data(task)
        if task.case == "reference_chain":
            return self._chain(task)
        if task.case == "peer_call":
            self._second = self._start()
            pairs = list(zip(actors, self._second, strict=True))
            return lambda: max(ray.get([first.call_peer.remote(peer, PEER_CALLS) for first, peer in pairs]))
        if task.case == "cold_start":
            return self._cold_start
        raise Unsupported("not a case of Ray actors")

    def _start(self) -> list[Any]:
        actors = [ray.remote(Echo).options(num_cpus=0).remote() for _ in range(self._workers)]
        ray.get([actor.ping.remote() for actor in actors])
        return actors

    @staticmethod
    def _done(_: object) -> None:
        return None

    def _data(self, task: Task) -> Action:
        columns, actors = make_columns(*shape_of(task.mib)), self._actors
        touched = task.variant == "touched"

        def broadcast() -> None:
            kept = ray.put(columns)
            ray.get([(actor.read if touched else actor.hold).remote(kept) for actor in actors])

        def scatter_gather() -> None:
            split = {name: np.array_split(column, len(actors)) for name, column in columns.items()}
            parts = [{name: pieces[rank] for name, pieces in split.items()} for rank in range(len(actors))]
            method = "touch" if touched else "echo"
            replies = ray.get([getattr(actor, method).remote(part) for actor, part in zip(actors, parts, strict=True)])
            whole = {name: np.concatenate([reply[name] for reply in replies]) for name in columns}
            if touched:
                sums(whole)

        return broadcast if task.case == "broadcast" else scatter_gather

    def _chain(self, task: Task) -> Action:
        shape, actors = shape_of(task.mib), self._actors
        second = self._second = self._start()
        rows = max(1, shape.rows // len(actors))
        ray.get([actor.prepare.remote(rows, shape.ids, shape.probs) for actor in actors])
        method = "read" if task.variant == "touched" else "hold"

        def chain() -> None:
            made = [actor.made.remote() for actor in actors]
            ray.get([getattr(actor, method).remote(part) for actor, part in zip(second, made, strict=True)])

        return chain

    def _cold_start(self) -> float:
        """Actors alone: the cluster is up already, which costs many seconds more."""
        started = time.perf_counter()
        actors = self._start()
        seconds = time.perf_counter() - started
        for actor in actors:
            ray.kill(actor)
        return seconds


if __name__ == "__main__":
    serve(RayActors)
