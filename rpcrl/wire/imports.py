"""Which modules may a message name, and how are functions and classes named?

A function or class travels as ``module:qualname``, never as code. Both sides check the run's ``ImportPolicy``: the
sender so that its caller hears of it before anything is sent, the receiver because it trusts no sender. What a path
resolves to must bear that very path, so a module that is allowed cannot be used to reach what it has imported
(``mypackage:os.system``).

The user's script is ``__main__`` on the driver and ``__rpcrl_main__`` in the workers; on the wire it is always
``__rpcrl_main__``.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable
from types import BuiltinFunctionType, FunctionType, ModuleType

from rpcrl.errors import DecodeError, EncodeError

__all__ = ["MAIN", "ImportPolicy", "path_of", "resolve"]

MAIN = "__rpcrl_main__"
"""The user's script on the wire."""

_SAFE_BUILTINS = frozenset({
    "bool", "bytearray", "bytes", "complex", "dict", "float", "frozenset", "int", "list", "object", "range",
    "set", "slice", "str", "tuple", "type", "abs", "all", "any", "divmod", "enumerate", "filter", "len",
    "map", "max", "min", "pow", "repr", "reversed", "round", "sorted", "sum", "zip"
})  # fmt: skip
"""Builtins that every policy allows. Whatever runs code, opens files or reads attributes is not among them."""


class ImportPolicy:
    """The modules whose functions and classes may travel: each prefix with everything below it.

    ``ImportPolicy(["mylib"])`` allows ``mylib`` and ``mylib.rewards``, not ``mylib2``. The user's own script and
    harmless builtins (``int``, ``len``) are always allowed; other builtins never are.
    """

    __slots__ = ("prefixes",)

    def __init__(self, prefixes: Iterable[str] = ("rpcrl",)) -> None:
        self.prefixes = tuple(dict.fromkeys(prefixes))

    def allows(self, module: str) -> bool:
        """Whether functions and classes of ``module`` may travel."""
        if module in (MAIN, "__main__"):
            return True
        parts = module.split(".")
        if parts[0] == "builtins" or parts[-1] == "__main__":
            return False
        return any(module == prefix or module.startswith(prefix + ".") for prefix in self.prefixes)

    def allows_path(self, path: str) -> bool:
        """Whether this ``module:qualname`` may travel."""
        module, _, qualname = path.partition(":")
        return self.allows(module) or (module == "builtins" and qualname in _SAFE_BUILTINS)

    def remedy(self, module: str) -> str:
        """What a user does about a module that is not allowed."""
        allowed = ", ".join(self.prefixes) or "none"
        return f"allow it with Controller(allow_imports=[{module.partition('.')[0]!r}]) (allowed now: {allowed})"

    def __repr__(self) -> str:
        return f"ImportPolicy({list(self.prefixes)!r})"


def path_of(obj: object) -> str:
    """Return ``module:qualname`` of a function or class.

    Raises EncodeError when importing that path would not give ``obj`` back: lambdas, functions and classes made
    inside a function, objects of a script that has no file.
    """
    if not isinstance(obj, (type, FunctionType, BuiltinFunctionType)):
        raise EncodeError(f"{type(obj).__name__} objects have no import path; only functions and classes have one")
    module, qualname = getattr(obj, "__module__", None), obj.__qualname__
    if "<lambda>" in qualname:
        raise EncodeError("a lambda cannot travel: it has no name to import; define it with `def` in a module")
    if "<locals>" in qualname:
        raise EncodeError(
            f"{qualname} is made inside a function and cannot be imported; define it at the top level of a module"
            " (bind values with functools.partial)"
        )
    if not module:
        raise EncodeError(f"{qualname} does not say which module it comes from; wrap it in a function of yours")
    source = sys.modules.get(module)
    if module == "__main__" and getattr(source, "__file__", None) is None:
        raise EncodeError(
            f"{qualname} is defined in code without a file (python -c, standard input or a notebook cell), which a"
            " worker cannot import; put it into a .py file and import it from there"
        )
    if source is None or _attribute(source, qualname) is not obj:
        raise EncodeError(
            f"{module}:{qualname} is not this object: importing that name would give something else;"
            " send an object that its module knows under its own name"
        )
    return f"{MAIN if module == '__main__' else module}:{qualname}"


def resolve(path: str, policy: ImportPolicy) -> object:
    """Import what ``path`` (``module:qualname``) names.

    Raises DecodeError when the policy does not allow it (nothing is imported then) or when it does not exist.
    """
    name, colon, qualname = path.partition(":")
    if not colon or not qualname or not name:
        raise DecodeError(f"{path[:200]!r} is not an import path of the form module:qualname")
    if not policy.allows_path(path):
        raise DecodeError(f"a message names {path[:200]}, which this run does not allow: {policy.remedy(name)}")
    module = _module(name)
    obj = _attribute(module, qualname)
    if not isinstance(obj, (type, FunctionType, BuiltinFunctionType)):
        raise DecodeError(f"{path[:200]} names no function or class in this process")
    home = getattr(obj, "__module__", None)
    if obj.__qualname__ != qualname or home not in (
        name,
        module.__name__,
        "__main__" if name == MAIN else name,
    ):
        raise DecodeError(f"{path[:200]} leads to {home}:{obj.__qualname__}; only its own path may be used")
    return obj


def _module(name: str) -> ModuleType:
    if name in (MAIN, "__main__"):
        loaded = sys.modules.get(MAIN) or sys.modules.get("__main__")
        if loaded is None:
            raise DecodeError("a message names the user's script, which this process has not loaded")
        return loaded
    try:
        return importlib.import_module(name)
    except Exception as error:
        raise DecodeError(f"cannot import {name}, which a message names: {type(error).__name__}: {error}") from error


def _attribute(module: ModuleType, qualname: str) -> object:
    """Follow a dotted name through classes only: through another module's objects it would leave its own module."""
    obj: object = module
    for part in qualname.split("."):
        if obj is not module and not isinstance(obj, type):
            return None
        obj = vars(obj).get(part) if isinstance(obj, ModuleType) else getattr(obj, part, None)
    return obj
