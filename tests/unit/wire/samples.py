"""Which values do the wire's tests send? Classes at the top level of a module, and one value of every kind."""

from __future__ import annotations

import functools
import uuid
from collections import OrderedDict, defaultdict, deque, namedtuple
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import Enum, Flag, IntEnum, auto
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, NamedTuple
from zoneinfo import ZoneInfo

from pydantic import BaseModel, ConfigDict, PrivateAttr

from rpcrl.wire.imports import ImportPolicy

POLICY = ImportPolicy(["tests.unit.wire"])


class Colour(Enum):
    RED = "red"
    BLUE = ("b", 1)


class Level(IntEnum):
    LOW = 1


class Mode(Flag):
    READ = auto()
    WRITE = auto()


class Point(NamedTuple):
    x: int
    y: object


Old = namedtuple("Old", "a b")


@dataclass
class Plain:
    name: str
    parts: list[Any] = field(default_factory=list)
    hidden: int = field(default=0, init=False)


@dataclass(frozen=True, slots=True)
class Frozen:
    value: int

    def __post_init__(self) -> None:
        if self.value < 0:
            raise ValueError("negative")


class Model(BaseModel):
    model_config = ConfigDict(extra="allow")
    number: int
    inner: dict[str, Any] = {}
    _secret: int = PrivateAttr(default=3)


class Strict(BaseModel):
    number: int


class Outer:
    class Inner:
        pass

    @staticmethod
    def static(x: int) -> int:
        return x

    def method(self) -> None:
        pass


class Opaque:
    def __init__(self, value: int) -> None:
        self.value = value


class WithCodec:
    def __init__(self, values: list[int]) -> None:
        self.values = values

    def __eq__(self, other: object) -> bool:
        return isinstance(other, WithCodec) and other.values == self.values

    __hash__ = None  # type: ignore[assignment]


def double(x: int) -> int:
    return 2 * x


STANDARD_VALUES: dict[str, Any] = {
    "none": None,
    "true": True,
    "int": -7,
    "int64 max": 2**63 - 1,
    "uint64 max": 2**64 - 1,
    "big int": 2**64,
    "negative big int": -(2**63) - 1,
    "huge int": -(3**500),
    "float": 0.1,
    "inf": float("inf"),
    "minus zero": -0.0,
    "complex": 1.5 - 2j,
    "str": "grün ✓ \x00",
    "surrogate": "a\ud800b",
    "bytes": b"\x00\xff",
    "long bytes": bytes(range(256)) * 4,
    "bytearray": bytearray(b"abc"),
    "long bytearray": bytearray(b"x" * 2000),
    "empty list": [],
    "list": [1, "a", None, [2.5, [True]]],
    "empty tuple": (),
    "tuple": (1, (2, [3, (4,)])),
    "set": {1, 2, 3},
    "set of tuples": {(1, 2), (3, 4)},
    "empty set": set(),
    "frozenset": frozenset({"a"}),
    "set of frozensets": {frozenset({1}), frozenset()},
    "dict": {"b": 1, "a": [1, (2,)]},
    "dict with scalar keys": {1: "a", None: "b", 2.5: "c", False: "d", "e": "f"},
    "dict with tuple keys": {(1, "a"): [1], "plain": 2, (): {}},
    "dict with bytes keys": {b"k": 1},
    "dict with big keys": {2**70: 1, 1: 2},
    "dict with dates": {date(2024, 1, 1): 1},
    "nested dict": {"a": {"b": {"c": (1,)}}},
    "slice": slice(1, None, -2),
    "range": range(10, 0, -3),
    "big range": range(2**70, 2**70 + 5),
    "ellipsis": ...,
    "datetime": datetime(2024, 2, 29, 23, 59, 58, 123456),
    "datetime utc": datetime(2024, 2, 29, tzinfo=UTC),
    "datetime offset": datetime(1900, 1, 1, tzinfo=timezone(timedelta(hours=-3, seconds=17))),
    "datetime zone": datetime(2024, 10, 27, 2, 30, tzinfo=ZoneInfo("Europe/Berlin"), fold=1),
    "date": date(1, 1, 1),
    "time": time(1, 2, 3, 4, tzinfo=UTC, fold=1),
    "timedelta": timedelta(days=-3, microseconds=5),
    "path": Path("/a/b c"),
    "pure path": PurePosixPath("a/../b"),
    "windows path": PureWindowsPath("c:\\a"),
    "decimal": Decimal("1.10"),
    "decimal nan": Decimal("Infinity"),
    "uuid": uuid.UUID(int=5),
    "ordered dict": OrderedDict([("b", 1), ("a", (2,))]),
    "default dict": defaultdict(list, {"a": [1]}),
    "deque": deque([1, (2,)], maxlen=5),
    "enum": Colour.BLUE,
    "int enum": Level.LOW,
    "flag": Mode.READ | Mode.WRITE,
    "empty flag": Mode(0),
    "named tuple": Point(1, [2, (3,)]),
    "old named tuple": Old(1, {}),
    "dataclass": Plain("n", [1, (2,), Frozen(3)]),
    "frozen dataclass": Frozen(5),
    "model": Model(number=1, inner={"a": (1, 2)}, more=(3,)),
    "function": double,
    "static method": Outer.static,
    "class": Outer,
    "inner class": Outer.Inner,
    "enum class": Colour,
    "builtin function": len,
    "builtin class": int,
    "list of classes": [int, str, Plain],
}

PARTIAL = functools.partial(double, 3)
