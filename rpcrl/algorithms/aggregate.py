"""How do losses of tokens become the loss of a mini-batch, whatever it was cut into?

A mini-batch is spread over dp ranks and, on each, over micro-batches. Every part divides by the counts of the
*whole* mini-batch (``BatchCounts``) and multiplies by ``dp_size``, because data parallelism averages gradients over
ranks: the sum over micro-batches, averaged over ranks, is then the loss of the mini-batch computed in one piece.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from rpcrl.algorithms.masked import masked_mean, masked_sum
from rpcrl.errors import UsageError

__all__ = ["LOSS_AGG_MODES", "BatchCounts", "agg_loss"]

LOSS_AGG_MODES = (
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-sum-norm",
    "seq-mean-token-mean",
)


@dataclass(frozen=True)
class BatchCounts:
    """What a mini-batch holds over all dp ranks; the same on every rank."""

    batch_num_tokens: int
    """Response tokens that count (mask 1)."""
    global_batch_size: int
    """Sequences with at least one such token."""
    dp_size: int = 1

    def __post_init__(self) -> None:
        if self.batch_num_tokens < 0 or self.global_batch_size < 0 or self.dp_size < 1:
            raise UsageError(
                f"BatchCounts(batch_num_tokens={self.batch_num_tokens}, global_batch_size={self.global_batch_size}, "
                f"dp_size={self.dp_size}): counts must be 0 or more and dp_size 1 or more"
            )

    @classmethod
    def of(cls, response_mask: Tensor, *, dp_size: int = 1) -> BatchCounts:
        """Count a whole mini-batch's ``response_mask`` ``[N, R]`` (all ranks' rows)."""
        selected = response_mask.bool()
        return cls(int(selected.sum()), int(selected.any(-1).sum()), dp_size)

    @classmethod
    def from_meta_info(cls, meta_info: Mapping[str, object]) -> BatchCounts:
        """Read ``batch_num_tokens``, ``global_batch_size`` and ``dp_size`` of a micro-batch.

        Raises UsageError naming the missing ones: a guess from the micro-batch alone would depend on how the
        mini-batch was cut.
        """
        names = ("batch_num_tokens", "global_batch_size", "dp_size")
        missing = [name for name in names if name not in meta_info]
        if missing:
            raise UsageError(
                f"the micro-batch's meta_info lacks {', '.join(missing)}: the counts of the whole mini-batch, which "
                "the training engine sets, are needed to normalise its loss"
            )
        return cls(*(int(str(meta_info[name])) for name in names))

    def as_meta_info(self) -> dict[str, int]:
        """Return the three counts under the names that ``from_meta_info`` reads."""
        return {
            "batch_num_tokens": self.batch_num_tokens,
            "global_batch_size": self.global_batch_size,
            "dp_size": self.dp_size,
        }


def agg_loss(
    loss: Tensor,
    mask: Tensor,
    mode: str,
    counts: BatchCounts,
    *,
    loss_scale_factor: float | None = None,
) -> Tensor:
    """Return this part's share (a scalar) of the mini-batch's loss; 0 for a part without tokens.

    ``loss`` and ``mask`` are ``[n, R]``. With T tokens and S sequences in the mini-batch (``counts``), m the mask, l
    the loss and |s| a sequence's unmasked tokens:

    - ``token-mean``: Σ m·l / T (DAPO, Yu et al. 2025);
    - ``token-sum``: Σ m·l;
    - ``seq-mean-token-sum``: Σ_s Σ_t m·l / S;
    - ``seq-mean-token-sum-norm``: the same divided by ``loss_scale_factor``, by default R (Dr. GRPO, Liu et al. 2025);
    - ``seq-mean-token-mean``: Σ_s (Σ_t m·l / |s|) / S (GRPO, Shao et al. 2024).

    Raises UsageError for an unknown mode or a scale factor that is not positive.
    """
    tokens = max(counts.batch_num_tokens, 1)
    sequences = max(counts.global_batch_size, 1)
    if mode == "token-mean":
        return masked_sum(loss, mask) * (counts.dp_size / tokens)
    if mode == "token-sum":
        return masked_sum(loss, mask) * counts.dp_size
    if mode == "seq-mean-token-sum":
        return masked_sum(loss, mask) * (counts.dp_size / sequences)
    if mode == "seq-mean-token-sum-norm":
        factor = float(loss.shape[-1]) if loss_scale_factor is None else loss_scale_factor
        if factor <= 0:
            raise UsageError(f"loss_scale_factor={factor} must be above 0 (or null: the padded response length)")
        return masked_sum(loss, mask) * (counts.dp_size / (sequences * factor))
    if mode == "seq-mean-token-mean":
        return torch.sum(masked_mean(loss, mask, dim=-1)) * (counts.dp_size / sequences)
    raise UsageError(f"loss_agg_mode={mode!r} is not one of {', '.join(LOSS_AGG_MODES)}")
