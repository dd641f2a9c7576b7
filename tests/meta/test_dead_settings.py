"""Is every setting read by what it steers? One that nothing reads must be refused unless it is the default."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

import pytest

from rpcrl.config.keys import Setting, settings
from rpcrl.config.launch_rules import version_checks
from rpcrl.config.load import read
from tests.meta.sources import package_files, tree_of

ALSO_READ_AS = {"trainer.default_local_dir": "trainer.run_dir"}
PASSED_ON = {
    "actor_rollout_ref": ("roles", "config", "settings"),
    "algorithm": ("settings",),
    "rollout_correction": ("settings",),
    "actor": ("settings", "config"),
}
"""Section → names that whole sections have as parameters of functions below the trainer."""


def _pairs(target: ast.expr, value: ast.expr) -> Iterator[tuple[str, ast.expr]]:
    """Yield (name, what it is assigned) of ``a = x`` and ``a, b = x, y``."""
    if isinstance(target, ast.Name):
        yield target.id, value
    elif isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        for part, assigned in zip(target.elts, value.elts, strict=False):
            yield from _pairs(part, assigned)


def _reads(tree: ast.Module, aliases: dict[str, set[str]]) -> Iterator[tuple[str, str]]:
    """Yield (section, field) of every ``section.field`` in a module, also through local names of a section."""
    local = {name: set(sections) for name, sections in aliases.items()}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            for name, value in _pairs(node.targets[0], node.value):
                if isinstance(value, ast.Attribute):
                    local.setdefault(name, set()).add(value.attr)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            owner = node.value
            name = owner.attr if isinstance(owner, ast.Attribute) else owner.id if isinstance(owner, ast.Name) else ""
            for section in (name, *local.get(name, ())):
                yield section, node.attr


def _read_outside_the_configuration() -> set[tuple[str, str]]:
    aliases: dict[str, set[str]] = {}
    for section, names in PASSED_ON.items():
        for name in names:
            aliases.setdefault(name, set()).add(section)
    accounts = ("rpcrl/config/account.py",)
    found: set[tuple[str, str]] = set()
    for path in package_files():
        if not str(path).startswith("rpcrl/config/") or str(path) in accounts:
            found |= set(_reads(tree_of(path), aliases))
    return found


def _another_value(setting: Setting) -> Any:
    default = setting.default
    if isinstance(default, bool):
        return not default
    if isinstance(default, int | float):
        return default / 2 if isinstance(default, float) else default + 1
    return "nccl" if setting.key.endswith("backend") else "other" if setting.takes_text else 2


def _dead() -> list[str]:
    read_somewhere = _read_outside_the_configuration()
    return [key for key in settings() if tuple(ALSO_READ_AS.get(key, key).split(".")[-2:]) not in read_somewhere]


def test_the_reader_of_the_sources_sees_settings() -> None:
    assert len(_dead()) < len(settings()) / 2
    assert ("rollout", "n") in _read_outside_the_configuration()


@pytest.mark.parametrize("key", _dead())
def test_a_setting_that_nothing_reads_takes_only_its_default(key: str) -> None:
    setting = settings()[key]
    overrides = [f"{key}={_another_value(setting)}".replace("True", "true").replace("False", "false")]
    found = [violation.key for violation in read(None, overrides, None, also=(version_checks,)).violations]
    assert key in found, f"{overrides[0]} is accepted, and nothing reads it"
