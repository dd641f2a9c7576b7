"""A worker that fails in the phase that a test asks for, and the value that fails while it travels."""

from __future__ import annotations

import atexit
import threading
from dataclasses import dataclass

from rpcrl import Worker, register
from rpcrl.wire.codec import register_codec
from tests.cluster.group_workers import wait_for
from tests.faults import fault


@dataclass(frozen=True)
class Bomb:
    """Says where and how to fail; in the phases ``scatter`` and ``collect`` it does so itself, on the worker."""

    phase: str
    how: str
    folder: str

    def reaches(self, phase: str) -> None:
        """Fail if this is the phase and this is the worker."""
        if phase == self.phase and fault.is_here():
            fault.happen(self.how, self.folder)


def _pack(bomb: Bomb) -> list[str]:
    bomb.reaches("collect")
    return [bomb.phase, bomb.how, bomb.folder]


def _unpack(fields: list[str]) -> Bomb:
    bomb = Bomb(*fields)
    bomb.reaches("scatter")
    return bomb


register_codec(Bomb, name="tests.Bomb", encode=_pack, decode=_unpack)


class Faulty(Worker):
    """Rank 1 fails; what the others do meanwhile is what one does in that phase."""

    def __init__(self, phase: str, how: str, folder: str) -> None:
        self.bomb = Bomb(phase, how, folder)
        if phase == "shutdown":
            atexit.register(self.bomb.reaches, "shutdown")

    @register
    def ping(self) -> int:
        return self.rank

    @register
    def arm(self) -> None:
        """Fail when the file ``go`` is there, from a thread: the worker itself is idle."""
        threading.Thread(target=self._fail_when_told, daemon=True).start()

    def _fail_when_told(self) -> None:
        wait_for(f"{self.bomb.folder}/go")
        self.bomb.reaches("idle")

    @register
    def work(self, bomb: Bomb) -> Bomb:
        if bomb.phase == "compute":
            bomb.reaches("compute")
            wait_for(f"{bomb.folder}/never")
        return bomb

    @register
    def reduce(self, bomb: Bomb) -> None:
        import torch
        import torch.distributed as dist

        self.init_process_group()
        dist.all_reduce(torch.ones(1))
        bomb.reaches("collective")
        dist.all_reduce(torch.ones(1))
