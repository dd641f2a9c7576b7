"""What does the actor role do? It trains the policy, and keeps, exports and lends its weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rpcrl.dispatch.mode import Dispatch
from rpcrl.dispatch.register import register
from rpcrl.errors import CheckpointError
from rpcrl.roles.shard_files import describe_files, verify_files
from rpcrl.runtime.worker import Worker

if TYPE_CHECKING:
    import torch

    from rpcrl.algorithms.actor_loss import ActorLoss
    from rpcrl.batch.data_proto import DataProto
    from rpcrl.config.run import Actor, ActorRolloutRef

__all__ = ["ActorWorker", "actor_loss"]


def actor_loss(config: Actor) -> ActorLoss:
    """Return the loss function that the configuration describes."""
    from rpcrl.algorithms.actor_loss import ActorLoss
    from rpcrl.algorithms.losses import PolicyLossSettings

    settings = PolicyLossSettings(
        clip_ratio=config.clip_ratio,
        clip_ratio_low=config.clip_ratio_low,
        clip_ratio_high=config.clip_ratio_high,
        clip_ratio_c=config.clip_ratio_c,
        loss_agg_mode=config.loss_agg_mode,
        loss_scale_factor=config.loss_scale_factor,
    )
    return ActorLoss(
        settings=settings,
        loss_mode=config.policy_loss.loss_mode,
        entropy_coeff=config.entropy_coeff,
        use_kl_loss=config.use_kl_loss,
        kl_loss_coef=config.kl_loss_coef,
        kl_loss_type=config.kl_loss_type,
    )


class ActorWorker(Worker):
    """One dp rank of the policy that is trained."""

    def __init__(self, config: ActorRolloutRef, *, model_path: str, device: str, threads: int, seed: int) -> None:
        super().__init__()
        import torch

        from rpcrl.engines.fsdp import FsdpEngine

        torch.manual_seed(seed)
        if self.world_size > 1:
            self.init_process_group()
        self._micro_batch_size = config.actor.ppo_micro_batch_size_per_gpu
        self._log_prob_micro_batch_size = config.rollout.log_prob_micro_batch_size_per_gpu
        self._loss = actor_loss(config.actor)
        self._engine = FsdpEngine(
            model_path,
            dtype=config.model.dtype,
            device=device,
            betas=config.actor.optim.betas,
            weight_decay=config.actor.optim.weight_decay,
            grad_clip=config.actor.grad_clip,
            threads=threads,
        )

    @register(Dispatch.DP_COMPUTE_PROTO)
    def compute_log_prob(self, batch: DataProto) -> DataProto:
        """Return ``old_log_probs`` and ``entropys``, each [N, R] float32, under the current weights."""
        from rpcrl.batch.data_proto import DataProto

        log_prob, entropy = self._engine.compute_log_prob(
            batch, micro_batch_size=self._log_prob_micro_batch_size or len(batch)
        )
        return DataProto.from_dict(tensors={"old_log_probs": log_prob, "entropys": entropy})

    @register(Dispatch.DP_COMPUTE_METRIC, uneven="error")
    def update_actor(self, mini_batch: DataProto) -> dict[str, float]:
        """Make one optimizer step on a mini-batch; returns this rank's figures.

        meta_info: ``lr``, and the counts of the whole mini-batch (``BatchCounts``), by which the loss is normalised.
        """
        micro = self._micro_batch_size or len(mini_batch)
        figures = self._engine.train_mini_batch(
            mini_batch, self._loss, micro_batch_size=micro, lr=float(mini_batch.meta_info["lr"])
        )
        return {name: float(value) for name, value in figures.items()}

    def weight_buckets(self, bucket_bytes: int) -> Iterator[list[tuple[str, torch.Tensor]]]:
        """Yield the full weights under Hugging Face names (collective), for a rollout in the same process."""
        return self._engine.weights(bucket_bytes=bucket_bytes)

    @register(Dispatch.ONE_TO_ALL)
    def save_checkpoint(self, directory: str) -> dict[str, Any]:
        """Write this rank's shards and random state below ``directory``; returns its entry of the manifest.

        The files are flushed to the disk and listed with their hashes when it returns.
        """
        import torch
        from safetensors.torch import save_file

        root = Path(directory)
        own = root / "actor" / f"rank_{self.rank}"
        own.mkdir(parents=True)
        engine = dict(self._engine.save(own))
        save_file({"torch_cpu": torch.get_rng_state()}, own / "random_state.safetensors")
        files = describe_files(root, (path for path in own.rglob("*") if path.is_file()))
        return {"rank": self.rank, "engine": engine, "files": files}

    @register(Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, directory: str, entries: Sequence[Mapping[str, Any]]) -> int:
        """Restore what ``save_checkpoint`` wrote, after comparing the hashes; returns the engine's weight version.

        Raises CheckpointError, with nothing loaded, when a file differs or this rank has no entry.
        """
        import torch
        from safetensors.torch import load_file

        entry = next((entry for entry in entries if entry["rank"] == self.rank), None)
        if entry is None:
            raise CheckpointError(f"{directory} has no entry for actor rank {self.rank} of {self.world_size}")
        root = Path(directory)
        verify_files(root, entry["files"])
        own = root / "actor" / f"rank_{self.rank}"
        self._engine.load(own, entry["engine"])
        torch.set_rng_state(load_file(own / "random_state.safetensors")["torch_cpu"])
        return self._engine.weight_version

    @register(Dispatch.ONE_TO_ALL)
    def export_model(self, directory: str) -> None:
        """Write a Hugging Face checkpoint (collective; rank 0 writes)."""
        self._engine.export(Path(directory))
