"""Can a user's function get a name, and is it found again by another process?"""

from __future__ import annotations

import subprocess
import sys

import pytest

from rpcrl.config.registry import Registry
from rpcrl.errors import UsageError

BUILT_IN = ("first", "second")


def own() -> str:
    return "own"


def other() -> str:
    return "other"


@pytest.fixture
def registry() -> Registry:
    return Registry("thing", "some.key", BUILT_IN)


def test_a_name_is_taken_once(registry: Registry) -> None:
    assert registry.register("mine")(own) is own
    registry.register("mine")(own)
    with pytest.raises(UsageError, match=r"the thing 'mine' is already .*test_registry\.own; choose another name"):
        registry.register("mine")(other)
    assert registry["mine"] is own
    assert list(registry) == ["first", "mine", "second"]
    assert "mine" in registry
    assert "first" in registry


def test_a_built_in_name_is_kept_also_before_it_is_loaded(registry: Registry) -> None:
    with pytest.raises(UsageError, match="'first' is rpcrl's own"):
        registry.register("first")(own)


@pytest.mark.parametrize("name", ["", "a:b"])
def test_a_name_is_no_path(registry: Registry, name: str) -> None:
    with pytest.raises(UsageError, match="is no name for a thing"):
        registry.register(name)


def test_an_unknown_name_is_answered_with_the_nearest(registry: Registry) -> None:
    with pytest.raises(UsageError, match=r"unknown thing 'secund' \(known: first, second, .*did you mean 'second'\?"):
        registry["secund"]


def test_a_users_function_travels_by_its_import_path(registry: Registry) -> None:
    registry.register("mine")(own)
    path = registry.portable("mine")
    assert path == f"{own.__module__}:own"
    for name in ("first", "my_module:function", "unknown"):
        assert registry.portable(name) == name
    registry.register("nameless")(lambda: None)
    with pytest.raises(UsageError, match="has no import path"):
        registry.portable("nameless")


def test_a_scripts_function_is_found_by_the_scripts_file(tmp_path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "from rpcrl.config.registry import POLICY_LOSSES, register_policy_loss\n"
        "@register_policy_loss('mine')\n"
        "def own(): ...\n"
        "path = POLICY_LOSSES.portable('mine')\n"
        "if __name__ == '__main__':\n"
        "    again = POLICY_LOSSES[path]\n"  # loads the file a second time, which registers the name again
        "    print(path, again is own, again.__name__)\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False)
    assert done.stdout.split() == [f"{script}:own", "False", "own"], done.stderr
