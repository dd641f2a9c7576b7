"""Does a policy learn from the reward, or from a leak? Rewards that must *not* teach it.

``reward.fn=rpcrl.rewards.controls:shuffled reward.reward_kwargs.of=PATH`` pays each response the score of another
one of the batch. The mean over a batch is the true one, so held-out accuracy still reads right; only the credit is
random. The default job's policy is destroyed by it (from 0.50 to 0.13 held out in 100 steps, and its sorting from
1.00 to 0.27), which is what should happen.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from rpcrl.rewards.loading import load_reward
from rpcrl.rewards.scoring import SCORE, score_rows
from rpcrl.rewards.signature import batch_reward

__all__ = ["shuffled"]


@batch_reward
def shuffled(
    data_sources: Sequence[str],
    solution_strs: Sequence[str],
    ground_truths: Sequence[Any],
    extra_infos: Sequence[Mapping[str, Any]],
    *,
    of: str,
    seed: int = 0,
) -> list[float]:
    """Return the scores of the reward function ``of``, permuted over the rows.

    The permutation depends on ``seed`` and on the rows alone, so a resumed run sees the same one. With several reward
    workers each permutes its own part.
    """
    columns = score_rows(
        load_reward(of),
        data_sources=data_sources,
        solution_strs=solution_strs,
        ground_truths=ground_truths,
        extra_infos=extra_infos,
        where="the shuffled control",
    )
    scores = [float(value) for value in columns[SCORE]]
    content = zlib.crc32("\n".join([*solution_strs, *map(repr, ground_truths)]).encode())
    random.Random(f"{seed}/{content}").shuffle(scores)
    return scores
