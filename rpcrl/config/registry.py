"""Which names of functions may a configuration hold, the built-in ones and those of a user?

The built-in functions need torch and register themselves when ``rpcrl.algorithms`` is imported; their names are known
here before, so that a configuration can be checked without it. Loads no torch.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from rpcrl.config.functions import absolute_path, load_function, path_of_function
from rpcrl.errors import UsageError

__all__ = [
    "ADVANTAGES",
    "AGENT_LOOPS",
    "POLICY_LOSSES",
    "Registry",
    "register_advantage",
    "register_agent_loop",
    "register_policy_loss",
]

F = TypeVar("F", bound=Callable[..., Any])


class Registry:
    """Functions of one kind by name; a name is taken once and for all.

    ``key`` is the setting that holds such a name; ``built_in`` are the names that rpcrl brings along.
    """

    def __init__(self, kind: str, key: str, built_in: tuple[str, ...]) -> None:
        self.kind = kind
        self.key = key
        self.built_in = built_in
        self._functions: dict[str, Callable[..., Any]] = {}

    def register(self, name: str) -> Callable[[F], F]:
        """Return a decorator that keeps a function under ``name``.

        Raises UsageError when another function already has the name (the first one stays), or when the name could be
        taken for an import path.
        """
        if not name or ":" in name:
            raise UsageError(f"{name!r} is no name for a {self.kind}: it must not be empty, nor hold a colon")

        def keep(function: F) -> F:
            present = self._functions.get(name)
            if present is not None and not _same(present, function):
                raise UsageError(
                    f"the {self.kind} {name!r} is already {present.__module__}.{present.__qualname__}; "
                    f"choose another name for {function.__module__}.{function.__qualname__}"
                )
            if present is None and name in self.built_in and not function.__module__.startswith("rpcrl."):
                raise UsageError(
                    f"the {self.kind} {name!r} is rpcrl's own; choose another name for "
                    f"{function.__module__}.{function.__qualname__}"
                )
            self._functions[name] = function
            return function

        return keep

    def forget(self, name: str) -> None:
        """Take a name of a user's back; nothing happens if it is not registered."""
        if name not in self.built_in:
            self._functions.pop(name, None)

    def __getitem__(self, name: str) -> Callable[..., Any]:
        """Return the function called ``name``, or the one at an import path such as ``my_module:my_function``.

        Raises UsageError for an unknown name, with the known ones and the nearest, and ConfigError for a path that
        leads nowhere.
        """
        if ":" in name:
            return load_function(name, key=self.key)
        if name in self._functions:
            return self._functions[name]
        raise UsageError(f"unknown {self.kind} {name!r} ({self.known_and_nearest(name)})")

    def known_and_nearest(self, name: str) -> str:
        """Return the known names and the one that is nearest to ``name``, for an error message."""
        near = difflib.get_close_matches(name, list(self), n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        return f"known: {', '.join(self)}, and yours as 'module:function'{hint}"

    def portable(self, name: str) -> str:
        """Return ``name`` as a process that has registered nothing finds it: a user's function by its import path.

        A file's path comes out absolute. Raises UsageError when the function has no import path.
        """
        if ":" in name:
            return absolute_path(name, key=self.key)
        if name in self.built_in or name not in self._functions:
            return name
        return path_of_function(self._functions[name])

    def __contains__(self, name: str) -> bool:
        return name in self.built_in or name in self._functions

    def __iter__(self) -> Iterator[str]:
        return iter(sorted({*self.built_in, *self._functions}))


def _same(one: Callable[..., Any], other: Callable[..., Any]) -> bool:
    """Say whether two functions are the same one, also when its file was loaded twice (as a script and by path)."""
    if one is other:
        return True
    code, again = getattr(one, "__code__", None), getattr(other, "__code__", None)
    if code is None or again is None:
        return False
    return bool((code.co_filename, code.co_firstlineno) == (again.co_filename, again.co_firstlineno))


ADVANTAGES = Registry(
    "advantage estimator",
    "algorithm.adv_estimator",
    ("dr_grpo", "gae", "grpo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "rloo"),
)
AGENT_LOOPS = Registry("agent loop", "actor_rollout_ref.rollout.agent.default_agent_loop", ("single_turn_agent",))
POLICY_LOSSES = Registry("policy loss", "actor_rollout_ref.actor.policy_loss.loss_mode", ("vanilla",))


def register_advantage(name: str) -> Callable[[F], F]:
    """Return a decorator that makes a function an advantage estimator: ``algorithm.adv_estimator=<name>``.

    The function runs on the driver. It is called with the keyword arguments that its signature names
    (``rpcrl.algorithms.advantages`` lists them) and returns ``(advantages, returns)``, both ``[N, R]``.
    Raises UsageError when the name is taken.
    """
    return ADVANTAGES.register(name)


def register_policy_loss(name: str) -> Callable[[F], F]:
    """Return a decorator that makes a function a policy loss: ``actor.policy_loss.loss_mode=<name>``.

    The function runs on the actor's workers, which find it by its import path. It is called as
    ``rpcrl.algorithms.losses.policy_loss`` is. Raises UsageError when the name is taken.
    """
    return POLICY_LOSSES.register(name)


def register_agent_loop(name: str) -> Callable[[F], F]:
    """Return a decorator that makes a class an agent loop: ``rollout.agent.default_agent_loop=<name>``.

    The class inherits from ``rpcrl.AgentLoop``. It runs in the agent-loop workers, which find it by its import path.
    Raises UsageError when the name is taken.
    """
    return AGENT_LOOPS.register(name)
