"""Is every public error documented, and in the tree that users read?"""

from __future__ import annotations

import inspect
import re
from pathlib import Path

from rpcrl import errors
from tests.meta.sources import ROOT, tracked_files


def _exceptions() -> list[type[BaseException]]:
    return [
        value
        for name, value in vars(errors).items()
        if inspect.isclass(value) and issubclass(value, BaseException) and value.__module__ == errors.__name__
    ]


def test_every_error_is_public_documented_and_in_the_tree() -> None:
    tree = errors.__doc__ or ""
    for error in _exceptions():
        assert error.__name__ in errors.__all__, f"{error.__name__} is missing in errors.__all__"
        assert error.__doc__, f"{error.__name__} has no docstring"
        assert re.search(rf"\b{error.__name__}\b", tree), f"{error.__name__} is not in the tree of errors.py"
        assert issubclass(error, errors.RpcrlError)


def test_the_tree_shows_no_error_that_does_not_exist() -> None:
    shown = re.findall(r"(?:├──|└──) (\w+(?:<\w+>)?\w*)", errors.__doc__ or "")
    names = {error.__name__ for error in _exceptions()}
    assert [name for name in shown if name not in names and "<" not in name] == []


def test_the_tree_names_the_builtin_bases() -> None:
    for line in (errors.__doc__ or "").splitlines():
        match = re.search(r"── (\w+Error)\s+\((\w+)\)", line)
        if match is not None:
            error = getattr(errors, match.group(1))
            assert match.group(2) in {base.__name__ for base in error.__mro__}, line


def test_every_error_is_raised_somewhere_in_the_tests_or_in_a_kit() -> None:
    text = "\n".join(
        (ROOT / path).read_text(encoding="utf-8")
        for path in tracked_files()
        if (path.parts[0] == "tests" or path.parts[:2] == ("rpcrl", "testing"))
        and path.suffix == ".py"
        and path != Path("tests/meta/test_errors.py")
    )
    leaves = [error for error in _exceptions() if not error.__subclasses__()]
    assert [error.__name__ for error in leaves if not re.search(rf"\b{error.__name__}\b", text)] == []
