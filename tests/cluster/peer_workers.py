"""Workers that call workers of other groups."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from typing import Any

import psutil

from rpcrl import DataProto, Dispatch, Worker, WorkerGroup, register


class Adder(Worker):
    """The one that is called."""

    def __init__(self) -> None:
        self.count = 0
        self.go_on = threading.Event()

    @register
    def add(self, x: int, y: int = 1) -> tuple[int, int]:
        self.count += 1
        return self.rank, x + y

    @register
    def counted(self) -> int:
        return self.count

    @register
    async def meet(self, x: int) -> int:
        await asyncio.sleep(0.01)
        return x

    @register
    def refuse(self) -> None:
        raise KeyError("not today")

    @register
    def wait(self) -> str:
        self.go_on.wait(60)
        return "waited"

    @register
    def die(self, rank: int) -> None:
        if self.rank == rank:
            os.kill(os.getpid(), signal.SIGKILL)
        self.go_on.wait(60)

    @register(Dispatch.DP_COMPUTE_PROTO)
    def double(self, batch: DataProto) -> DataProto:
        batch.batch["x"] *= 2
        return batch


class Caller(Worker):
    """The one that calls."""

    def __init__(self) -> None:
        self.kept: Any = None

    @register
    def keep(self, group: Any) -> str:
        self.kept = group
        return repr(group)

    @register
    def call(self, group: WorkerGroup[Adder], x: int) -> Any:
        return group.add(x, y=self.rank)

    @register
    def call_kept(self, x: int) -> Any:
        return self.kept.add(x)

    @register
    def many(self, worker: Any, count: int) -> int:
        futures = [worker.add.submit(number) for number in range(count)]
        return sum(future.result(30)[1] for future in futures)

    @register
    async def all_at_once(self, group: Any, count: int) -> list[Any]:
        calls = [group.workers[number % group.world_size].meet.submit(number) for number in range(count)]
        return list(await asyncio.gather(*calls))

    @register
    def proto(self, group: Any, batch: DataProto) -> DataProto:
        result: DataProto = group.double(batch)
        return result

    @register
    def story(self, group: Any, method: str, *args: Any) -> tuple[str, str, int]:
        try:
            getattr(group, method)(*args)
        except Exception as error:
            return type(error).__name__, str(error), int(getattr(error, "rank", -1))
        return "", "no error", -1

    @register
    def cancelled(self, worker: Any) -> bool:
        future = worker.wait.submit()
        return bool(future.cancel())

    @register
    def close_it(self, group: Any) -> None:
        group.close()

    @register
    def give_back(self, group: Any) -> Any:
        return group

    @register
    def pass_on(self, other: Any, group: Any, x: int) -> Any:
        return other.call(group, x)

    @register
    def sockets(self) -> int:
        return len(psutil.Process().net_connections("all"))
