"""Which tasks can a configuration name instead of a file? ``data.train_files=sort_digits`` (the default) is one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rpcrl.tasks import sort_digits

__all__ = ["BUILT_IN_TASKS", "BuiltInTask"]


@dataclass(frozen=True)
class BuiltInTask:
    """A task that needs no files: its prompts are computed and its base model is shipped."""

    name: str
    train_row: Callable[[int, int], dict[str, object]]
    """(seed, index) → row; any index ≥ 0, without end."""
    heldout_rows: Callable[[], list[dict[str, object]]]
    reward: str
    """Import path of its reward function, as ``reward.fn`` takes it."""
    max_prompt_tokens: int
    """Longest prompt in tokens of its base model."""
    base_checkpoint: Callable[[], Path]
    """Folder of the model to start from, checked."""
    claim: str
    """What a run of this task shows and what it does not; printed with the result."""


BUILT_IN_TASKS: dict[str, BuiltInTask] = {
    "sort_digits": BuiltInTask(
        name="sort_digits",
        train_row=sort_digits.train_row,
        heldout_rows=sort_digits.heldout_rows,
        reward="rpcrl.tasks.sort_digits:score",
        max_prompt_tokens=sort_digits.MAX_PROMPT_TOKENS,
        base_checkpoint=sort_digits.base_checkpoint,
        claim=sort_digits.CLAIM,
    ),
}
"""By the name that ``data.train_files`` takes."""
