"""Workers that tell where their arguments lie, and keep them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from rpcrl import Dispatch, Worker, WorkerGroup, register


def lies_in_shared_memory(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor's memory is a mapping of a run's file."""
    address = tensor.data_ptr()
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "/dev/shm/rpcrl-" in line:
            first, last = (int(end, 16) for end in line.split(maxsplit=1)[0].split("-"))
            if first <= address < last:
                return True
    return False


class Memory(Worker):
    def __init__(self, start: torch.Tensor | None = None) -> None:
        self.start = start
        self.kept: list[torch.Tensor] = []

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def start_is_shared(self) -> bool:
        return self.start is not None and lies_in_shared_memory(self.start)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def is_shared(self, x: torch.Tensor) -> bool:
        return lies_in_shared_memory(x)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def scale(self, x: torch.Tensor) -> torch.Tensor:
        return x.mul_(self.rank + 2)

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def echo(self, x: torch.Tensor) -> torch.Tensor:
        return x

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def keep(self, x: torch.Tensor) -> None:
        self.kept.append(x[3:5])

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def look(self) -> list[list[float]]:
        return [part.tolist() for part in self.kept]

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def drop(self) -> None:
        self.kept.clear()

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def ask(self, other: WorkerGroup[Memory], x: torch.Tensor) -> tuple[Any, bool, float]:
        """Have another group look at ``x``; tells what it says, and whether its answer came by shared memory."""
        first, *_ = other.scale(x)
        return other.is_shared(x), lies_in_shared_memory(first), float(first.sum())
