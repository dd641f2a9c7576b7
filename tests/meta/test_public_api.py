"""What is public? A change of a name or of a signature must show in the diff of this folder's public_api.txt."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import rpcrl
from tests.meta.sources import ROOT, tree_of

SNAPSHOT = Path(__file__).with_name("public_api.txt")


def _literal_all() -> list[str]:
    for node in tree_of(Path("rpcrl/__init__.py")).body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets):
            return list(ast.literal_eval(node.value))
    raise AssertionError("rpcrl/__init__.py has no literal __all__")


def _members(value: type) -> list[str]:
    lines = []
    for name, member in sorted(inspect.getmembers_static(value)):
        if name.startswith("_") and name != "__init__":
            continue
        owner = next(cls for cls in value.__mro__ if name in cls.__dict__)
        if not owner.__module__.startswith("rpcrl"):
            continue
        if isinstance(member, property):
            lines.append(f"    .{name}: property")
            continue
        function = member.__func__ if isinstance(member, staticmethod | classmethod) else member
        if callable(function):
            lines.append(f"    .{name}{_signature(function)}")
        else:
            lines.append(f"    .{name}")
    return lines


def _signature(value: object) -> str:
    try:
        signature = inspect.signature(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return "(…)"
    parameters = [
        p.replace(annotation=inspect.Parameter.empty, default="…")
        if p.default is not inspect.Parameter.empty
        else p.replace(annotation=inspect.Parameter.empty)
        for p in signature.parameters.values()
    ]
    return str(signature.replace(parameters=parameters, return_annotation=inspect.Signature.empty)).replace("'…'", "…")


def _describe() -> str:
    lines = []
    for name in rpcrl.__all__:
        value = getattr(rpcrl, name)
        if inspect.isclass(value):
            lines.append(f"class {name}")
            lines += _members(value)
        elif callable(value):
            lines.append(f"def {name}{_signature(value)}")
        else:
            lines.append(name)
    return "\n".join(lines) + "\n"


def test_names_are_literal_sorted_and_importable() -> None:
    names = _literal_all()
    assert names == sorted(names)
    assert names == list(rpcrl.__all__)
    for name in names:
        assert getattr(rpcrl, name) is not None
    assert set(names) <= set(dir(rpcrl))


def test_a_misspelt_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="WorkerGruop"):
        rpcrl.WorkerGruop  # type: ignore[attr-defined]  # noqa: B018


def test_a_type_checker_refuses_a_misspelt_name(tmp_path: Path) -> None:
    (tmp_path / "caller.py").write_text("import rpcrl\n\nrpcrl.WorkerGruop\n")
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml"), str(tmp_path / "caller.py")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert 'has no attribute "WorkerGruop"' in done.stdout, done.stdout + done.stderr


def test_signatures_are_those_of_the_snapshot(request: pytest.FixtureRequest) -> None:
    """``pytest --update-public-api`` rewrites the snapshot; the diff is then what reviewers read."""
    described = _describe()
    if request.config.getoption("--update-public-api"):
        SNAPSHOT.write_text(described, encoding="utf-8")
    assert SNAPSHOT.read_text(encoding="utf-8") == described
