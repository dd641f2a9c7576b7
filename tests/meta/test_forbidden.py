"""Is anything in the packages that must never be there? Read from the syntax trees, so comments may name it."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

from tests.meta.sources import ROOT, dotted, imports_of, package_files, tracked_files, tree_of

PICKLERS = frozenset({"pickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"})
UNPICKLING_CALLS = frozenset({"torch.load", "torch.save", "numpy.load", "np.load", "pandas.read_pickle"})
UNPICKLING_METHODS = frozenset({"recv_pyobj", "send_pyobj"})
SERVICES = frozenset({"ray", "redis", "aioredis", "celery", "kubernetes", "etcd3"})
ENVIRONMENT = frozenset({"os.environ", "os.getenv", "os.putenv", "os.unsetenv", "os.environb"})


def _nodes() -> Iterator[tuple[Path, ast.AST]]:
    for path in package_files():
        for node in ast.walk(tree_of(path)):
            yield path, node


def test_no_pickle() -> None:
    bad = [
        f"{path}:{line} imports {module}"
        for path in package_files()
        for line, module in imports_of(path)
        if module.split(".")[0] in PICKLERS
    ]
    for path, node in _nodes():
        if not isinstance(node, ast.Call):
            continue
        name = dotted(node.func)
        if name in UNPICKLING_CALLS or name.rpartition(".")[2] in UNPICKLING_METHODS:
            bad.append(f"{path}:{node.lineno} calls {name}")
        for keyword in node.keywords:
            value = keyword.value.value if isinstance(keyword.value, ast.Constant) else None
            if (keyword.arg, value) in {("allow_pickle", True), ("weights_only", False)}:
                bad.append(f"{path}:{node.lineno} {keyword.arg}={value}")
    assert bad == []


def test_nothing_binds_to_every_interface() -> None:
    bad = [
        f"{path}:{node.lineno} {node.value!r}"
        for path, node in _nodes()
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and re.search(r"^0\.0\.0\.0|//0\.0\.0\.0|//\*:|^\[?::\]?$", node.value)
    ]
    assert bad == []


def test_no_assert_stands_where_python_o_would_remove_it() -> None:
    assert [f"{path}:{node.lineno}" for path, node in _nodes() if isinstance(node, ast.Assert)] == []


def test_only_env_touches_the_environment() -> None:
    bad = []
    for path, node in _nodes():
        if path == Path("rpcrl/env.py"):
            continue
        if isinstance(node, ast.Attribute) and dotted(node) in ENVIRONMENT:
            bad.append(f"{path}:{node.lineno} {dotted(node)}")
        if isinstance(node, ast.ImportFrom) and node.module == "os":
            names = {alias.name for alias in node.names} & {"environ", "getenv", "putenv"}
            bad += [f"{path}:{node.lineno} from os import {name}" for name in names]
    assert bad == []


def test_nothing_sleeps_and_nothing_forks() -> None:
    bad = [
        f"{path}:{node.lineno} {dotted(node.func)}"
        for path, node in _nodes()
        if isinstance(node, ast.Call) and dotted(node.func) in {"time.sleep", "os.fork", "os.forkpty"}
    ]
    assert bad == []


def test_p83_neither_ray_nor_redis_nor_another_service_is_imported_or_required() -> None:
    bad = [
        f"{path}:{line} imports {module}"
        for path in package_files()
        for line, module in imports_of(path)
        if module.split(".")[0] in SERVICES
    ]
    assert bad == []
    assert _required() & SERVICES == set()


def _required() -> set[str]:
    """Return the names of everything that an install of rpcrl brings along, as far as it is installed here."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = list(project["dependencies"])
    for extra in project["optional-dependencies"].values():
        lines += extra
    for path in (ROOT / "requirements").glob("*.txt"):
        lines += [line for line in path.read_text(encoding="utf-8").splitlines() if line and line[0] not in "#-"]
    names: set[str] = set()
    queue = lines
    while queue:
        line = queue.pop()
        match = re.match(r"[A-Za-z0-9._-]+", line)
        name = "" if match is None else match.group().lower().replace("_", "-")
        if not name or name in names or "extra ==" in line:
            continue
        names.add(name)
        try:
            queue += importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue
    assert {"pyzmq", "torch", "jinja2"} <= names, "the walk over the requirements does not reach what it must"
    return names


def test_no_file_speaks_of_the_place_where_it_was_written() -> None:
    words = [
        "/" + "work/",
        "/" + "opt/rv",
        "DESIGN" + ".md",
        "user" + "-cases.md",
        "pypi" + ".org",
        "python" + "hosted",
    ]
    bad = []
    for path in tracked_files():
        try:
            text = (ROOT / path).read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        bad += [f"{path}: {word}" for word in words if word in text]
    assert bad == []
