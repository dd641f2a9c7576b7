"""How does a worker get at classes and functions that the driver defined in its ``__main__``?

The driver describes its main module; a worker loads that file (or module, under ``python -m``) once under the name
``__rpcrl_main__``, so that ``if __name__ == "__main__":`` is false there. On the wire the module is always called
``__rpcrl_main__``.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from rpcrl.errors import UsageError
from rpcrl.wire.imports import MAIN

__all__ = ["class_path", "describe_main", "find_class", "load_main"]


def describe_main() -> dict[str, Any]:
    """Return how to find the driver's main module, and the driver's import path."""
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    path = getattr(main, "__file__", None)
    return {
        "module": spec.name if spec is not None else None,
        "file": str(Path(path).resolve()) if path and Path(path).exists() else None,
        "sys_path": [entry or str(Path.cwd()) for entry in sys.path],
    }


def class_path(kind: type) -> str:
    """Return ``module:qualname`` of a worker class.

    Raises UsageError for a class that no other process can find: a local one, or one of ``python -c``, standard
    input or a notebook cell.
    """
    module, name = kind.__module__, kind.__qualname__
    if "<locals>" in name:
        raise UsageError(
            f"worker class {name} is defined inside a function, so that a worker process cannot import it; move it to "
            "the top level of a module"
        )
    if module == "__main__":
        main = describe_main()
        if main["module"] is None and main["file"] is None:
            raise UsageError(
                f"worker class {name} is defined in an interactive session (python -c, standard input or a notebook "
                "cell), which a worker process cannot load; put it into a .py file and import it from there"
            )
        module = MAIN
    return f"{module}:{name}"


def find_class(path: str, main: Mapping[str, Any]) -> type:
    """Return the class of ``module:qualname`` in a worker; loads the driver's main module if it is from there."""
    module_name, _, qualname = path.partition(":")
    if module_name == MAIN and not main:  # in the driver's own process, where it runs as ``__main__``
        module_name = "__main__"
    if module_name == MAIN and MAIN not in sys.modules:
        load_main(main)
    target: Any = sys.modules.get(module_name) or importlib.import_module(module_name)
    for name in qualname.split("."):
        target = getattr(target, name)
    kind: type = target
    return kind


def load_main(description: Mapping[str, Any]) -> None:
    """Load the driver's main module here as ``__rpcrl_main__``. Raises whatever its top level raises."""
    name, path = description["module"], description["file"]
    spec: importlib.machinery.ModuleSpec | None = None
    if name is not None:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{name}.__main__")
    if spec is None and path is not None:
        loader = importlib.machinery.SourceFileLoader(MAIN, path)
        spec = importlib.util.spec_from_loader(MAIN, loader)
    if spec is None or spec.origin is None:
        raise UsageError("the driver's main module cannot be found again in a worker")
    loader = importlib.machinery.SourceFileLoader(MAIN, spec.origin)
    module = ModuleType(MAIN)
    module.__file__ = spec.origin
    module.__package__ = spec.parent
    module.__loader__ = loader
    sys.modules[MAIN] = module
    loader.exec_module(module)
