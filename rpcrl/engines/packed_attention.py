"""How do rows that stand side by side attend each to itself, without a mask over all of them?

Transformers' own way (for attention without flash kernels) is a mask of T × T for a pass of T tokens. Here rows of
about the same length are attended to together, as a padded batch with nothing but causality, and put back: the
memory grows with the tokens. Everything else in the model (projections, norms, the head) sees tokens only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rpcrl.errors import UsageError

__all__ = ["NAME", "RowBlocks", "use_row_blocks"]

NAME = "rpcrl_rows"
"""Under which Transformers knows this attention."""


@dataclass(frozen=True)
class RowBlocks:
    """T packed tokens by rows: the rows of a block are at least half as long as its longest."""

    gather: tuple[Tensor, ...]
    """Of each block, ``[n, L]``: places among the T; behind a row's end, its last token again"""
    kept: tuple[Tensor, ...]
    """Of each block, ``[n · L]``: places in the block that are tokens"""
    back: Tensor
    """``[T]``: places of the T tokens among those that the blocks keep, one block after the other"""

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device) -> RowBlocks:
        """Group rows of so many tokens each, which stand side by side in that order."""
        sizes = torch.tensor(list(lengths), dtype=torch.int64)
        starts = sizes.cumsum(0) - sizes
        gather, kept, order = [], [], []
        left = sizes.argsort(descending=True, stable=True)
        while left.numel():
            longest = int(sizes[left[0]])
            members = left[2 * sizes[left] >= longest]
            left = left[members.numel() :]
            places = torch.arange(longest).expand(members.numel(), longest)
            ends = sizes[members].unsqueeze(1)
            index = starts[members].unsqueeze(1) + torch.minimum(places, ends - 1)
            real = (places < ends).flatten().nonzero().flatten()
            order.append(index.flatten()[real])
            gather.append(index.to(device))
            kept.append(real.to(device))
        return cls(tuple(gather), tuple(kept), torch.cat(order).argsort().to(device))


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    row_blocks: RowBlocks | None = None,
    sliding_window: int | None = None,
    **settings: Any,
) -> tuple[Tensor, None]:
    """Attend within rows; ``query`` ``[1, H, T, D]``, ``key`` and ``value`` alike. Returns ``[1, T, H, D]``.

    Raises UsageError when the model does not hand on what its call was given.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if row_blocks is None or attention_mask is not None:
        raise UsageError(f"{type(module).__name__} did not hand on where the rows of a packed pass are")
    tokens = [tensor[0].transpose(0, 1) for tensor in (query, key, value)]
    found = []
    for index, kept in zip(row_blocks.gather, row_blocks.kept, strict=True):
        rows, longest = index.shape
        block = [
            each.index_select(0, index.flatten()).view(rows, longest, *each.shape[1:]).transpose(1, 2)
            for each in tokens
        ]
        mask = None
        if sliding_window is not None and longest > sliding_window:
            places = torch.arange(longest, device=index.device)
            back = places.unsqueeze(1) - places
            mask = ((back >= 0) & (back < sliding_window)).view(1, 1, longest, longest)
        out, _ = sdpa_attention_forward(module, *block, mask, **settings)
        found.append(out.flatten(0, 1).index_select(0, kept))
    return torch.cat(found).index_select(0, row_blocks.back).unsqueeze(0), None


def use_row_blocks(model: Any) -> bool:
    """Have a model attend by blocks of rows, if its attention is torch's own; says whether it does now.

    Its calls need ``row_blocks`` then. A model with other attention stays as it is.
    """
    from transformers import AttentionInterface

    if getattr(model.config, "_attn_implementation", None) != "sdpa":
        return False
    AttentionInterface.register(NAME, attend)
    try:
        model.set_attn_implementation(NAME)
    except (ValueError, AttributeError):
        return False
    return True
