"""What log-probability and entropy do logits give each token?"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["entropy_from_logits", "log_prob_and_entropy"]


def entropy_from_logits(logits: Tensor) -> Tensor:
    """Return the entropy (nats, float32) of the softmax of ``logits`` ``[..., V]``, in the shape ``[...]``."""
    log_probs = torch.log_softmax(logits.float(), dim=-1)
    return _entropy(log_probs)


def log_prob_and_entropy(
    logits: Tensor, tokens: Tensor, *, temperature: float = 1.0, entropy_gradient: bool = True
) -> tuple[Tensor, Tensor]:
    """Return log-probs of ``tokens`` ``[...]`` and entropies under softmax(logits / temperature), float32.

    ``logits`` is ``[..., V]``. Without ``entropy_gradient`` the entropy is for looking at only.
    """
    scaled = logits.float() if temperature == 1.0 else logits.float() / temperature
    log_probs = torch.log_softmax(scaled, dim=-1)
    chosen = log_probs.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    return chosen, _entropy(log_probs if entropy_gradient else log_probs.detach())


def _entropy(log_probs: Tensor) -> Tensor:
    # A token that was masked out has log-prob -inf and p = 0; 0 * -inf is NaN, its contribution is 0.
    finite = log_probs.masked_fill(log_probs == float("-inf"), 0.0)
    return -(finite * log_probs.exp()).sum(-1)
