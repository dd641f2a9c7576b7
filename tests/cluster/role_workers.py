"""Roles that share a process, and workers that tell where they are."""

from __future__ import annotations

import asyncio
import os
import threading
from typing import Any

from rpcrl import Dispatch, Worker, register


class Where(Worker):
    """Tells its place and its environment."""

    def __init__(self) -> None:
        self.go_on = threading.Event()

    @register
    def place(self) -> dict[str, Any]:
        ranks = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK")
        return {name: os.environ.get(name) for name in (*ranks, "MASTER_ADDR", "MASTER_PORT", "MINE")}

    @register
    def add_up(self) -> float:
        import torch
        import torch.distributed as dist

        self.init_process_group()
        total = torch.ones(1)
        dist.all_reduce(total)
        return float(total)

    @register
    def wait(self) -> None:
        self.go_on.wait(60)

    @register
    async def answer(self) -> str:
        return "here"

    @register
    async def let_go(self) -> None:
        self.go_on.set()


class Patient(Where):
    """Its control method may run beside everything."""

    @register(concurrent=True)
    async def control(self) -> str:
        self.go_on.set()
        return "told"


class Actor(Worker):
    """A role that the fused one drives."""

    def __init__(self, weight: int = 1) -> None:
        self.weight = weight

    @register
    async def sample(self, x: int) -> int:
        await asyncio.sleep(0)
        return x * self.weight

    @register
    def update(self, by: int) -> int:
        self.weight += by
        return self.weight


class Fused(Worker):
    """A role that works with its neighbours by plain calls."""

    @register(Dispatch.RANK_ZERO)
    async def step(self, x: int) -> tuple[int, int, int]:
        actor, critic = self.colocated("actor"), self.colocated("critic")
        actor.update(1)
        return await actor.sample(x), critic.update(10), os.getpid()
