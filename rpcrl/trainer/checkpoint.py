"""How is a run saved so that a kill at any moment leaves a whole checkpoint, and a resumed run is the same run?

``begin`` makes a hidden directory, the ranks write their shards into it, ``publish`` writes the manifest, flushes
everything, renames the directory to ``global_step_N`` and only then moves the pointer
``latest_checkpointed_iteration.txt``. A directory without the hidden name is therefore complete. Nothing in it is a
pickle: tensors are safetensors, all else is JSON.

::

    checkpoints/
      latest_checkpointed_iteration.txt     the number N of the last one
      global_step_N/
        manifest.json                       world, per-rank tensors, sizes and hashes; step, versions, data position
        actor/…                             the ranks' shards
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rpcrl.engines.shard_files import verify_files
from rpcrl.errors import CheckpointError
from rpcrl.logs import get_logger
from rpcrl.trainer.run_directory import sync_directory, write_atomically

__all__ = ["FORMAT", "MANIFEST", "CheckpointStore", "Manifest", "check_world", "read_manifest"]

log = get_logger(__name__)

FORMAT = 1
"""Version of the layout; another one is refused."""
MANIFEST = "manifest.json"
POINTER = "latest_checkpointed_iteration.txt"
_NAME = re.compile(r"global_step_(\d+)")


@dataclass(frozen=True)
class Manifest:
    """All of a checkpoint that is not a tensor."""

    step: int
    """Steps that are done."""
    world: dict[str, int]
    """Role → number of ranks that wrote shards."""
    ranks: dict[str, list[dict[str, Any]]]
    """Role → one entry a rank: names, shapes and placements of its tensors, and its files with their hashes."""
    weight_version: int
    """Version of the rollout's weights after this step."""
    data: dict[str, Any]
    """Position of the training data."""
    totals: dict[str, Any] = field(default_factory=dict)
    """Running totals of the run (seconds, tokens, syncs), so that the summary covers all of it."""
    unfinished_prompts: list[str] = field(default_factory=list)
    """Prompts that were drawn and neither trained on nor dropped, by uid, in their order; asynchronous modes only."""
    kl_coef: float | None = None
    """Weight that the next step's KL has in the reward; None in a run without one."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Those that decide the run; see ``rpcrl.trainer.resume``."""
    format: int = FORMAT


def read_manifest(directory: Path) -> Manifest:
    """Read a checkpoint's manifest and compare the sizes of all its files; the ranks compare the hashes.

    Raises CheckpointError when it is no checkpoint, is of another format, or a file is missing or cut short.
    """
    path = directory / MANIFEST
    if not path.is_file():
        raise CheckpointError(
            f"{directory} is not a checkpoint: it has no {MANIFEST}. Name a directory like RUN_DIR/checkpoints/"
            "global_step_N"
        )
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["format"] != FORMAT:
            raise CheckpointError(f"{path} has format {content['format']}, this version of rpcrl reads format {FORMAT}")
        manifest = Manifest(**content)
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} cannot be read as a manifest: {error}") from error
    for entries in manifest.ranks.values():
        for entry in entries:
            verify_files(directory, entry["files"], hashes=False)
    return manifest


def check_world(manifest: Manifest, world: Mapping[str, int], *, directory: Path) -> None:
    """Raise CheckpointError unless the checkpoint holds every role; warn where its number of ranks is another one."""
    for role, ranks in world.items():
        saved = manifest.world.get(role)
        if saved is None:
            raise CheckpointError(f"{directory} holds no state of role {role!r}, only of {sorted(manifest.world)}")
        if saved != ranks:
            log.warning(
                "%s was written by %d ranks of role %r, this run has %d: weights and optimizer state are the same, but "
                "sums over the ranks round differently, so the run is not the uninterrupted one bit for bit",
                directory,
                saved,
                role,
                ranks,
            )


class CheckpointStore:
    """The checkpoints of one run; ``keep`` is how many stay (None: all)."""

    def __init__(self, directory: Path, *, keep: int | None = None) -> None:
        if keep is not None and keep < 1:
            raise CheckpointError(f"trainer.max_actor_ckpt_to_keep={keep} must be 1 or more, or null to keep all")
        self.directory = directory
        self._keep = keep

    def steps(self) -> list[int]:
        """Return the steps that have a complete checkpoint, oldest first."""
        if not self.directory.is_dir():
            return []
        found = (
            int(match[1])
            for entry in self.directory.iterdir()
            if (match := _NAME.fullmatch(entry.name)) and (entry / MANIFEST).is_file()
        )
        return sorted(found)

    def path(self, step: int) -> Path:
        """Return where the checkpoint of ``step`` lies, or would lie."""
        return self.directory / f"global_step_{step}"

    def latest(self) -> Path | None:
        """Return the last checkpoint: the one that the pointer names, else the highest complete one."""
        steps = self.steps()
        if not steps:
            return None
        pointer = self.directory / POINTER
        if pointer.is_file():
            text = pointer.read_text(encoding="utf-8").strip()
            if text.isdecimal() and int(text) in steps:
                return self.path(int(text))
            log.warning("%s names step %r, which is not there; taking step %d", pointer, text, steps[-1])
        return self.path(steps[-1])

    def begin(self, step: int) -> Path:
        """Make the hidden directory for the checkpoint of ``step`` and return it; leftovers of a kill are removed."""
        self.directory.mkdir(parents=True, exist_ok=True)
        for leftover in self.directory.glob(".global_step_*"):
            shutil.rmtree(leftover)
        partial = self.directory / f".global_step_{step}.partial"
        partial.mkdir()
        return partial

    def publish(self, manifest: Manifest) -> Path:
        """Make the checkpoint that ``begin`` started the current one, drop the oldest ones, and return its path.

        A kill before the rename leaves the earlier checkpoints as they were; after it, the new one is whole.
        """
        partial = self.directory / f".global_step_{manifest.step}.partial"
        write_atomically(partial / MANIFEST, json.dumps(asdict(manifest), indent=1) + "\n")
        for directory in [partial, *(entry for entry in partial.rglob("*") if entry.is_dir())]:
            sync_directory(directory)
        target = self.path(manifest.step)
        if target.exists():
            # a run that was resumed from an earlier step writes this step again
            replaced = self.directory / f".global_step_{manifest.step}.replaced"
            target.rename(replaced)
            partial.rename(target)
            shutil.rmtree(replaced)
        else:
            partial.rename(target)
        sync_directory(self.directory)
        write_atomically(self.directory / POINTER, f"{manifest.step}\n")
        self._drop_old(manifest.step)
        return target

    def _drop_old(self, current: int) -> None:
        if self._keep is None:
            return
        # steps beyond this one belong to a future that a resumed run has left: they go first
        others = [step for step in self.steps() if step != current]
        older = sorted(others, key=lambda step: (step < current, step))
        for step in older[: max(0, len(older) - (self._keep - 1))]:
            # renamed first: a kill in the middle of the removal must not leave half a checkpoint under a whole name
            hidden = self.directory / f".global_step_{step}.dropped"
            self.path(step).rename(hidden)
            shutil.rmtree(hidden)
