"""How does a name in a configuration become one of the functions of this package, or one of yours?"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from rpcrl.errors import UsageError

__all__ = ["Registry"]

F = TypeVar("F", bound=Callable[..., object])


class Registry(Generic[F]):
    """Functions of one kind by name; a name is taken once and for all."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._functions: dict[str, F] = {}

    def register(self, name: str) -> Callable[[F], F]:
        """Return a decorator that keeps a function under ``name``.

        Raises UsageError when another function already has the name; the first one stays.
        """

        def keep(function: F) -> F:
            present = self._functions.get(name)
            if present is not None and present is not function:
                raise UsageError(
                    f"the {self.kind} {name!r} is already {present.__module__}.{present.__qualname__}; "
                    f"choose another name for {function.__module__}.{function.__qualname__}"
                )
            self._functions[name] = function
            return function

        return keep

    def __getitem__(self, name: str) -> F:
        """Return the function called ``name``. Raises UsageError naming the known ones and the nearest."""
        if name in self._functions:
            return self._functions[name]
        near = difflib.get_close_matches(name, self._functions, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        known = ", ".join(sorted(self._functions)) or "none"
        raise UsageError(f"unknown {self.kind} {name!r} (known: {known}){hint}")

    def __contains__(self, name: str) -> bool:
        return name in self._functions

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._functions))
