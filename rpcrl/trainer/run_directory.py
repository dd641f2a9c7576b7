"""What lies in a run's directory, and how does it get there without half-written files?

::

    RUN_DIR/
      config.yaml          the resolved configuration
      metrics.jsonl        one line a step
      ledger.jsonl         async modes, one line a step: its weight version, the prompts trained on, those dropped
      tensorboard/         the same figures as TensorBoard events
      logs/                one file a rank
      run.lock             held by the driver while it runs
      samples/             step_N.jsonl (training) and validation_N.jsonl
      checkpoints/         global_step_N/ and latest_checkpointed_iteration.txt
      hf/                  the final model, for AutoModelForCausalLM.from_pretrained
      hf_critic/           with a critic: the final one, for AutoModelForTokenClassification and critic.model.path
      summary.json         written last: a run without it did not end by itself
      summary-MODE.json    of an evaluation or a generation in the directory of a finished training
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from rpcrl.errors import ConfigError, Violation
from rpcrl.trainer.run_lock import LOCK_FILE, RunLock

__all__ = ["SUMMARY_KEYS", "RunDirectory", "sync_directory", "write_atomically"]

SUMMARY_KEYS = (
    "mode",
    "steps",
    "wall_s",
    "phases_s",
    "heldout_accuracy",
    "weight_syncs",
    "tokens",
    "peak_rss_bytes",
)
"""Keys of summary.json, frozen: programs read them."""
RUN_ENTRIES = frozenset({"config.yaml", "logs", "metrics.jsonl", "samples"})
"""A directory with checkpoints and one of these is a run's."""
UNTRAINED_MODES = ("eval-only", "generate-only")


def sync_directory(directory: Path) -> None:
    """Make a directory's entries (new names, renames) survive a power cut."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomically(path: Path, text: str) -> None:
    """Write a small file so that a reader sees the old content or the new one, never a part."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    with beside.open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    beside.replace(path)
    sync_directory(path.parent)


@dataclass(frozen=True)
class RunDirectory:
    """The paths of one run; ``held`` makes the directory and keeps other drivers out."""

    path: Path

    @classmethod
    @contextmanager
    def held(cls, path: Path | str, *, resume: bool) -> Iterator[RunDirectory]:
        """Hold the directory of a new run, or of one that is resumed, so that no other driver takes it meanwhile.

        ``make_parts`` makes what lies in it. Raises ConfigError, and leaves what is there, when the directory cannot be
        made, is in use, holds something and ``resume`` is False, or holds something that is no run.
        """
        run = cls(Path(path).absolute())
        run._check(resume=resume)
        try:
            run.path.mkdir(parents=True, exist_ok=True)
            lock = RunLock(run.path)
        except OSError as error:
            problem = f"{run.path} cannot be made or written: {error.strerror}"
            raise ConfigError([Violation("trainer.run_dir", problem, ("name another: --run-dir runs/mine",))]) from None
        try:
            # again: another driver may have been here between the first look and the lock
            run._check(resume=resume)
            yield run
        finally:
            lock.release()

    def make_parts(self) -> None:
        """Make the folders of logs, samples and checkpoints."""
        for part in (self.logs, self.samples, self.checkpoints):
            part.mkdir(exist_ok=True)

    def _check(self, *, resume: bool) -> None:
        """Raise ConfigError when the directory is not one to start, or to go on, in."""
        if not self.path.exists():
            return
        if not self.path.is_dir():
            problem = f"{self.path} is not a directory"
            raise ConfigError([Violation("trainer.run_dir", problem, ("name another directory: --run-dir runs/mine",))])
        present = sorted(entry.name for entry in self.path.iterdir() if entry.name != LOCK_FILE)
        if not present or (resume and self.checkpoints.is_dir() and RUN_ENTRIES & set(present)):
            return
        shown = ", ".join(present[:4]) + (", …" if len(present) > 4 else "")
        if resume:
            problem = f"{self.path} is no run of rpcrl: it holds {len(present)} entries ({shown})"
            remedies = ("name the directory of a run: --run-dir RUN_DIR --resume", "or an empty one")
        else:
            problem = f"{self.path} already holds {len(present)} entries ({shown}), and a new run would mix with them"
            remedies = (
                "go on with that run: --resume (trainer.resume=auto)",
                "or name an empty directory: --run-dir runs/another",
            )
        raise ConfigError([Violation("trainer.run_dir", problem, remedies)])

    @property
    def config(self) -> Path:
        """The resolved configuration."""
        return self.path / "config.yaml"

    @property
    def ledger(self) -> Path:
        """Which prompts each step of an asynchronous run has trained on, and which it has dropped."""
        return self.path / "ledger.jsonl"

    @property
    def metrics(self) -> Path:
        """One JSON object a line, one line a step."""
        return self.path / "metrics.jsonl"

    @property
    def tensorboard(self) -> Path:
        """Directory of TensorBoard events."""
        return self.path / "tensorboard"

    @property
    def logs(self) -> Path:
        """Directory of the per-rank logs."""
        return self.path / "logs"

    @property
    def samples(self) -> Path:
        """Directory of sampled texts."""
        return self.path / "samples"

    @property
    def checkpoints(self) -> Path:
        """Directory of the checkpoints."""
        return self.path / "checkpoints"

    @property
    def hf(self) -> Path:
        """Directory of the final model in Hugging Face format."""
        return self.path / "hf"

    @property
    def hf_critic(self) -> Path:
        """Directory of the final critic in Hugging Face format."""
        return self.path / "hf_critic"

    @property
    def summary(self) -> Path:
        """The figures of a run that ended by itself."""
        return self.path / "summary.json"

    def write_samples(self, name: str, rows: Iterable[Mapping[str, object]]) -> Path:
        """Write ``samples/<name>.jsonl``, one object a line; returns its path."""
        path = self.samples / f"{name}.jsonl"
        lines = [json.dumps(row, ensure_ascii=False, default=str) for row in rows]
        path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        return path

    def write_summary(self, summary: Mapping[str, object]) -> None:
        """Write summary.json; raises KeyError when a frozen key is missing.

        The summary of a training that ended here stays: one that trained nothing goes beside it, to
        ``summary-<mode>.json``.
        """
        ordered = {key: summary[key] for key in SUMMARY_KEYS}
        ordered.update({key: value for key, value in summary.items() if key not in ordered})
        path, mode = self.summary, summary["mode"]
        earlier = self.read_summary()
        if mode in UNTRAINED_MODES and earlier is not None and earlier["mode"] not in UNTRAINED_MODES:
            path = self.path / f"summary-{mode}.json"
        write_atomically(path, json.dumps(ordered, indent=2) + "\n")

    def read_summary(self) -> dict[str, object] | None:
        """Return the content of summary.json; None when the run has not ended by itself."""
        if not self.summary.is_file():
            return None
        return cast("dict[str, object]", json.loads(self.summary.read_text(encoding="utf-8")))
