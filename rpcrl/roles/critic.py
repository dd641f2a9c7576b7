"""What does the critic role do? It tells what each token of a response is worth, and learns from the returns."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from rpcrl.dispatch.mode import Dispatch
from rpcrl.dispatch.register import register
from rpcrl.roles.learner import LearnerWorker

if TYPE_CHECKING:
    from rpcrl.batch.data_proto import DataProto
    from rpcrl.config.run import Critic

__all__ = ["CriticWorker"]


class CriticWorker(LearnerWorker):
    """One dp rank of the value function; in the actor's process, or in a group of its own.

    ``loss_agg_mode`` is that of ``config`` or, where it has none, the actor's.
    """

    role: ClassVar[str] = "critic"

    def __init__(
        self,
        config: Critic,
        *,
        model_path: str,
        dtype: str,
        loss_agg_mode: str,
        device: str,
        threads: int,
        seed: int,
    ) -> None:
        super().__init__()
        from rpcrl.algorithms.critic_loss import CriticLoss
        from rpcrl.engines.critic import FsdpCritic

        self._begin(seed)
        self._micro_batch_size = config.ppo_micro_batch_size_per_gpu
        self._forward_micro_batch_size = config.forward_micro_batch_size_per_gpu
        self._loss = CriticLoss(config.cliprange_value, config.loss_agg_mode or loss_agg_mode)
        self._critic = FsdpCritic(
            model_path,
            dtype=dtype,
            device=device,
            betas=config.optim.betas,
            weight_decay=config.optim.weight_decay,
            grad_clip=config.grad_clip,
            threads=threads,
        )
        self._engine = self._critic

    @register(Dispatch.DP_COMPUTE_PROTO)
    def compute_values(self, batch: DataProto) -> DataProto:
        """Return ``values`` [N, R] float32: what is expected before each response token, under the current weights."""
        from rpcrl.batch.data_proto import DataProto

        values = self._critic.compute_values(batch, micro_batch_size=self._forward_micro_batch_size or len(batch))
        return DataProto.from_dict(tensors={"values": values})

    @register(Dispatch.DP_COMPUTE_METRIC, uneven="error")
    def update_critic(self, mini_batch: DataProto) -> dict[str, float]:
        """Make one optimizer step on a mini-batch; returns this rank's figures.

        Reads ``values`` and ``returns``; meta_info: ``lr``.
        """
        return self._update(mini_batch)
