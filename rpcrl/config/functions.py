"""Which function does a setting such as ``reward.fn`` name? ``file.py:name`` or ``package.module:name``.

Whatever is wrong is raised as a ConfigError on the setting's key, so that it stands beside the other mistakes of a
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
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from rpcrl.errors import ConfigError, UsageError, Violation

__all__ = ["absolute_path", "function_error", "load_function", "needed_arguments", "path_of_function"]


def function_error(key: str, problem: str, *remedies: str) -> ConfigError:
    """Return the ConfigError of one mistake of the setting ``key``."""
    return ConfigError([Violation(key, problem, remedies)])


def absolute_path(path: str, *, key: str, base: Path | None = None) -> str:
    """Return ``path`` with a file made absolute (from ``base``, or the current folder), for another process to load."""
    target, name = _parts(path, key)
    if not _is_file(target):
        return path
    return f"{((base or Path.cwd()) / Path(target).expanduser()).resolve()}:{name}"


def load_function(path: str, *, key: str) -> Callable[..., Any]:
    """Return the function that ``path``, the value of the setting ``key``, names.

    Raises ConfigError when the file, module or function is missing (with the nearest name), when importing it fails,
    or when it is no plain function.
    """
    target, name = _parts(path, key)
    module = _module_of_file(target, key) if _is_file(target) else _module_by_name(target, key)
    function: Any = module
    for part in name.split("."):
        function = _attribute(function, part, path, key)
    if not callable(function):
        raise function_error(key, f"{path} is a {type(function).__name__}, not a function", _form(key))
    if inspect.iscoroutinefunction(function):
        raise function_error(
            key, f"{path} is an async def, and it is called as a plain function", "make it a plain def"
        )
    loaded: Callable[..., Any] = function
    return loaded


def path_of_function(function: Callable[..., Any]) -> str:
    """Return the path by which another process finds ``function``; a script's functions by the script's file.

    Raises UsageError for what has no such path: lambdas, functions inside of functions, the interactive prompt.
    """
    module, name = function.__module__, function.__qualname__
    if "<" in name:
        raise UsageError(f"{module}.{name} has no import path: another process finds functions of a module's top level")
    if module != "__main__":
        return f"{module}:{name}"
    file = getattr(sys.modules["__main__"], "__file__", None)
    if file is None:
        raise UsageError(f"{name} was defined at an interactive prompt: write it into a file that workers can load")
    return f"{Path(file).resolve()}:{name}"


def needed_arguments(function: Callable[..., Any]) -> list[str]:
    """Return the names of the arguments without which ``function`` cannot be called."""
    parameters = inspect.signature(function).parameters.values()
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p.name for p in parameters if p.default is inspect.Parameter.empty and p.kind not in variable]


def _form(key: str) -> str:
    return f"write {key}=path/to/file.py:function or {key}=package.module:function"


def _parts(path: str, key: str) -> tuple[str, str]:
    target, separator, name = path.rpartition(":")
    if not separator or not target or not name:
        raise function_error(key, f"{path!r} does not name a function", _form(key))
    return target, name


def _is_file(target: str) -> bool:
    return target.endswith(".py") or "/" in target or "\\" in target


def _module_of_file(target: str, key: str) -> ModuleType:
    file = Path(target).expanduser().resolve()
    if not file.is_file():
        near = _nearest(file.name, [other.name for other in file.parent.glob("*.py")])
        raise function_error(
            key, f"there is no file {file}{near}", "correct the path (a relative one starts at the current folder)"
        )
    digest = hashlib.sha256(str(file).encode()).hexdigest()[:8]
    name = f"rpcrl_file_{file.stem}_{digest}"
    loaded = sys.modules.get(name)
    if loaded is not None:
        return loaded
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise function_error(key, f"{file} is not a Python file", _form(key))
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise function_error(
            key, f"importing {file} raised {type(error).__name__}: {error}", "mend that file"
        ) from error
    return module


def _module_by_name(target: str, key: str) -> ModuleType:
    try:
        return importlib.import_module(target)
    except ModuleNotFoundError as error:
        if error.name is not None and (target == error.name or target.startswith(f"{error.name}.")):
            raise function_error(
                key,
                f"there is no module {target!r} (no {error.name!r} on the import path)",
                f"install it, or name a file: {target.replace('.', '/')}.py:function",
            ) from error
        problem = f"importing {target} raised ModuleNotFoundError: {error}"
        raise function_error(key, problem, "install what it imports") from error
    except Exception as error:
        problem = f"importing {target} raised {type(error).__name__}: {error}"
        raise function_error(key, problem, "mend that module") from error


def _attribute(owner: Any, name: str, path: str, key: str) -> Any:
    try:
        return getattr(owner, name)
    except AttributeError:
        names = [other for other, value in vars(owner).items() if callable(value) and not other.startswith("_")]
        where = getattr(owner, "__file__", None) or getattr(owner, "__name__", repr(owner))
        problem = f"{path}: {where} has no function {name!r}{_nearest(name, names)}"
        raise function_error(key, problem, "correct the name") from None


def _nearest(name: str, names: list[str]) -> str:
    near = difflib.get_close_matches(name, names, n=1)
    if near:
        return f"; did you mean {near[0]!r}?"
    return f"; there are {', '.join(sorted(names)[:8])}" if names else ""
