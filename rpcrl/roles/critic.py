"""What does the critic role do? It tells what each token of a response is worth, and learns from the returns."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from rpcrl.dispatch.mode import Dispatch
from rpcrl.dispatch.register import register
from rpcrl.roles.learner import LearnerWorker
from rpcrl.roles.passes import critic_passes, engine_options

if TYPE_CHECKING:
    from rpcrl.batch.data_proto import DataProto
    from rpcrl.config.run import ActorRolloutRef, Critic

__all__ = ["CriticWorker"]


class CriticWorker(LearnerWorker):
    """One dp rank of the value function; in the actor's process, or in a group of its own.

    What ``config`` leaves open (loss aggregation, batching by tokens) is as the actor's in ``policy``, and so is how
    the model is spread and what it computes in.
    """

    role: ClassVar[str] = "critic"

    def __init__(
        self,
        config: Critic,
        *,
        model_path: str,
        policy: ActorRolloutRef,
        device: str,
        threads: int,
        seed: int,
    ) -> None:
        super().__init__()
        from rpcrl.algorithms.critic_loss import CriticLoss
        from rpcrl.engines.critic import FsdpCritic

        self._begin(seed)
        self._pass, self._forward_pass = critic_passes(config, policy.actor)
        self._loss = CriticLoss(config.cliprange_value, config.loss_agg_mode or policy.actor.loss_agg_mode)
        self._critic = FsdpCritic(
            model_path,
            device=device,
            betas=config.optim.betas,
            weight_decay=config.optim.weight_decay,
            grad_clip=config.grad_clip,
            packed=config.model.use_remove_padding,
            checkpoint_activations=config.model.enable_gradient_checkpointing,
            threads=threads,
            **engine_options(policy),
        )
        self._engine = self._critic

    @register(Dispatch.DP_COMPUTE_PROTO)
    def compute_values(self, batch: DataProto) -> DataProto:
        """Return ``values`` [N, R] float32: what is expected before each response token, under the current weights."""
        from rpcrl.batch.data_proto import DataProto

        values = self._critic.compute_values(batch, **self._forward_pass)
        return DataProto.from_dict(tensors={"values": values})

    @register(Dispatch.DP_COMPUTE_METRIC, uneven="error")
    def update_critic(self, batch: DataProto) -> list[dict[str, float]]:
        """Make one optimizer step a mini-batch and epoch; returns this rank's figures of each.

        Reads ``values`` and ``returns``; meta_info as that of ``update_actor``.
        """
        return self._update(batch)
