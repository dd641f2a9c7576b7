"""What is measured of rpcrl itself? The driver of the benchmark for our own system: the public API and nothing else."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from rpcrl import Controller, Future, ResourcePool, WorkerGroup, wait_all
from rpcrl.bench.driver import Action, Driver, Setup, Task, Unsupported, serve, shape_of
from rpcrl.bench.workers import BenchWorker, column_sums, make_batch
from rpcrl.version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["OwnDriver"]

CALLS_IN_FLIGHT = 1_000
PEER_CALLS = 50


class OwnDriver:
    """A controller and a group; a second group where the case needs one."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self.about = f"rpcrl {__version__}"
        self._controller = self._open()
        self._group = self._new_group("first")
        self._second: WorkerGroup[BenchWorker] | None = None

    def prepare(self, task: Task) -> Action:
        """Return what does the case once. Raises Unsupported."""
        self._end_second()
        makers: dict[str, Callable[[Task], Action]] = {
            "ping": lambda _: self._ping,
            "scatter_gather": self._scatter_gather,
            "broadcast": self._broadcast,
            "in_flight": lambda _: self._in_flight(),
            "reference_chain": self._reference_chain,
            "peer_call": lambda _: self._peer_call(),
            "cold_start": lambda _: self._cold_start,
        }
        if task.case not in makers:
            raise Unsupported("not a case of worker groups")
        return makers[task.case](task)

    def close(self) -> None:
        """End the workers."""
        self._controller.close()

    def _open(self) -> Controller:
        return Controller(transport=self._setup.transport, console="off")

    def _new_group(self, name: str, controller: Controller | None = None) -> WorkerGroup[BenchWorker]:
        pool = ResourcePool([self._setup.workers])
        return WorkerGroup(pool, BenchWorker, name=name, controller=controller or self._controller)

    def _end_second(self) -> None:
        if self._second is not None:
            self._second.close()
            self._second = None

    def _ping(self) -> None:
        self._group.ping()

    def _scatter_gather(self, task: Task) -> Action:
        batch, group = make_batch(*shape_of(task.mib)), self._group

        def untouched() -> None:
            group.echo(batch)

        def touched() -> None:
            column_sums(group.touch(batch))

        return touched if task.variant == "touched" else untouched

    def _broadcast(self, task: Task) -> Action:
        batch = make_batch(*shape_of(task.mib))
        method = self._group.read if task.variant == "touched" else self._group.hold

        def broadcast() -> None:
            method(batch)

        return broadcast

    def _in_flight(self) -> Action:
        methods = [handle.ping for handle in self._group.workers]

        def call_all() -> None:
            futures: list[Future[None]] = [methods[number % len(methods)].submit() for number in range(CALLS_IN_FLIGHT)]
            wait_all(futures)

        return call_all

    def _reference_chain(self, task: Task) -> Action:
        workers = self._setup.workers
        shape = shape_of(task.mib)
        self._second = self._new_group("second")
        self._group.prepare(max(1, shape.rows // workers), shape.ids, shape.probs)
        trigger, first = make_batch(workers, 1, 1), self._group
        take = self._second.take_read if task.variant == "touched" else self._second.take

        def chain() -> None:
            take(first.made(trigger))

        return chain

    def _peer_call(self) -> Action:
        self._second = self._new_group("second")
        second, first = self._second, self._group

        def call() -> float:
            return max(first.call_peer(second, PEER_CALLS))

        return call

    def _cold_start(self) -> float:
        started = time.perf_counter()
        with self._open() as controller:
            self._new_group("cold", controller).ping()
            return time.perf_counter() - started


def _start(setup: Setup) -> Driver:
    return OwnDriver(setup)


if __name__ == "__main__":
    serve(_start)
