"""Which prompts does the default job train on, and which are held out?

A prompt is ``ascending 5 2 9 1 =`` or ``descending 5 2 9 1 =`` with three to six random digits. Train and held-out
prompts are split by the *multiset* of their digits (``crc32 % 10 == 0`` is held out), so no held-out answer occurs in
training, in whatever order its digits stand there. Digits that are all equal read the same in both directions; they
are left out of both sides.

The 256 held-out prompts are 128 digit strings, each asked once with each word. A policy that ignores the word gives
both the same answer, so it is right on at most one of the two: the best of them scores exactly 0.50.

Everything is a pure function of (seed, index): there is no generator whose state a checkpoint would have to keep.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

__all__ = [
    "DATA_SOURCE",
    "MAX_DIGITS",
    "MAX_PROMPT_TOKENS",
    "MIN_DIGITS",
    "NUM_HELDOUT",
    "WORDS",
    "Prompt",
    "Word",
    "heldout_prompts",
    "heldout_rows",
    "is_heldout",
    "train_prompt",
    "train_row",
]

Word = Literal["ascending", "descending"]

DATA_SOURCE = "sort_digits"
WORDS: tuple[Word, Word] = ("ascending", "descending")
MIN_DIGITS = 3
MAX_DIGITS = 6
MAX_PROMPT_TOKENS = MAX_DIGITS + 2
"""The word, the digits and the equals sign are one token each."""
NUM_HELDOUT = 256
_HELDOUT_ONE_IN = 10
_HELDOUT_STREAM = "sort_digits/heldout"


@dataclass(frozen=True)
class Prompt:
    """One task: a word and the digits it asks to sort."""

    word: Word
    digits: tuple[int, ...]

    @property
    def text(self) -> str:
        """The prompt as the model reads it, e.g. ``ascending 5 2 9 1 =``."""
        return f"{self.word} {_joined(self.digits)} ="

    @property
    def answer(self) -> str:
        """The right answer, e.g. ``1 2 5 9``."""
        return self.sorted_digits(descending=self.word == "descending")

    def sorted_digits(self, *, descending: bool) -> str:
        """Return the digits sorted in the given direction, whatever the word says."""
        return _joined(tuple(sorted(self.digits, reverse=descending)))

    def row(self, *, split: str, index: int) -> dict[str, object]:
        """Return the prompt as one row of a data set, in verl's format."""
        return {
            "data_source": DATA_SOURCE,
            "prompt": [{"role": "user", "content": self.text}],
            "reward_model": {"style": "rule", "ground_truth": self.answer},
            "extra_info": {"index": index, "split": split, "word": self.word},
        }


def is_heldout(digits: tuple[int, ...]) -> bool:
    """Tell whether this multiset of digits belongs to the held-out side; the order does not matter."""
    return zlib.crc32(_joined(tuple(sorted(digits))).encode()) % _HELDOUT_ONE_IN == 0


def train_prompt(seed: int, index: int) -> Prompt:
    """Return training prompt ``index`` (0, 1, 2, … without end) of the stream ``seed``."""
    for word, digits in _draws(f"sort_digits/train/{seed}/{index}"):
        if not is_heldout(digits):
            return Prompt(word, digits)
    raise AssertionError("the stream of draws has no end")


def train_row(seed: int, index: int) -> dict[str, object]:
    """Return training prompt ``index`` of the stream ``seed`` as a row of a data set."""
    return train_prompt(seed, index).row(split="train", index=index)


@lru_cache(maxsize=1)
def heldout_prompts() -> tuple[Prompt, ...]:
    """Return the 256 held-out prompts: neighbours 2k and 2k + 1 ask the same digits up and down."""
    chosen: dict[tuple[int, ...], tuple[int, ...]] = {}
    for _, digits in _draws(_HELDOUT_STREAM):
        if is_heldout(digits):
            chosen.setdefault(tuple(sorted(digits)), digits)
        if len(chosen) == NUM_HELDOUT // len(WORDS):
            break
    return tuple(Prompt(word, digits) for digits in chosen.values() for word in WORDS)


def heldout_rows() -> list[dict[str, object]]:
    """Return the 256 held-out prompts as rows of a data set."""
    return [prompt.row(split="test", index=index) for index, prompt in enumerate(heldout_prompts())]


def _draws(stream: str) -> Iterator[tuple[Word, tuple[int, ...]]]:
    """Draw words and digits without end from a named stream; the same on every machine and Python."""
    attempt = 0
    while True:
        # 128 bits against a range of 8e6: the bias of taking remainders is below 1e-31.
        number = int.from_bytes(hashlib.blake2b(f"{stream}/{attempt}".encode(), digest_size=16).digest(), "big")
        attempt += 1
        number, which = divmod(number, len(WORDS))
        number, extra = divmod(number, MAX_DIGITS - MIN_DIGITS + 1)
        drawn = []
        for _ in range(MIN_DIGITS + extra):
            number, digit = divmod(number, 10)
            drawn.append(digit)
        if len(set(drawn)) > 1:
            yield WORDS[which], tuple(drawn)


def _joined(digits: tuple[int, ...]) -> str:
    return " ".join(str(digit) for digit in digits)
