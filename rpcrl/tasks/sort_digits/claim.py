"""What may a run of the default job claim?"""

__all__ = ["CLAIM"]

CLAIM = (
    "What this shows: the base model already sorts digits, but the words 'ascending' and 'descending' mean nothing "
    "to it; which direction belongs to which word it can only learn from the reward. It does not show that a model "
    "learns to sort by reinforcement, and nothing about the speed of large models: this is a toy of 108,352 "
    "parameters made to learn in seconds, on a pinned base that was chosen after looking.\n"
    "How to read the numbers: on the held-out prompts (digit sets that no training prompt has) a policy that "
    "ignores the word is right on at most 0.50, random digits on less than 0.001. The curve stays near 0.5 for "
    "about the first 25 steps, while the words are being found, and rises steeply after them."
)
"""The honest account of the default job, to be printed with its result."""
