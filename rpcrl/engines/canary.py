"""Does the rollout's model say the same as the trainer's? Both score one fixed text after each weight sync.

An engine that kept some of its old weights samples on without a word; its log-probs of a text that never changes give
it away.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from rpcrl.errors import WeightSyncError

__all__ = ["CanaryEngine", "Scorer", "canary_tokens", "check_canary"]

CANARY_TOKENS = 32
STRIDE = 7919
"""A prime: the tokens are spread over the vocabulary."""
MOST_FLOAT32 = 1e-3
"""Largest difference of a log-prob when both models compute in float32; a tenth of it is seen with 135M parameters."""
MOST_ROUNDED = 0.25
"""Largest mean difference when either rounds to 16 bits; up to 0.06 is seen with 135M parameters."""


@runtime_checkable
class CanaryEngine(Protocol):
    """A rollout engine that can be held against the trainer."""

    @property
    def vocabulary(self) -> int:
        """Number of token ids that the model knows."""
        ...

    @property
    def longest(self) -> int:
        """Most tokens of prompt and response together."""
        ...

    def score(self, token_ids: Sequence[int]) -> list[float]:
        """Return the log-prob of each token but the first, given those before it, at temperature 1."""
        ...

    def distrust(self, why: str) -> None:
        """Refuse to sample until the next complete update."""
        ...


class Scorer(Protocol):
    """A trainer that can score a text."""

    def score_tokens(self, token_ids: Sequence[int]) -> list[float]:
        """Return the log-prob of each token but the first, given those before it, at temperature 1 (collective)."""
        ...


def canary_tokens(engine: CanaryEngine) -> list[int]:
    """Return the fixed text for an engine: token ids all over its vocabulary."""
    count = max(min(CANARY_TOKENS, engine.longest - 1), 2)
    return [(STRIDE * (place + 1)) % engine.vocabulary for place in range(count)]


def check_canary(
    engine: CanaryEngine, tokens: Sequence[int], expected: Sequence[float], *, version: int, exact: bool
) -> None:
    """Compare the engine's log-probs with the trainer's; ``exact`` when both compute in float32.

    Raises WeightSyncError when they differ by more than the numbers' precision explains; the engine refuses to sample
    then.
    """
    found = engine.score(tokens)
    gaps = [abs(one - other) for one, other in zip(found, expected, strict=True)]
    gaps = [gap if math.isfinite(gap) else math.inf for gap in gaps]  # max() passes nan by
    largest, mean = max(gaps), sum(gaps) / len(gaps)
    if largest <= MOST_FLOAT32 if exact else mean <= MOST_ROUNDED:
        return
    place = gaps.index(largest)
    bound = f"{MOST_FLOAT32:g} at most in float32" if exact else f"{MOST_ROUNDED:g} in the mean with 16 bits"
    engine.distrust("do not say what the trainer's say (the canary of the last weight sync)")
    raise WeightSyncError(
        f"canary: after the sync of version {version} the rollout's log-probs of a fixed text of {len(tokens)} tokens "
        f"differ from the trainer's by up to {largest:.3g} (token {place + 1}: {found[place]:.4f}, the trainer says "
        f"{expected[place]:.4f}) and {mean:.3g} in the mean; allowed are {bound}. The rollout does not have the "
        "trainer's weights, and refuses to sample with these. If the models are meant to differ, set "
        "rollout.canary=false"
    )
