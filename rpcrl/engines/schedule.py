"""Which learning rate does a training step use?"""

from __future__ import annotations

import math

from rpcrl.errors import UsageError

__all__ = ["SCHEDULES", "learning_rate"]

SCHEDULES = ("linear", "constant", "cosine")


def learning_rate(
    step: int,
    *,
    lr: float,
    total_steps: int,
    warmup_steps: int = 0,
    kind: str = "linear",
    min_lr_ratio: float = 0.0,
) -> float:
    """Return the rate of training step ``step`` (0-based, ``0 <= step < total_steps``).

    The first ``warmup_steps`` steps use 1/w, 2/w, … of ``lr``, so that none of them stands still. From the last of
    them on, ``constant`` stays, ``linear`` and ``cosine`` fall towards ``min_lr_ratio · lr``, which they would reach
    at ``total_steps``: the last step still moves. Steps beyond the end keep the final value.
    Raises UsageError for an unknown schedule or a negative step.
    """
    if kind not in SCHEDULES:
        raise UsageError(f"lr_scheduler_type={kind!r} is not one of {', '.join(SCHEDULES)}")
    if step < 0:
        raise UsageError(f"learning_rate(step={step}): steps are counted from 0")
    if step < warmup_steps:
        return lr * (step + 1) / warmup_steps
    if kind == "constant":
        return lr
    progress = min((step - warmup_steps) / max(total_steps - warmup_steps, 1), 1.0)
    remaining = 1.0 - progress if kind == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return lr * (min_lr_ratio + (1.0 - min_lr_ratio) * remaining)
