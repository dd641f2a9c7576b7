"""How does a person follow a run? A live bar on a terminal, plain lines everywhere else.

``RunView`` is the observer that the trainer calls. It keeps the figures of the last step; the live display only draws
them, so both forms show the same numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from rpcrl.cli.waiting import FIRST_NOTICE_S, Waiting
from rpcrl.trainer.observer import Observer, RunInfo

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import RenderableType

__all__ = ["RunView", "phase_seconds", "step_line", "summary_lines"]

PLAIN_LINES = 20
"""About so many lines of steps are printed where there is no terminal."""
_NOT_A_PHASE = frozenset({"step"})
_OUTSIDE_STEPS = frozenset({"testing", "save_checkpoint"})
_TIMING = "timing_s/"


def phase_seconds(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the seconds of each phase of a step, in the order in which they were measured."""
    return {
        name.removeprefix(_TIMING): value
        for name, value in metrics.items()
        if name.startswith(_TIMING) and name.removeprefix(_TIMING) not in _NOT_A_PHASE
    }


def _seconds(value: float) -> str:
    """Return a time with about three digits: ``43 ms``, ``1.25 s``, ``71 s``."""
    if value < 1:
        return f"{value * 1000:.0f} ms"
    return f"{value:.2f} s" if value < 10 else f"{value:.0f} s"


def _phases(metrics: Mapping[str, float]) -> str:
    return "  ".join(f"{phase} {_seconds(value)}" for phase, value in phase_seconds(metrics).items())


def _figures(metrics: Mapping[str, float], heldout: float | None) -> list[str]:
    """Return reward, held-out accuracy and tokens/s, as far as they are known."""
    parts = []
    reward = metrics.get("critic/score/mean", metrics.get("critic/rewards/mean"))
    if reward is not None:
        parts.append(f"reward {reward:.3f}")
    if heldout is not None:
        parts.append(f"held-out {heldout:.3f}")
    tokens, step_s = metrics.get("perf/total_num_tokens"), metrics.get("timing_s/step")
    if tokens is not None and step_s:
        parts.append(f"{tokens / step_s:,.0f} tokens/s")
    if step_s:
        parts.append(f"{_seconds(step_s)}/step")
    return parts


def step_line(step: int, total: int, metrics: Mapping[str, float], heldout: float | None) -> str:
    """Return one step as a line of text."""
    return f"step {step}/{total}  " + "  ".join(_figures(metrics, heldout)) + f"  ({_phases(metrics)})"


def summary_lines(summary: Mapping[str, object], run_dir: Path | None) -> list[str]:
    """Return the end figures of a run from the content of its summary.json."""
    lines = []
    accuracy = summary.get("heldout_accuracy")
    if isinstance(accuracy, Mapping) and accuracy.get("end") is not None:
        start = accuracy.get("start")
        trained = start is not None and summary.get("mode") != "eval-only"
        shown = f"{start:.3f} -> {accuracy['end']:.3f}" if trained else f"{accuracy['end']:.3f}"
        lines.append(f"held-out accuracy  {shown}   (prompts that training never saw)")
    wall_s, tokens = summary.get("wall_s"), summary.get("tokens")
    phases = summary.get("phases_s")
    steps_s = None
    if isinstance(phases, Mapping):
        steps_s = sum(value for phase, value in phases.items() if phase not in _OUTSIDE_STEPS)
    line = f"steps              {summary.get('steps')}"
    if steps_s:
        line += f" in {steps_s:.1f} s"
    if isinstance(tokens, int):
        line += f", {tokens:,} tokens"
    lines.append(f"{line}, {summary.get('weight_syncs')} weight syncs")
    if isinstance(wall_s, int | float):
        beside_s = wall_s - (steps_s or 0.0)
        lines.append(f"whole command      {wall_s:.1f} s, of it {beside_s:.1f} s start, evaluations and saving")
    if isinstance(phases, Mapping) and phases:
        whole = sum(phases.values()) or 1.0
        parts = [f"{phase} {_seconds(value)} ({value / whole:.0%})" for phase, value in phases.items()]
        lines.append(f"time by phase      {', '.join(parts)}")
    peaks = summary.get("peak_rss_bytes")
    if isinstance(peaks, Mapping) and peaks:
        parts = [f"{role} {value / 2**20:.0f} MiB" for role, value in peaks.items()]
        lines.append(f"peak memory        {', '.join(parts)}")
    engine = summary.get("rollout_engine")
    if isinstance(engine, Mapping) and engine.get("engine") == "vllm":
        line = f"rollout            {engine['version']}, started in {engine['start_s']:.1f} s, KV cache of "
        line += f"{engine['kv_cache_bytes'] / 2**20:.0f} MiB a worker"
        lines.append(line if engine["sleep_frees_memory"] else f"{line}; on a CPU vLLM frees no memory while it sleeps")
    if run_dir is not None:
        lines.append(f"run directory      {run_dir}")
        if (run_dir / "hf").is_dir():
            lines.append(f"model              {run_dir / 'hf'}   (AutoModelForCausalLM.from_pretrained)")
    return lines


class RunView(Observer):
    """Shows a run on ``console``; as a context manager it ends its display with the run, however that ends."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live: Live | None = None
        self._progress: Progress | None = None
        self._task = 0
        self._total = 0
        self._waiting = Waiting(self._still_waiting)
        self._heldout: float | None = None
        self._metrics: Mapping[str, float] = {}
        self.run_dir: Path | None = None
        """Directory of the run, once it is known."""

    @property
    def where(self) -> str:
        """Step and phase that the run is in, e.g. ``step 3: update_actor``; while it starts, what it does."""
        return self._waiting.what

    def __enter__(self) -> RunView:
        self._waiting.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._waiting.__exit__()
        self._stop()

    def on_status(self, text: str) -> None:
        """Print the line."""
        self._print(text)
        self._waiting.begin(text)

    def on_start(self, info: RunInfo) -> None:
        """Name the run directory and start the bar."""
        self.run_dir = info.run_dir
        self._total = info.total_steps
        roles = ", ".join(f"{count} {role}" for role, count in info.roles.items())
        self._print(f"{info.mode}: {roles} up; run directory {info.run_dir}")
        if info.start_step:
            self._print(f"going on after step {info.start_step}")
        if self._console.is_terminal:
            self._start_live(info.start_step)

    def on_phase(self, step: int, phase: str) -> None:
        """Show which phase runs."""
        self._waiting.begin(f"step {step}: {phase}" if step else phase)
        self._draw()

    def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show the step's figures."""
        self._metrics = metrics
        if self._progress is not None:
            self._progress.update(self._task, completed=step)  # type: ignore[arg-type]
            self._draw()
        elif step in (1, self._total) or step % max(1, self._total // PLAIN_LINES) == 0:
            self._print(step_line(step, self._total, metrics, self._heldout))

    def on_validate(self, step: int, metrics: Mapping[str, float]) -> None:
        """Print the held-out figure; it stays above the bar."""
        self._heldout = metrics.get("heldout/accuracy")
        if self._heldout is not None:
            when = f"after step {step}" if step else "before training"
            self._print(f"held-out accuracy {self._heldout:.3f} {when}")
        self._draw()

    def on_end(self, summary: Mapping[str, object]) -> None:
        """End the bar and print the end figures."""
        self._waiting.begin("")
        self._stop()
        self._print("")
        for line in summary_lines(summary, self.run_dir):
            self._print(line)

    def worker_line(self, line: str) -> None:
        """Print a line that a worker wrote, above the bar; may be called from any thread."""
        self._print(line.rstrip("\n"))

    # -- drawing -------------------------------------------------------------------------------------------------------

    def _print(self, text: str) -> None:
        self._console.print(Text(text), soft_wrap=True)

    def _still_waiting(self, what: str, seconds: float) -> None:
        """Tell that something takes long; on a terminal the running display shows it all the time."""
        if self._live is None:
            self._print(f"still in {what}, for {seconds:.0f} s")

    def _start_live(self, start_step: int) -> None:
        self._progress = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=self._console,
        )
        self._task = int(self._progress.add_task("steps", total=self._total, completed=start_step))
        self._live = Live(get_renderable=self._renderable, console=self._console, refresh_per_second=8)
        self._live.start()

    def _renderable(self) -> RenderableType:
        figures = Text("  ".join(_figures(self._metrics, self._heldout)), overflow="ellipsis", no_wrap=True)
        waited_s = self._waiting.waited_s
        phase = f"{self.where} {waited_s:.0f} s" if waited_s >= FIRST_NOTICE_S else self.where
        phases = Text(f"{phase:<22} {_phases(self._metrics)}", style="dim")
        return Group(self._progress or "", figures, phases)

    def _draw(self) -> None:
        if self._live is not None:
            self._live.refresh()

    def _stop(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None
            self._progress = None
