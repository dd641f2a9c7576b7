"""How do trainer and rollout work on devices of their own, one after the other? The synchronous separate mode.

The steps are those of ``colocate``, in the same order. What differs: the rollout has a pool of its own, so it does not
sleep while the trainer works, and new weights cross from one pool to the other. It checks the asynchronous modes: with
the same numbers of ranks it makes the same weights as ``colocate``, bit for bit.
"""

from __future__ import annotations

from typing import ClassVar

from rpcrl.trainer.colocate import ColocateTrainer

__all__ = ["SeparateTrainer"]


class SeparateTrainer(ColocateTrainer):
    """Two pools without overlap: ``groups.sync`` brings the weights from one to the other at the end of each step."""

    mode: ClassVar[str] = "separate"

    def after_sampling(self) -> None:
        """Leave the rollout as it is: nobody else wants its devices."""
