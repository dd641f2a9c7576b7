"""What do actor and critic have in common? A model that is trained, saved, restored and exported."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from rpcrl.dispatch.mode import Dispatch
from rpcrl.dispatch.register import register
from rpcrl.engines.shard_files import describe_files, verify_files
from rpcrl.errors import BatchError, CheckpointError
from rpcrl.runtime.worker import Worker

if TYPE_CHECKING:
    from rpcrl.batch.data_proto import DataProto
    from rpcrl.engines.sharded import Sharded
    from rpcrl.roles.passes import Pass

__all__ = ["LearnerWorker"]

RANDOM_STATE = "random_state.safetensors"


class LearnerWorker(Worker):
    """One dp rank of a model that is trained; a subclass makes ``_engine`` and ``_loss``."""

    role: ClassVar[str] = ""
    """Its name in checkpoints."""
    _engine: Sharded
    _loss: Any
    _pass: Pass

    def _begin(self, seed: int) -> None:
        """Seed torch and, with several ranks, join their process group; call it before the engine is made."""
        import torch

        torch.manual_seed(seed)
        if self.world_size > 1:
            self.init_process_group()

    def _update(self, batch: DataProto) -> list[dict[str, float]]:
        """Make the optimizer steps of a batch, one a mini-batch and epoch; returns this rank's figures of each.

        meta_info: ``lr``; ``num_mini_batches`` (default 1), equal runs of rows in their order; ``ppo_epochs``
        (default 1). Raises BatchError, with nothing trained, when the rows do not divide into the mini-batches.
        """
        facts = batch.meta_info
        count, epochs, lr = int(facts.get("num_mini_batches", 1)), int(facts.get("ppo_epochs", 1)), float(facts["lr"])
        if count < 1 or len(batch) % count:
            raise BatchError(f"rank {self.rank} got {len(batch)} rows, which do not make {count} equal mini-batches")
        figures: list[dict[str, float]] = []
        for _ in range(epochs):
            for mini_batch in batch.chunk(count):
                made = self._engine.train_mini_batch(mini_batch, self._loss, **self._pass, lr=lr)
                figures.append({name: float(value) for name, value in made.items()})
        return figures

    @register(Dispatch.ONE_TO_ALL)
    def save_checkpoint(self, directory: str) -> dict[str, Any]:
        """Write this rank's shards and random state below ``directory``; returns its entry of the manifest.

        The files are flushed to the disk and listed with their hashes when it returns.
        """
        import torch
        from safetensors.torch import save_file

        root = Path(directory)
        own = root / self.role / f"rank_{self.rank}"
        own.mkdir(parents=True)
        engine: dict[str, Any] = dict(self._engine.save(own))
        save_file({"torch_cpu": torch.get_rng_state()}, own / RANDOM_STATE)
        files = {f"{self.role}/rank_{self.rank}/{name}": file for name, file in engine["files"].items()}
        return {"rank": self.rank, "engine": engine, "files": {**files, **describe_files(root, [own / RANDOM_STATE])}}

    @register(Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, directory: str, entries: Sequence[Mapping[str, Any]]) -> int:
        """Restore what ``save_checkpoint`` wrote, after comparing the hashes; returns the engine's weight version.

        ``entries`` are those of all ranks that wrote it. Another number of ranks, or another strategy, loads the
        same weights and optimizer state; the random state comes back only to a rank that was there.
        Raises CheckpointError, with nothing loaded, when a file differs or there is no entry.
        """
        import torch
        from safetensors.torch import load_file

        ranks = {entry["rank"]: entry for entry in entries}
        if sorted(ranks) != list(range(len(entries))) or not entries:
            raise CheckpointError(f"{directory} has entries for {self.role} ranks {sorted(ranks)}, not for all of them")
        folders = {rank: Path(directory) / self.role / f"rank_{rank}" for rank in ranks}
        entry = ranks.get(self.rank)
        random_state = folders.get(self.rank, Path()) / RANDOM_STATE
        if entry is not None:
            name = f"{self.role}/rank_{self.rank}/{RANDOM_STATE}"
            verify_files(Path(directory), {name: entry["files"][name]})
        if entry is not None and len(entries) == self.world_size and self._engine.fits(entry["engine"]):
            self._engine.load(folders[self.rank], entry["engine"])
        else:
            from rpcrl.engines.shards import SavedRank

            self._engine.load_resharded([SavedRank(folders[rank], ranks[rank]["engine"]) for rank in sorted(ranks)])
        if entry is not None:
            torch.set_rng_state(load_file(random_state)["torch_cpu"])
        return self._engine.weight_version

    @register(Dispatch.ONE_TO_ALL)
    def export_model(self, directory: str) -> None:
        """Write a Hugging Face checkpoint (collective; rank 0 writes)."""
        self._engine.export(Path(directory))
