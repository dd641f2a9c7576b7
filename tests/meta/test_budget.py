"""Does every file fit a sitting and every function a screen?"""

from __future__ import annotations

import ast

from tests.meta.sources import ROOT, package_files, tree_of

FILE_LINES = 450
FUNCTION_LINES = 80
EXCEPTIONS: dict[str, str] = {}
"""``path`` or ``path:function`` → why it is better whole. Empty is the aim."""

FORBIDDEN_NAMES = frozenset({"util", "utils", "helper", "helpers", "common", "misc", "base_utils", "tools", "stuff"})
"""A module is named after what it answers; these names answer nothing."""


def test_files_stay_within_the_budget() -> None:
    over = []
    for path in package_files():
        count = len((ROOT / path).read_text(encoding="utf-8").splitlines())
        if count > FILE_LINES and str(path) not in EXCEPTIONS:
            over.append(f"{path}: {count} lines, {FILE_LINES} allowed")
    assert over == []


def test_functions_stay_within_the_budget() -> None:
    over = []
    for path in package_files():
        for node in ast.walk(tree_of(path)):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            count = (node.end_lineno or node.lineno) - node.lineno + 1
            if count > FUNCTION_LINES and f"{path}:{node.name}" not in EXCEPTIONS:
                over.append(f"{path}:{node.lineno} {node.name}: {count} lines, {FUNCTION_LINES} allowed")
    assert over == []


def test_every_exception_to_the_budget_is_still_needed() -> None:
    lengths: dict[str, int] = {}
    for path in package_files():
        lengths[str(path)] = len((ROOT / path).read_text(encoding="utf-8").splitlines()) - FILE_LINES
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                count = (node.end_lineno or node.lineno) - node.lineno + 1
                lengths[f"{path}:{node.name}"] = count - FUNCTION_LINES
    assert [name for name in EXCEPTIONS if lengths.get(name, 0) <= 0] == []


def test_modules_are_named_after_what_they_answer() -> None:
    bad = [str(path) for path in package_files() if FORBIDDEN_NAMES & {*path.parts[:-1], path.stem}]
    assert bad == []


def test_every_module_opens_with_what_it_answers() -> None:
    silent = [
        str(path) for path in package_files() if path.name != "__init__.py" and ast.get_docstring(tree_of(path)) is None
    ]
    assert silent == []
