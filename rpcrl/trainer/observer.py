"""How does a trainer tell an onlooker what it is doing?

A trainer calls one ``Observer``. The command line's live view is one, ``Observers`` fans out to several, and the base
class, which ignores everything, serves a trainer that nobody watches. Observers run on the driver's main thread
between phases: they must be quick. An exception in one is an error of the run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["Observer", "Observers", "RunInfo"]


@dataclass(frozen=True)
class RunInfo:
    """What is known when a run begins."""

    mode: str
    """``colocate``, or ``generate-only`` and ``eval-only`` for runs that do not train."""
    run_dir: Path
    start_step: int
    """Number of steps that are already done (0, or the step of the checkpoint that is resumed)."""
    total_steps: int
    roles: Mapping[str, int] = field(default_factory=dict)
    """Role → number of workers."""


class Observer:
    """Hears of a run's progress; every method does nothing unless overridden."""

    def on_status(self, text: str) -> None:
        """Hear what is being done while no step runs, e.g. ``starting 2 workers``."""

    def on_start(self, info: RunInfo) -> None:
        """Hear that the workers are up and the first phase follows."""

    def on_phase(self, step: int, phase: str) -> None:
        """Hear that ``phase`` of ``step`` begins, e.g. ``gen``; names are those of ``timing_s/<phase>``."""

    def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Hear that ``step`` (from 1) is done; the metrics are those of its line in metrics.jsonl."""

    def on_validate(self, step: int, metrics: Mapping[str, float]) -> None:
        """Hear the held-out figures after ``step`` (0: before training); ``heldout/accuracy`` is always there."""

    def on_end(self, summary: Mapping[str, object]) -> None:
        """Hear that the run ended by itself; ``summary`` is the content of summary.json."""


class Observers(Observer):
    """Passes everything on to several observers, in order."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        self._observers = tuple(observers)

    def on_status(self, text: str) -> None:
        """Pass on."""
        for observer in self._observers:
            observer.on_status(text)

    def on_start(self, info: RunInfo) -> None:
        """Pass on."""
        for observer in self._observers:
            observer.on_start(info)

    def on_phase(self, step: int, phase: str) -> None:
        """Pass on."""
        for observer in self._observers:
            observer.on_phase(step, phase)

    def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Pass on."""
        for observer in self._observers:
            observer.on_step(step, metrics)

    def on_validate(self, step: int, metrics: Mapping[str, float]) -> None:
        """Pass on."""
        for observer in self._observers:
            observer.on_validate(step, metrics)

    def on_end(self, summary: Mapping[str, object]) -> None:
        """Pass on."""
        for observer in self._observers:
            observer.on_end(summary)
