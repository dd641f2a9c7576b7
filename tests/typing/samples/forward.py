"""A class that is used above its definition."""

from __future__ import annotations

from typing import reveal_type

from rpcrl import Dispatch, ResourcePool, Worker, WorkerGroup, register


def use(pool: ResourcePool) -> None:
    group = WorkerGroup(pool, Late)
    reveal_type(group.text())  # R: str
    group.text(1)  # E: Too many arguments for "__call__" of "RemoteMethod"


TEXT = WorkerGroup(ResourcePool([1]), Worker).text()  # E: "Worker" has no registered method "text"


class Late(Worker):
    @register(Dispatch.RANK_ZERO)
    def text(self) -> str:
        return ""
