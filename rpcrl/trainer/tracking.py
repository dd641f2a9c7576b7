"""Where do a run's figures go? To metrics.jsonl and, the same ones, to TensorBoard.

A line is ``{"step": N, "<metric>": value, …}``, written and flushed when its step is done. When a run is resumed from
the checkpoint of step N, lines after N are cut off first: the file then reads as if the run had never stopped.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from rpcrl.trainer.run_directory import RunDirectory, write_atomically

__all__ = ["Tracking", "cut_metrics"]


def cut_metrics(path: Path, *, after_step: int) -> int:
    """Drop the lines of later steps, and a line that was cut short by a kill; returns how many went."""
    if not path.is_file():
        return 0
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    kept: list[str] = []
    for line in lines:
        try:
            step = json.loads(line)["step"]
        except (ValueError, KeyError, TypeError):
            continue
        if step <= after_step and line.endswith("\n"):
            kept.append(line)
    if len(kept) < len(lines):
        write_atomically(path, "".join(kept))
    return len(lines) - len(kept)


class Tracking:
    """Writes metrics; a context manager that closes both files."""

    def __init__(self, run: RunDirectory, *, start_step: int = 0) -> None:
        from tensorboardX import SummaryWriter

        cut_metrics(run.metrics, after_step=start_step if start_step else -1)
        if not start_step and run.tensorboard.is_dir():
            # of a life of this run that left no checkpoint: all of it is done again
            shutil.rmtree(run.tensorboard)
        self._stream = run.metrics.open("a", encoding="utf-8")
        # purge_step hides what an earlier life of this run had written for the steps that are done again
        self._events: Any = SummaryWriter(
            logdir=str(run.tensorboard), purge_step=start_step + 1 if start_step else None
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the figures of one step; non-finite ones are written as null, which JSON can hold."""
        line: dict[str, object] = {"step": step}
        for name, value in metrics.items():
            number = float(value)
            finite = math.isfinite(number)
            line[name] = number if finite else None
            if finite:
                self._events.add_scalar(name, number, step)
        self._stream.write(json.dumps(line) + "\n")
        self._stream.flush()

    def close(self) -> None:
        """Write out what is buffered and close the files."""
        if self._stream.closed:
            return
        self._stream.flush()
        os.fsync(self._stream.fileno())
        self._stream.close()
        self._events.close()

    def __enter__(self) -> Tracking:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
