"""How does a system that is measured talk to the benchmark? By lines of JSON over pipes, from a process of its own.

Each system has a *driver*: a script that some interpreter runs. It is told the number of workers, starts them, and
then prepares one case after the other and runs it when asked. It takes the time itself, so that the pipes are in no
figure. Only the standard library is used here: rivals live in virtual environments that do not have rpcrl.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

__all__ = ["Action", "Driver", "Setup", "Shape", "Task", "Unsupported", "serve", "shape_of"]

Action = Callable[[], "float | None"]
"""Does a case once. Returns None, or the seconds where the whole call is not what counts."""


class Unsupported(Exception):
    """A system has no such case; the text says why."""


class Shape(NamedTuple):
    """The batch that every system moves: ``rows`` × (``ids`` int64 + ``probs`` float32)."""

    rows: int
    ids: int
    probs: int


def shape_of(mib: float) -> Shape:
    """Return the columns of a batch of ``mib`` MiB in sum: half in int64, half in float32, as token batches are."""
    size_bytes = round(mib * 2**20)
    row_bytes = 4096 if size_bytes >= 2**20 else 64
    return Shape(max(1, size_bytes // row_bytes), row_bytes // 16, row_bytes // 8)


@dataclass(frozen=True)
class Setup:
    """What a driver is started with."""

    workers: int
    transport: str


@dataclass(frozen=True)
class Task:
    """What a driver prepares: a case, ``untouched`` or ``touched`` (or neither), and the size of the batch."""

    case: str
    variant: str
    mib: float


class Driver(Protocol):
    """One system with its workers."""

    about: str
    """Name and version."""

    def prepare(self, task: Task) -> Action:
        """Return what does the case once. Raises Unsupported."""
        ...

    def close(self) -> None:
        """End the workers."""
        ...


def serve(start: Callable[[Setup], Driver]) -> None:
    """Answer the benchmark on standard input and output until it says ``end`` or is gone.

    What the system prints goes to standard error: standard output is for answers alone.
    """
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def say(**answer: Any) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    first = json.loads(sys.stdin.readline())
    driver = start(Setup(first["workers"], first["transport"]))
    say(ready=driver.about)
    action: Action | None = None
    try:
        for line in sys.stdin:
            asked = json.loads(line)
            if "prepare" in asked:
                action = None  # what it holds is freed before the next batch is made
                gc.collect()
                try:
                    action = driver.prepare(Task(**asked["prepare"]))
                    say(supported=True)
                except Unsupported as why:
                    say(supported=False, reason=str(why))
            elif "go" in asked and action is not None:
                say(seconds=_timed(action, asked["go"]))
            else:
                break
    finally:
        driver.close()


def _timed(action: Action, count: int) -> list[float]:
    samples = []
    gc.collect()
    gc.disable()
    try:
        for _ in range(count):
            started = time.perf_counter()
            own = action()
            samples.append(time.perf_counter() - started if own is None else own)
    finally:
        gc.enable()
    return samples
