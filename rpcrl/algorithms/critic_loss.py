"""What exactly does the critic minimise?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from rpcrl.algorithms.aggregate import BatchCounts
from rpcrl.algorithms.losses import value_loss
from rpcrl.errors import BatchError

if TYPE_CHECKING:
    from rpcrl.batch.data_proto import DataProto

__all__ = ["CriticLoss"]


@dataclass(frozen=True)
class CriticLoss:
    """A loss function for a critic's ``train_mini_batch``: PPO's clipped value loss.

    Reads the columns ``values`` (what the critic said when the samples were new), ``returns`` and ``response_mask``.
    """

    cliprange_value: float = 0.5
    loss_agg_mode: str = "token-mean"

    def __call__(self, values: Tensor, batch: DataProto) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the micro-batch's share of loss and metrics; ``values`` is ``[n, R]``."""
        columns = batch.batch
        if columns is None:
            raise BatchError("the critic's loss needs a batch with tensor columns, this one has none")
        loss, metrics = value_loss(
            values,
            columns["values"],
            columns["returns"],
            columns["response_mask"],
            BatchCounts.from_meta_info(batch.meta_info),
            cliprange_value=self.cliprange_value,
            loss_agg_mode=self.loss_agg_mode,
        )
        return loss, {**metrics, "vf_loss": loss.detach()}
