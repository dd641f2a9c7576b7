"""What does the same cost with verl's worker groups on Ray? The same modes, on verl's own DataProto."""

from __future__ import annotations

import time

import ray
import torch
import verl
from verl import DataProto
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup

from rpcrl.bench.driver import Action, Setup, Task, Unsupported, serve, shape_of


class Echo(Worker):
    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def ping(self) -> None:
        return None

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def echo(self, batch: DataProto) -> DataProto:
        return batch

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def touch(self, batch: DataProto) -> DataProto:
        total = sum(float(column.sum()) for column in batch.batch.values())
        del total
        return DataProto.from_dict(tensors={name: column + 1 for name, column in batch.batch.items()})

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def hold(self, batch: DataProto) -> int:
        return len(batch)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def read(self, batch: DataProto) -> float:
        return float(sum(float(column.sum()) for column in batch.batch.values()))


class VerlRay:
    """The driver."""

    def __init__(self, setup: Setup) -> None:
        self.about = f"verl {verl.__version__} on ray {ray.__version__}"
        self._workers = setup.workers
        ray.init(
            num_cpus=256,
            include_dashboard=False,
            object_store_memory=4 << 30,
            log_to_driver=False,
            logging_level="error",
        )
        self._group = self._start("bench")
        self._group.ping()

    def close(self) -> None:
        ray.shutdown()

    def _start(self, prefix: str) -> RayWorkerGroup:
        pool = RayResourcePool([self._workers], use_gpu=False, max_colocate_count=1, name_prefix=prefix)
        return RayWorkerGroup(pool, RayClassWithInitArgs(ray.remote(Echo)))

    def prepare(self, task: Task) -> Action:
        if task.case == "ping":
            return lambda: self._done(self._group.ping())
        if task.case == "cold_start":
            return self._cold_start
        if task.case not in ("scatter_gather", "broadcast"):
            raise Unsupported("not a call on one of verl's worker groups")
        rows, ids, probs = shape_of(task.mib)
        batch = DataProto.from_dict(
            tensors={"ids": torch.randint(0, 50_000, (rows, ids)), "probs": torch.rand(rows, probs)}
        )
        group, touched = self._group, task.variant == "touched"
        if task.case == "broadcast":
            return lambda: self._done(group.read(batch) if touched else group.hold(batch))

        def scatter_gather() -> None:
            if touched:
                sum(float(column.sum()) for column in group.touch(batch).batch.values())
            else:
                group.echo(batch)

        return scatter_gather

    @staticmethod
    def _done(_: object) -> None:
        return None

    def _cold_start(self) -> float:
        """The group alone: the cluster is up already, which costs many seconds more."""
        started = time.perf_counter()
        group = self._start(f"cold{time.monotonic_ns()}")
        group.ping()
        seconds = time.perf_counter() - started
        for worker in group.workers:
            ray.kill(worker)
        return seconds


if __name__ == "__main__":
    serve(VerlRay)
