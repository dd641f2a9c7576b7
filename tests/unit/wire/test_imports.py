"""Can a message name only what the run allows, whichever way it is spelled?"""

from __future__ import annotations

import sys
import types

import pytest

from rpcrl.errors import DecodeError, EncodeError
from rpcrl.wire.imports import MAIN, ImportPolicy, path_of, resolve
from tests.unit.wire import samples

POLICY = ImportPolicy(["tests.unit.wire"])


def test_prefixes_are_whole_names() -> None:
    policy = ImportPolicy(["mylib", "other.part"])
    allowed = ["mylib", "mylib.rewards", "other.part", "other.part.x", MAIN, "__main__"]
    refused = ["mylib2", "other", "other.parts", "builtins", "os", "", "mylib.__main__"]
    assert [name for name in allowed + refused if policy.allows(name)] == allowed
    assert not ImportPolicy(["builtins"]).allows_path("builtins:eval")


@pytest.mark.parametrize(
    "path",
    [
        "builtins:eval",
        "builtins:exec",
        "builtins:__import__",
        "builtins:getattr",
        "builtins:open",
        "builtins:breakpoint",
        "os:system",
        "posix:system",
        "subprocess:Popen",
        "tests.unit.wire.samples:functools.partial",
        "tests.unit.wire.samples:Path",
        "tests.unit.wire.samples:ImportPolicy",
        "tests.unit.wire.samples:uuid.os.system",
        "tests.unit.wire.samples:double.__globals__",
        "tests.unit.wire.samples:Plain.__init__.__globals__",
        "tests.unit.wire.samples:Plain.__class__",
        "tests.unit.wire.samples:POLICY",
        "tests.unit.wire.samples:missing",
        "tests.unit.wire.missing:x",
        "tests.unit.wire.samples",
        ":x",
        "tests.unit.wire.samples:",
        "",
        "tests.unit.wire..samples:double",
        f"{MAIN}:sys.exit",
        "__main__:missing",
    ],
)
def test_refused_paths(path: str) -> None:
    with pytest.raises(DecodeError):
        resolve(path, POLICY)


def test_a_refused_module_is_not_imported() -> None:
    before = set(sys.modules)
    with pytest.raises(
        DecodeError, match=r"does not allow: allow it with Controller\(allow_imports=\['antigravity'\]\)"
    ):
        resolve("antigravity:x", POLICY)
    assert "antigravity" not in set(sys.modules) - before


def test_allowed_paths() -> None:
    for obj in (samples.double, samples.Plain, samples.Outer.Inner, samples.Outer.static, len, int):
        assert resolve(path_of(obj), POLICY) is obj


def test_the_users_script_has_one_name_on_the_wire(monkeypatch: pytest.MonkeyPatch) -> None:
    main = types.ModuleType("__main__")
    main.__file__ = "script.py"
    source = "def reward(): pass\nclass Task: pass\n"
    exec(source, main.__dict__)
    monkeypatch.setitem(sys.modules, "__main__", main)
    monkeypatch.delitem(sys.modules, MAIN, raising=False)
    # on the driver the script is __main__
    assert path_of(main.reward) == f"{MAIN}:reward"
    assert resolve(f"{MAIN}:reward", POLICY) is main.reward
    # in a worker it is loaded under the wire's name, beside the worker's own __main__
    loaded = types.ModuleType(MAIN)
    exec(source, loaded.__dict__)
    monkeypatch.setitem(sys.modules, MAIN, loaded)
    assert resolve(f"{MAIN}:Task", POLICY) is loaded.Task
    assert path_of(loaded.Task) == f"{MAIN}:Task"


def test_an_object_under_a_false_name_is_refused() -> None:
    def impostor() -> None:
        pass

    impostor.__qualname__ = "double"
    impostor.__module__ = "tests.unit.wire.samples"
    with pytest.raises(EncodeError, match="is not this object"):
        path_of(impostor)
