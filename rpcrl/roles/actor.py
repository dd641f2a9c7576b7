"""What does the actor role do? It trains the policy, and keeps, exports and lends its weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

from rpcrl.dispatch.mode import Dispatch
from rpcrl.dispatch.register import register
from rpcrl.errors import UsageError
from rpcrl.roles.learner import LearnerWorker
from rpcrl.roles.passes import actor_pass, engine_options, log_prob_pass
from rpcrl.roles.weight_sync import WeightSender

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


class ActorWorker(LearnerWorker, WeightSender):
    """One dp rank of the policy that is trained."""

    role: ClassVar[str] = "actor"

    def __init__(self, config: ActorRolloutRef, *, model_path: str, device: str, threads: int, seed: int) -> None:
        super().__init__()
        from rpcrl.engines.fsdp import FsdpEngine

        self._begin(seed)
        self.sync_backend = config.rollout.checkpoint_engine.backend
        self.sync_timeout_s = config.rollout.checkpoint_engine.update_weights_timeout_s
        self._pass = actor_pass(config.actor)
        self._score_pass = log_prob_pass(config.rollout, config.actor)
        self._loss = actor_loss(config.actor)
        self._policy = FsdpEngine(
            model_path,
            device=device,
            betas=config.actor.optim.betas,
            weight_decay=config.actor.optim.weight_decay,
            grad_clip=config.actor.grad_clip,
            packed=config.model.use_remove_padding,
            checkpoint_activations=config.model.enable_gradient_checkpointing,
            threads=threads,
            **engine_options(config),
        )
        self._engine = self._policy
        self._kept: dict[str, Mapping[str, torch.Tensor]] = {}

    @register(Dispatch.DP_COMPUTE_PROTO)
    def compute_log_prob(self, batch: DataProto) -> DataProto:
        """Return ``old_log_probs`` and ``entropys``, each [N, R] float32, under the current weights."""
        from rpcrl.batch.data_proto import DataProto

        log_prob, entropy = self._policy.compute_log_prob(batch, **self._score_pass)
        return DataProto.from_dict(tensors={"old_log_probs": log_prob, "entropys": entropy})

    @register(Dispatch.DP_COMPUTE_METRIC, uneven="error")
    def update_actor(self, batch: DataProto) -> list[dict[str, float]]:
        """Make one optimizer step a mini-batch and epoch; returns this rank's figures of each.

        meta_info: ``lr``, ``num_mini_batches`` (default 1: the batch is one), ``ppo_epochs`` (default 1). This rank's
        rows of the mini-batches stand one after the other; a loss is normalised by the counts of all ranks' rows.
        """
        return self._update(batch)

    def score_tokens(self, token_ids: Sequence[int]) -> list[float]:
        """Return the log-prob of each token but the first, given those before it (collective)."""
        import torch

        from rpcrl.batch.data_proto import DataProto

        ids = torch.tensor([list(token_ids)], dtype=torch.int64)
        row = DataProto.from_dict(
            tensors={"input_ids": ids, "attention_mask": torch.ones_like(ids), "responses": ids[:, 1:].clone()}
        )
        log_prob, _ = self._policy.compute_log_prob(row)
        return [float(value) for value in log_prob[0]]

    @register(Dispatch.ONE_TO_ALL)
    def save_model_to_cpu(self, name: str) -> int:
        """Keep a copy of this rank's part of the weights under ``name``; returns its bytes."""
        self._kept[name] = self._policy.copy_weights()
        return sum(tensor.nbytes for tensor in self._kept[name].values())

    @register(Dispatch.ONE_TO_ALL)
    def restore_model_from_cpu(self, name: str) -> None:
        """Put the weights of ``save_model_to_cpu`` back; what the optimizer knows stays as it is."""
        self._policy.put_weights(self._kept_weights(name))

    @register(Dispatch.ONE_TO_ALL)
    def clear_cpu_model(self, name: str) -> None:
        """Let go of a copy of the weights."""
        self._kept_weights(name)
        del self._kept[name]

    def _kept_weights(self, name: str) -> Mapping[str, torch.Tensor]:
        if name not in self._kept:
            raise UsageError(f"no weights are kept under {name!r}, only under: {', '.join(self._kept) or 'none'}")
        return self._kept[name]

    def weight_buckets(self, bucket_bytes: int) -> Iterator[list[tuple[str, torch.Tensor]]]:
        """Yield the full weights under Hugging Face names (collective), in this process."""
        return self._engine.weights(bucket_bytes=bucket_bytes)

    def sent_buckets(self, bucket_bytes: int) -> Iterator[list[tuple[str, torch.Tensor]]]:
        """Yield the same on rank 0, which sends them, and empty buckets on the others (collective)."""
        return self._policy.sent_weights(bucket_bytes=bucket_bytes)

    def weight_specs(self) -> Sequence[tuple[str, str, Sequence[int]]]:
        """Return name, dtype and whole shape of each of them, in their order."""
        return self._engine.weight_specs()
