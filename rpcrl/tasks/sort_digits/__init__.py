"""What is the default job? Sorting a few digits in the direction that a word asks for; see ``CLAIM``.

``rpcrl.tasks.sort_digits:score`` is its reward, ``:score_swapped`` a control that pays for the opposite direction.
"""

from rpcrl.tasks.sort_digits.checkpoint import BASE_DIR, base_checkpoint
from rpcrl.tasks.sort_digits.claim import CLAIM
from rpcrl.tasks.sort_digits.prompts import (
    DATA_SOURCE,
    MAX_PROMPT_TOKENS,
    NUM_HELDOUT,
    Prompt,
    heldout_prompts,
    heldout_rows,
    is_heldout,
    train_prompt,
    train_row,
)
from rpcrl.tasks.sort_digits.rewards import score, score_swapped

__all__ = [
    "BASE_DIR",
    "CLAIM",
    "DATA_SOURCE",
    "MAX_PROMPT_TOKENS",
    "NUM_HELDOUT",
    "Prompt",
    "base_checkpoint",
    "heldout_prompts",
    "heldout_rows",
    "is_heldout",
    "score",
    "score_swapped",
    "train_prompt",
    "train_row",
]
