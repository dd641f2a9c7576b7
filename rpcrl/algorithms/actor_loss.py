"""What exactly does the actor minimise: policy loss, entropy bonus and KL to the reference in one?"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import Tensor

from rpcrl.algorithms.aggregate import BatchCounts, agg_loss
from rpcrl.algorithms.kl import kl_penalty
from rpcrl.algorithms.losses import PolicyLossSettings, get_policy_loss
from rpcrl.errors import BatchError

if TYPE_CHECKING:
    from rpcrl.batch.data_proto import DataProto

__all__ = ["ActorLoss"]


@dataclass(frozen=True)
class ActorLoss:
    """A loss function for ``TrainEngine.train_mini_batch``.

    loss = policy loss − ``entropy_coeff`` · entropy + ``kl_loss_coef`` · KL(π ‖ π_ref), each aggregated alike.
    Reads the columns ``old_log_probs``, ``advantages``, ``response_mask``, with ``use_kl_loss`` ``ref_log_prob``, and,
    where present, ``rollout_is_weights``.
    """

    settings: PolicyLossSettings = field(default_factory=PolicyLossSettings)
    loss_mode: str = "vanilla"
    entropy_coeff: float = 0.0
    use_kl_loss: bool = False
    kl_loss_coef: float = 0.001
    kl_loss_type: str = "low_var_kl"

    @property
    def needs_entropy_gradient(self) -> bool:
        """Whether the engine must build a graph for the entropy (it costs about as much as the log-probs)."""
        return self.entropy_coeff != 0.0

    def __call__(self, log_prob: Tensor, entropy: Tensor, batch: DataProto) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the micro-batch's share of loss and metrics; ``log_prob`` and ``entropy`` are ``[n, R]``."""
        columns = batch.batch
        if columns is None:
            raise BatchError("the actor's loss needs a batch with tensor columns, this one has none")
        mask = columns["response_mask"]
        counts = BatchCounts.from_meta_info(batch.meta_info)
        loss, metrics = get_policy_loss(self.loss_mode)(
            columns["old_log_probs"],
            log_prob,
            columns["advantages"],
            mask,
            self.settings,
            counts,
            columns.get("rollout_is_weights", None),
        )
        metrics = {**metrics, "pg_loss": loss.detach()}
        metrics["entropy"] = agg_loss(entropy.detach(), mask, "token-mean", counts)
        if self.entropy_coeff != 0.0:
            loss = loss - self.entropy_coeff * self._aggregate(entropy, mask, counts)
        if self.use_kl_loss:
            kl = kl_penalty(log_prob, columns["ref_log_prob"], self.kl_loss_type)
            kl_loss = self._aggregate(kl, mask, counts)
            metrics["kl_loss"] = kl_loss.detach()
            loss = loss + self.kl_loss_coef * kl_loss
        return loss, metrics

    def _aggregate(self, values: Tensor, mask: Tensor, counts: BatchCounts) -> Tensor:
        return agg_loss(
            values,
            mask,
            self.settings.loss_agg_mode,
            counts,
            loss_scale_factor=self.settings.loss_scale_factor,
        )
