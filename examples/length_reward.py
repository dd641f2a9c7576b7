"""How is a reward function of one's own written? A plain function in a file of one's own.

``rpcrl launch reward.fn=examples/length_reward.py:score`` pays for answers of one length: the default job then forgets
how to sort and learns to write that many words. ``reward.reward_kwargs.target_words=3`` sets the length.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rpcrl.rewards import batch_reward


def score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any],
    *,
    target_words: int = 4,
) -> dict[str, float]:
    """Return 1 for an answer of exactly ``target_words`` words, less for every word more or fewer.

    A number would do; each further field of a dict becomes a column of the batch and a metric.
    """
    words = len(solution_str.split())
    return {"score": 1.0 / (1.0 + abs(words - target_words)), "num_words": float(words)}


@batch_reward
def shortest_half(
    data_sources: list[str],
    solution_strs: list[str],
    ground_truths: list[Any],
    extra_infos: list[Mapping[str, Any]],
) -> list[float]:
    """Return 1 for the shorter half of the answers: a reward that has to see the others needs ``@batch_reward``."""
    lengths = [len(text.split()) for text in solution_strs]
    middle = sorted(lengths)[len(lengths) // 2]
    return [float(length < middle) for length in lengths]
