"""What does a request say about how its tokens are drawn? Loads no torch: processes that only ask need none."""

from __future__ import annotations

from dataclasses import dataclass

from rpcrl.errors import UsageError

__all__ = ["SamplingSettings"]


@dataclass(frozen=True)
class SamplingSettings:
    """How to turn logits into a token."""

    do_sample: bool = True
    """False: always the likeliest token."""
    temperature: float = 1.0
    top_k: int = -1
    """Keep the k likeliest tokens; -1 or 0 keeps all."""
    top_p: float = 1.0
    """Keep the likeliest tokens that together reach this probability."""

    def __post_init__(self) -> None:
        if self.do_sample and not self.temperature > 0.0:
            raise UsageError(f"temperature={self.temperature} must be above 0; for greedy decoding set do_sample=False")
        if not 0.0 < self.top_p <= 1.0:
            raise UsageError(f"top_p={self.top_p} must lie in (0, 1]")
        if self.top_k < -1:
            raise UsageError(f"top_k={self.top_k} must be -1 (all tokens) or 1 and more")
