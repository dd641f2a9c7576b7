"""What may a reward function look like? One of two signatures, and the function itself declares which.

* per row (the default, verl's signature): ``fn(data_source, solution_str, ground_truth, extra_info, **kwargs)``
  returns a number, or a dict with ``score`` and further fields that become columns;
* per batch, declared with ``@batch_reward``: ``fn(data_sources, solution_strs, ground_truths, extra_infos, **kwargs)``
  gets lists and returns a list with one such number or dict per row.

All arguments are passed by name; ``kwargs`` are the configuration's ``reward.reward_kwargs``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

__all__ = ["BATCH_ARGUMENTS", "ROW_ARGUMENTS", "batch_reward", "is_batch_reward"]

ROW_ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")
BATCH_ARGUMENTS = ("data_sources", "solution_strs", "ground_truths", "extra_infos")

_NOTE = "__rpcrl_batch_reward__"
F = TypeVar("F", bound=Callable[..., Any])


def batch_reward(function: F) -> F:
    """Declare that ``function`` scores a whole batch at once; the function itself is left as it is.

    With ``reward.num_workers`` > 1 each worker calls it with its own part of the batch.
    """
    setattr(function, _NOTE, True)
    return function


def is_batch_reward(function: Callable[..., Any]) -> bool:
    """Tell whether ``function`` was declared with ``@batch_reward``."""
    return getattr(function, _NOTE, False) is True
