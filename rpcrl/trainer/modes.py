"""Which trainer runs which mode?"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rpcrl.errors import UsageError

if TYPE_CHECKING:
    from rpcrl.trainer.base import Trainer

__all__ = ["trainer_of"]


def trainer_of(mode: str) -> type[Trainer]:
    """Return the trainer class of ``trainer.mode``. Raises UsageError for a mode that this version does not run."""
    from rpcrl.trainer.asynchronous import ColocateAsyncTrainer, SeparateAsyncTrainer
    from rpcrl.trainer.colocate import ColocateTrainer
    from rpcrl.trainer.separate import SeparateTrainer

    modes: tuple[type[Trainer], ...] = (ColocateTrainer, SeparateTrainer, ColocateAsyncTrainer, SeparateAsyncTrainer)
    trainers = {trainer.mode: trainer for trainer in modes}
    if mode not in trainers:
        raise UsageError(f"this version trains in the modes {', '.join(trainers)}, not in {mode!r}")
    return trainers[mode]
