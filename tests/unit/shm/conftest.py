"""A run of its own for each test, whose files are gone afterwards."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rpcrl.leftovers import remove_shared_memory, shared_memory_prefix
from rpcrl.shm.arena import Arena, Loan
from rpcrl.shm.budget import Budget
from rpcrl.shm.buffers import Lent, Placed
from rpcrl.shm.reader import Reader

MIB = 1 << 20


class Clock:
    """Time that a test moves."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


class Run:
    """A sender and its budget, and receivers in this process."""

    def __init__(self, limit_bytes: int) -> None:
        self.run_id = f"test-{os.getpid()}-{secrets.token_hex(4)}"
        self.clock = Clock()
        self.budget = Budget(self.run_id, limit_bytes)
        self.arena = Arena(self.budget, self.run_id, "sender", clock=self.clock)

    def reader(self) -> Reader:
        return Reader(self.run_id)

    def note(self, placed: tuple[object, ...], holder: str = "receiver") -> list[object]:
        note = Loan(self.arena, holder).note(placed)  # type: ignore[arg-type]
        assert note is not None
        return note

    def send(self, *buffers: bytes | bytearray | memoryview, reader: Reader | None = None) -> list[Lent]:
        """Place buffers, let go of them, and open them at a receiver."""
        placed = self.arena.place(buffers)
        assert all(isinstance(each, Placed) for each in placed)
        opened = (reader or self.reader()).open(self.note(placed))
        return [opened[position] for position in range(len(buffers))]

    def files(self) -> list[str]:
        return sorted(path.name for path in Path("/dev/shm").glob(f"{shared_memory_prefix(self.run_id)}*"))


@pytest.fixture
def make_run() -> Iterator[Callable[..., Run]]:
    made: list[Run] = []

    def make(limit_bytes: int = 256 * MIB) -> Run:
        made.append(Run(limit_bytes))
        return made[-1]

    yield make
    for run in made:
        run.arena.close()
        run.budget.close()
        remove_shared_memory(run.run_id)
        assert run.files() == []


@pytest.fixture
def run(make_run: Callable[..., Run]) -> Run:
    return make_run()
