"""Which files is the project made of, and what do they say? One reading for all meta tests."""

from __future__ import annotations

import ast
import functools
import subprocess
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("rpcrl", "launcher")


@functools.cache
def tracked_files() -> tuple[Path, ...]:
    """Return what git knows or would add, relative to the root; without git, every file outside hidden folders."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if listed.returncode == 0:
        paths = [Path(line) for line in listed.stdout.splitlines()]
    else:
        paths = [path.relative_to(ROOT) for path in ROOT.rglob("*")]
        paths = [path for path in paths if not any(part.startswith(".") for part in path.parts)]
    return tuple(sorted(path for path in paths if (ROOT / path).is_file()))


def package_files() -> list[Path]:
    """Return the Python files that users install, relative to the root."""
    return [path for path in tracked_files() if path.parts[0] in PACKAGES and path.suffix == ".py"]


@functools.cache
def tree_of(path: Path) -> ast.Module:
    """Return the syntax tree of a file named relative to the root."""
    return ast.parse((ROOT / path).read_text(encoding="utf-8"), filename=str(path))


def imports_of(path: Path) -> Iterator[tuple[int, str]]:
    """Yield ``(line, module)`` for every import anywhere in a file, also inside functions."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom) and node.module is not None and node.level == 0:
            yield node.lineno, node.module


def dotted(node: ast.expr) -> str:
    """Return ``a.b.c`` for a chain of attributes on a name, else an empty string."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return ""
    return ".".join([node.id, *reversed(parts)])
