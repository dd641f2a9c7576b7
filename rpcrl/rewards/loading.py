"""Which function does ``reward.fn`` name, and can it be called as a reward? Checked before it is used.

Whatever is wrong is raised as a ConfigError on ``reward.fn`` or ``reward.reward_kwargs``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rpcrl.config.functions import absolute_path, function_error, load_function
from rpcrl.rewards.signature import BATCH_ARGUMENTS, ROW_ARGUMENTS, is_batch_reward

__all__ = ["RewardFunction", "load_reward", "resolve_reward"]

KEY = "reward.fn"


@dataclass(frozen=True)
class RewardFunction:
    """A loaded reward function with its fixed keyword arguments."""

    path: str
    """As ``load_reward`` takes it."""
    function: Callable[..., Any]
    per_batch: bool
    """It takes lists and returns a list; see ``rpcrl.rewards.signature``."""
    kwargs: Mapping[str, Any]


def resolve_reward(path: str, *, base: Path | None = None) -> str:
    """Return ``path`` with a file made absolute (from ``base``, or the current folder), for another process to load."""
    return absolute_path(path, key=KEY, base=base)


def load_reward(path: str, kwargs: Mapping[str, Any] | None = None) -> RewardFunction:
    """Return the reward function that ``path`` names, bound to ``kwargs``.

    Raises ConfigError when the file, module or function is missing (with the nearest name), when importing it fails,
    or when the function cannot be called with the reward's arguments and ``kwargs``.
    """
    kwargs = dict(kwargs or {})
    function = load_function(path, key=KEY)
    per_batch = is_batch_reward(function)
    _check_signature(path, function, per_batch, kwargs)
    return RewardFunction(path, function, per_batch, kwargs)


def _check_signature(path: str, function: Any, per_batch: bool, kwargs: Mapping[str, Any]) -> None:
    expected = BATCH_ARGUMENTS if per_batch else ROW_ARGUMENTS
    taken = sorted(set(kwargs) & set(expected))
    if taken:
        problem = f"{', '.join(taken)} is given by rpcrl itself"
        raise function_error("reward.reward_kwargs", problem, "rename it")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a builtin without a signature: the first call will tell
        return
    try:
        signature.bind(**dict.fromkeys(expected), **kwargs)
    except TypeError as error:
        kind = "per batch (declared with @batch_reward)" if per_batch else "per row"
        shown = ", ".join([*expected, *kwargs])
        remedies = [f"take the arguments ({shown}) by these names; **kwargs takes the rest"]
        if not per_batch and set(BATCH_ARGUMENTS) <= set(signature.parameters):
            remedies.insert(0, "declare it with @batch_reward (from rpcrl.rewards) if it scores a whole batch")
        problem = f"{path}{signature} cannot be called {kind} with {shown}: {error}"
        raise function_error(KEY, problem, *remedies) from error
