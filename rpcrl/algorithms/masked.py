"""What are the sum, mean, variance and whitening of values of which only some count?

Values and masks have the same shape, usually ``[N, R]``; a mask is bool or 0/1 of any dtype. What is masked out
never enters a result, not even when it is NaN or infinite, and an empty mask gives zeros, not NaN.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["keep", "masked_mean", "masked_sum", "masked_var", "masked_whiten"]

WHITEN_EPSILON = 1e-8


def keep(values: Tensor, mask: Tensor) -> Tensor:
    """Return ``values`` with zeros where ``mask`` is 0; no gradient flows into those places."""
    return torch.where(mask.bool(), values, torch.zeros((), dtype=values.dtype, device=values.device))


def masked_sum(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Return the sum over the unmasked values, over everything or over ``dim``."""
    kept = keep(values, mask)
    return kept.sum() if dim is None else kept.sum(dim)


def masked_mean(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Return the mean over the unmasked values, over everything or over ``dim``; 0 where nothing is unmasked."""
    selected = mask.bool()
    count = selected.sum() if dim is None else selected.sum(dim)
    return masked_sum(values, mask, dim) / count.clamp(min=1).to(values.dtype)


def masked_var(values: Tensor, mask: Tensor) -> Tensor:
    """Return the unbiased variance (N − 1) of the unmasked values; 0 for fewer than two."""
    deviation = values - masked_mean(values, mask)
    count = mask.bool().sum()
    return masked_sum(deviation.square(), mask) / (count - 1).clamp(min=1).to(values.dtype)


def masked_whiten(values: Tensor, mask: Tensor, *, shift_mean: bool = True) -> Tensor:
    """Return the unmasked values with variance 1 and, with ``shift_mean``, mean 0; zeros elsewhere.

    Without ``shift_mean`` the mean stays what it was (the whitening of Ziegler et al. 2019, "Fine-Tuning Language
    Models from Human Preferences", applied to rewards).
    """
    mean = masked_mean(values, mask)
    whitened = (values - mean) * torch.rsqrt(masked_var(values, mask) + WHITEN_EPSILON)
    if not shift_mean:
        whitened = whitened + mean
    return keep(whitened, mask)
