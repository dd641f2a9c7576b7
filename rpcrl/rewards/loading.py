"""Which function does ``reward.fn`` name? ``file.py:name`` or ``package.module:name``, checked before it is used.

Whatever is wrong is raised as a ConfigError on ``reward.fn``, so that it stands beside the other mistakes of a
configuration. A file is loaded once, as a module whose name is derived from its absolute path; it is not put on the
import path, so what it imports must be importable by itself.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from rpcrl.errors import ConfigError, Violation
from rpcrl.rewards.signature import BATCH_ARGUMENTS, ROW_ARGUMENTS, is_batch_reward

__all__ = ["RewardFunction", "load_reward", "resolve_reward"]

KEY = "reward.fn"
_FORM = "write reward.fn=path/to/file.py:function or reward.fn=package.module:function"


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
    target, name = _parts(path)
    if not _is_file(target):
        return path
    return f"{((base or Path.cwd()) / Path(target).expanduser()).resolve()}:{name}"


def load_reward(path: str, kwargs: Mapping[str, Any] | None = None) -> RewardFunction:
    """Return the reward function that ``path`` names, bound to ``kwargs``.

    Raises ConfigError when the file, module or function is missing (with the nearest name), when importing it fails,
    or when the function cannot be called with the reward's arguments and ``kwargs``.
    """
    kwargs = dict(kwargs or {})
    target, name = _parts(path)
    module = _module_of_file(target) if _is_file(target) else _module_by_name(target)
    function: Any = module
    for part in name.split("."):
        function = _attribute(function, part, path)
    if not callable(function):
        raise _error(f"{path} is a {type(function).__name__}, not a function", _FORM)
    if inspect.iscoroutinefunction(function):
        raise _error(f"{path} is an async def; rewards run in processes of their own", "make it a plain def")
    per_batch = is_batch_reward(function)
    _check_signature(path, function, per_batch, kwargs)
    return RewardFunction(path, function, per_batch, kwargs)


def _parts(path: str) -> tuple[str, str]:
    target, separator, name = path.rpartition(":")
    if not separator or not target or not name:
        raise _error(f"{path!r} does not name a function", _FORM)
    return target, name


def _is_file(target: str) -> bool:
    return target.endswith(".py") or "/" in target or "\\" in target


def _module_of_file(target: str) -> ModuleType:
    file = Path(target).expanduser().resolve()
    if not file.is_file():
        near = _nearest(file.name, [other.name for other in file.parent.glob("*.py")])
        raise _error(f"there is no file {file}{near}", "correct the path (a relative one starts at the current folder)")
    digest = hashlib.sha256(str(file).encode()).hexdigest()[:8]
    name = f"rpcrl_reward_{file.stem}_{digest}"
    loaded = sys.modules.get(name)
    if loaded is not None:
        return loaded
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise _error(f"{file} is not a Python file", _FORM)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise _error(f"importing {file} raised {type(error).__name__}: {error}", "mend that file") from error
    return module


def _module_by_name(target: str) -> ModuleType:
    try:
        return importlib.import_module(target)
    except ModuleNotFoundError as error:
        if error.name is not None and (target == error.name or target.startswith(f"{error.name}.")):
            raise _error(
                f"there is no module {target!r} (no {error.name!r} on the import path)",
                f"install it, or name a file: {target.replace('.', '/')}.py:function",
            ) from error
        raise _error(f"importing {target} raised ModuleNotFoundError: {error}", "install what it imports") from error
    except Exception as error:
        raise _error(f"importing {target} raised {type(error).__name__}: {error}", "mend that module") from error


def _attribute(owner: Any, name: str, path: str) -> Any:
    try:
        return getattr(owner, name)
    except AttributeError:
        names = [key for key, value in vars(owner).items() if callable(value) and not key.startswith("_")]
        where = getattr(owner, "__file__", None) or getattr(owner, "__name__", repr(owner))
        raise _error(f"{path}: {where} has no function {name!r}{_nearest(name, names)}", "correct the name") from None


def _check_signature(path: str, function: Any, per_batch: bool, kwargs: Mapping[str, Any]) -> None:
    expected = BATCH_ARGUMENTS if per_batch else ROW_ARGUMENTS
    taken = sorted(set(kwargs) & set(expected))
    if taken:
        raise ConfigError(
            [Violation("reward.reward_kwargs", f"{', '.join(taken)} is given by rpcrl itself", ("rename it",))]
        )
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
        raise _error(f"{path}{signature} cannot be called {kind} with {shown}: {error}", *remedies) from error


def _nearest(name: str, names: list[str]) -> str:
    near = difflib.get_close_matches(name, names, n=1)
    if near:
        return f"; did you mean {near[0]!r}?"
    return f"; there are {', '.join(sorted(names)[:8])}" if names else ""


def _error(problem: str, *remedies: str) -> ConfigError:
    return ConfigError([Violation(KEY, problem, remedies)])
