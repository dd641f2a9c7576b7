"""Which prompt is sampled next, when they are not drawn a batch at a time?"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rpcrl.batch.data_proto import DataProto
    from rpcrl.trainer.data import PromptLoader

__all__ = ["PromptQueue"]


class PromptQueue:
    """Single prompts in the loader's order; those that a resumed run has yet to sample go first."""

    def __init__(self, loader: PromptLoader, *, first: Sequence[str] = ()) -> None:
        """``first`` are uids of prompts that were drawn from the loader before and not trained on."""
        self._loader = loader
        self._drawn: deque[DataProto] = deque(loader.prompts(first).split(1) if first else ())

    @property
    def drawn(self) -> list[str]:
        """Prompts that the loader has given and ``next`` has not, by uid."""
        return [str(prompt.non_tensor_batch["uid"][0]) for prompt in self._drawn]

    def next(self) -> DataProto:
        """Return the next prompt, a batch of one row."""
        if not self._drawn:
            self._drawn.extend(self._loader.next_batch().split(1))
        return self._drawn.popleft()
