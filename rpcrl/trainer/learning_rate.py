"""Which learning rate does a step use? All optimizer steps of one trainer step share it, as in verl."""

from __future__ import annotations

from rpcrl.errors import UsageError

__all__ = ["SCHEDULES", "learning_rate"]

SCHEDULES = ("linear", "constant")


def learning_rate(step: int, *, total_steps: int, peak: float, warmup_steps: int, schedule: str) -> float:
    """Return the rate of trainer step ``step`` (1 … ``total_steps``).

    Warm-up rises in equal parts and reaches ``peak`` at step ``warmup_steps``. After it, ``linear`` falls so that it
    would be 0 one step after the last; ``constant`` stays. Raises UsageError for an unknown schedule.
    """
    if schedule not in SCHEDULES:
        raise UsageError(f"lr_scheduler_type={schedule!r} is not one of {', '.join(SCHEDULES)}")
    if step <= warmup_steps:
        return peak * step / warmup_steps
    if schedule == "constant":
        return peak
    return peak * max(0, total_steps + 1 - step) / max(1, total_steps - warmup_steps)
