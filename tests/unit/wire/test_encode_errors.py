"""What does a user read when something cannot be sent? The place, the type, the reason, and what to do."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from collections.abc import Callable
from datetime import datetime, tzinfo
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rpcrl.errors import EncodeError
from rpcrl.wire.codec import encode, register_codec
from rpcrl.wire.imports import ImportPolicy
from tests.unit.wire.samples import POLICY, Opaque, Outer, Plain, double


class Text(str):
    __slots__ = ()


class MyZone(tzinfo):
    pass


def make_closure() -> Callable[[], int]:
    x = 1

    def inner() -> int:
        return x

    return inner


def make_class() -> type:
    class Local:
        pass

    return Local


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (object(), "(object) cannot be sent: its type has no codec; register a codec"),
        (Opaque(1), "tests.unit.wire.samples.Opaque"),
        (threading.Lock(), "lock) cannot be sent"),
        (lambda: 1, "a lambda cannot travel"),
        (make_closure(), "made inside a function"),
        (make_class(), "made inside a function"),
        (Outer().method, "bound method"),
        ([].append, "bound method"),
        (memoryview(b"x"), "memoryview"),
        ((i for i in range(3)), "generator"),
        (Text("x"), "subclass of str, which would be lost; convert it with str(…)"),
        (datetime(2024, 1, 1, tzinfo=MyZone()), "time zone is a MyZone"),
        (
            subprocess.run,
            "this run does not allow subprocess:run; allow it with Controller(allow_imports=['subprocess'])",
        ),
        (eval, "this run does not allow builtins:eval"),
        (np.zeros(2, [("a", "f4")]), "send each field as an array of its own"),
        (np.ma.masked_array([1], [True]), "MaskedArray"),
        (torch.zeros(2, device="meta"), "meta device"),
        (torch.eye(2).to_sparse(), ".to_dense()"),
        (torch.quantize_per_tensor(torch.ones(1), 1.0, 0, torch.qint8), "quantized"),
        (ValueError("x"), "ValueError) cannot be sent"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_says_what_and_why(value: Any, words: str) -> None:
    with pytest.raises(EncodeError) as caught:
        encode(((1, {"x": value}), {}), path=("args", "kwargs"), imports=POLICY)
    assert str(caught.value).startswith('args[1]["x"] (')
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("value", "place"),
    [
        (([1, [object()]], {}), "args[1][0]"),
        (([1], {"batch": {"a": (0, object())}}), 'kwargs["batch"]["a"][1]'),
        (([Plain("n", [object()])], {}), "args[0].parts[0]"),
        (([np.array(["a", object()], dtype=object)], {}), "args[0][1]"),
        (([np.array([["a", "b"], ["c", object()]], dtype=object)], {}), "args[0][1, 1]"),
        (([{(1, 2): object()}], {}), "args[0][(1, 2)]"),
        (([{1, 2}, {"q": {3: object()}}], {}), 'args[1]["q"][3]'),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_names_the_place(value: Any, place: str) -> None:
    with pytest.raises(EncodeError, match=re.escape(f"{place} (object) cannot be sent")):
        encode(value, path=("args", "kwargs"), imports=POLICY)


def test_cycles_and_depth_are_told_apart() -> None:
    cycle: list[Any] = [1]
    cycle.append({"me": cycle})
    with pytest.raises(EncodeError, match="contains itself"):
        encode(cycle)
    deep: list[Any] = []
    for _ in range(300):
        deep = [deep, 1]
    with pytest.raises(EncodeError, match="nested more than 100 levels deep"):
        encode(deep)
    shared: list[int] = []
    assert encode([shared, shared, {"again": shared}]).tree  # the same object twice is no cycle


def test_the_sender_is_stopped_by_its_own_policy() -> None:
    assert encode(double, imports=ImportPolicy(["tests"])).tree
    with pytest.raises(EncodeError, match=r"does not allow tests\.unit\.wire\.samples:double"):
        encode(double, imports=ImportPolicy(["other"]))
    with pytest.raises(EncodeError, match=r"does not allow tests\.unit\.wire\.samples:Plain"):
        encode(Plain("x"), imports=ImportPolicy(["other"]))


def test_code_without_a_file_is_explained(tmp_path: Path) -> None:
    program = (
        "from rpcrl.wire.codec import encode\n"
        "def reward(): pass\n"
        "try:\n    encode(reward)\nexcept Exception as error:\n    print(type(error).__name__, error)\n"
    )
    command = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert "EncodeError" in command.stdout
    assert "code without a file" in command.stdout
    script = tmp_path / "script.py"
    script.write_text(program.replace("    encode(reward)", "    print(encode(reward).tree)"), encoding="utf-8")
    file = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60, check=True)
    assert "__rpcrl_main__:reward" in file.stdout


def test_register_codec_refuses_what_is_taken_and_tells_what_failed() -> None:
    class Mine:
        pass

    def fail(value: Mine) -> object:
        raise KeyError("missing part")

    register_codec(Mine, name="tests.Mine", encode=fail, decode=lambda plain: Mine())
    with pytest.raises(EncodeError, match=r"its registered codec 'tests.Mine' failed: KeyError: 'missing part'"):
        encode([Mine()])
    with pytest.raises(EncodeError, match="has a codec already"):
        register_codec(Opaque, name="tests.Mine", encode=fail, decode=lambda plain: Opaque(1))
    with pytest.raises(EncodeError, match="has a codec already"):
        register_codec(list, name="tests.list", encode=fail, decode=list)
