"""How does one value become a msgpack tree and raw buffers, and come back?

This is the machine; ``codec`` holds the format and the entry points, and ``containers``, ``arrays``, ``tensors`` and
``models`` hold the types. A writer turns a value into a node: a plain value, a list of nodes, a dict of plain keys
and nodes, or a tagged list ``[tag, …]``. A reader turns the tagged list back.

Types are found by exact type in one dict. A type that is not there is looked for along its bases, and modules of
heavy libraries are named by text only: a library whose types travel is loaded already.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any
from weakref import WeakKeyDictionary

from msgpack import ExtType

from rpcrl.errors import DecodeError
from rpcrl.shm.buffers import Buffer, Lent, num_bytes, view_of
from rpcrl.traffic import count
from rpcrl.wire.imports import ImportPolicy

__all__ = [
    "INLINE_BYTES",
    "MAX_DEPTH",
    "PLAIN",
    "READERS",
    "WRITERS",
    "Decoder",
    "Encoder",
    "Mark",
    "Tag",
    "Unencodable",
    "reads",
    "tagged",
    "writes",
]

INLINE_BYTES = 512
"""Buffers below this size stay in the tree: a frame of their own costs more than copying them."""
MAX_DEPTH = 100
"""Containers in containers; deeper values are refused on both sides."""
PLAIN = frozenset({type(None), bool, int, float, str})
"""Types that msgpack itself carries without loss."""


class Tag(IntEnum):
    """Numbers on the wire; a number is never given to another type again."""

    TUPLE = 1
    SET = 2
    FROZENSET = 3
    PAIRS = 4
    BIG_INT = 5
    COMPLEX = 6
    BYTES = 7
    BYTEARRAY = 8
    SLICE = 9
    RANGE = 10
    ELLIPSIS = 11
    DATETIME = 12
    DATE = 13
    TIME = 14
    TIMEDELTA = 15
    PATH = 16
    DECIMAL = 17
    UUID = 18
    ORDERED_DICT = 19
    DEFAULT_DICT = 20
    DEQUE = 21
    ENUM = 22
    FLAG = 23
    NAMED_TUPLE = 24
    DATACLASS = 25
    REFERENCE = 26
    PARTIAL = 27
    CUSTOM = 28
    NDARRAY = 32
    OBJECT_ARRAY = 33
    NUMPY_SCALAR = 34
    NUMPY_DTYPE = 35
    TENSOR = 40
    JAGGED = 41
    TORCH_DTYPE = 42
    TORCH_DEVICE = 43
    TORCH_SIZE = 44
    NESTED = 45
    TENSORDICT = 48
    NON_TENSOR = 49
    NON_TENSOR_STACK = 50
    LAZY_STACK = 51
    DATA_PROTO = 56
    PYDANTIC = 57
    OMEGACONF = 58


@dataclass(frozen=True, slots=True)
class Mark:
    """A tag as it was read; it opens a tagged list and stands nowhere else."""

    code: int


class Unencodable(Exception):
    """A value cannot travel; collects the way to it while the stack unwinds."""

    def __init__(self, value: object, reason: str, remedy: str = "") -> None:
        super().__init__(reason)
        self.kind = _type_name(type(value))
        self.reason = reason
        self.remedy = remedy
        self.parts: list[str] = []


Writer = Callable[["Encoder", Any], object]
Reader = Callable[["Decoder", list[Any]], object]

WRITERS: dict[type, Writer] = {}
"""Exact type → writer."""
_BASES: dict[type, Writer] = {}
"""Base class → writer for its subclasses."""
READERS: dict[int, Reader] = {}
_found: WeakKeyDictionary[type, Writer] = WeakKeyDictionary()

_LIBRARIES = {
    "numpy": "rpcrl.wire.arrays",
    "torch": "rpcrl.wire.tensors",
    "tensordict": "rpcrl.wire.tensordicts",
    "pydantic": "rpcrl.wire.models",
    "omegaconf": "rpcrl.wire.models",
    "rpcrl": "rpcrl.wire.models",
}
"""Library of a type → module of ours that knows it, loaded when such a type is first met."""
_TAG_MODULES = (
    (Tag.NDARRAY, "rpcrl.wire.arrays"),
    (Tag.TENSOR, "rpcrl.wire.tensors"),
    (Tag.TENSORDICT, "rpcrl.wire.tensordicts"),
    (Tag.DATA_PROTO, "rpcrl.wire.models"),
)
"""First tag → module that reads it and the tags up to the next line."""


def writes(*types: type, subclasses: bool = False) -> Callable[[Writer], Writer]:
    """Register the decorated function as writer of ``types`` (and, if asked, of classes below them)."""

    def register(writer: Writer) -> Writer:
        for each in types:
            WRITERS[each] = writer
            if subclasses:
                _BASES[each] = writer
        return writer

    return register


def reads(tag: Tag) -> Callable[[Reader], Reader]:
    """Register the decorated function as reader of a tag; it gets the whole list, the tag at index 0."""

    def register(reader: Reader) -> Reader:
        READERS[tag] = reader
        return reader

    return register


_MARKS = {tag: ExtType(tag, b"") for tag in Tag}


def tagged(tag: Tag, *fields: object) -> list[object]:
    """Return the node of a tagged value."""
    return [_MARKS[tag], *fields]


def _type_name(cls: type) -> str:
    return cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"


def _find_writer(cls: type) -> Writer | None:
    """Look for a writer along the bases of ``cls``; loads our part for each library that it meets."""
    found = _found.get(cls)
    if found is not None:
        return found
    for base in cls.__mro__:
        part = _LIBRARIES.get(base.__module__.partition(".")[0])
        if part is not None:
            module = importlib.import_module(part)
            if part == "rpcrl.wire.models":  # knows several libraries, and not all of them were loaded before
                module.register_loaded()
        writer = WRITERS.get(cls) or _BASES.get(base)
        if writer is not None:
            _found[cls] = writer
            return writer
    return None


def _key(key: object) -> str:
    if type(key) is str:
        return '["' + key[:80].replace('"', '\\"') + '"]'
    return f"[{repr(key)[:80]}]"


class Encoder:
    """Turns one value into nodes and buffers; used once."""

    def __init__(self, imports: ImportPolicy, fallback: Writer) -> None:
        self.imports = imports
        self.buffers: list[Buffer] = []
        self.shared: dict[int, tuple[int, object]] = {}
        """id → (number, object): objects that must stay one object on the other side."""
        self._fallback = fallback
        self._open: list[object] = []

    def node(self, value: Any) -> object:
        """Return the node of a value. Raises Unencodable."""
        cls = type(value)
        if cls in PLAIN:
            return value
        writer = WRITERS.get(cls) or _find_writer(cls) or self._fallback
        return writer(self, value)

    def enter(self, value: object) -> None:
        """Go one container deeper; pair with ``leave``."""
        if len(self._open) >= MAX_DEPTH:
            if any(each is value for each in self._open):
                raise Unencodable(value, "contains itself, directly or through others", "break the cycle")
            raise Unencodable(value, f"is nested more than {MAX_DEPTH} levels deep", "send a flatter value")
        self._open.append(value)

    def leave(self) -> None:
        """Come back from ``enter``."""
        self._open.pop()

    def sequence(self, owner: object, values: Sequence[Any] | Iterable[Any]) -> list[Any]:
        """Return the nodes of the elements of ``owner``; a list of plain values is returned as it is."""
        if PLAIN.issuperset(map(type, values)):
            return values if type(values) is list else list(values)
        self.enter(owner)
        nodes: list[object] = []
        try:
            for value in values:
                nodes.append(value if type(value) in PLAIN else self.node(value))  # noqa: PERF401 (hot)
        except Unencodable as error:
            error.parts.append(f"[{len(nodes)}]")
            raise
        self.leave()
        return nodes

    def mapping(self, owner: object, values: Mapping[Any, Any]) -> object:
        """Return the node of a dict: a msgpack map if the keys are plain, tagged pairs otherwise."""
        if not PLAIN.issuperset(map(type, values)):
            return self._pairs(owner, values)
        if type(values) is dict and PLAIN.issuperset(map(type, values.values())):
            return values
        self.enter(owner)
        nodes: dict[object, object] = {}
        key: object = None
        try:
            for key, value in values.items():
                nodes[key] = value if type(value) in PLAIN else self.node(value)
        except Unencodable as error:
            error.parts.append(_key(key))
            raise
        self.leave()
        return nodes

    def _pairs(self, owner: object, values: Mapping[Any, Any]) -> object:
        self.enter(owner)
        flat: list[object] = []
        for key, value in values.items():
            try:
                flat.append(self.node(key))
                flat.append(self.node(value))
            except Unencodable as error:
                error.parts.append(_key(key))
                raise
        self.leave()
        return tagged(Tag.PAIRS, flat)

    def attributes(self, owner: object, values: Mapping[str, Any]) -> dict[str, object]:
        """Return the nodes of an object's fields by name."""
        self.enter(owner)
        nodes: dict[str, object] = {}
        name = ""
        try:
            for name, value in values.items():
                nodes[name] = self.node(value)
        except Unencodable as error:
            error.parts.append(f".{name}")
            raise
        self.leave()
        return nodes

    def buffer(self, data: bytes | memoryview) -> int | bytes:
        """Return what stands for raw bytes in the tree: the bytes if they are few, else a buffer's number."""
        view = memoryview(data)
        if view.nbytes < INLINE_BYTES:
            return bytes(view)
        self.buffers.append(view)
        return len(self.buffers) - 1


class Decoder:
    """Turns marks and tagged lists back into values while msgpack reads the tree; used once."""

    def __init__(self, buffers: Sequence[Buffer], imports: ImportPolicy, customs: Mapping[str, Any]) -> None:
        self.imports = imports
        self.customs = customs
        self.shared: list[object] = []
        self._buffers = buffers
        self._next = 0
        self._open_marks = 0

    def mark(self, code: int, data: bytes) -> Mark:
        """Read an extension: only empty ones exist, and each opens a tagged list."""
        if data:
            raise DecodeError(f"extension {code} carries {len(data)} bytes; it must be empty")
        self._open_marks += 1
        return Mark(code)

    def collect(self, node: list[Any]) -> object:
        """Read a finished list: tagged lists become their value."""
        if not node or type(node[0]) is not Mark:
            return node
        self._open_marks -= 1
        code = node[0].code
        reader = READERS.get(code)
        if reader is None:
            reader = _load_reader(code)
        return reader(self, node)

    def take(self, reference: object) -> bytearray | memoryview:
        """Return the bytes that a node stands for, as memory that belongs to the receiver alone.

        A bytearray in the message and shared memory are the receiver's own and are handed on; the rest is copied.
        """
        if type(reference) is bytes:
            return bytearray(reference)
        if type(reference) is not int or reference != self._next or reference >= len(self._buffers):
            raise DecodeError(f"buffer {reference!r} where number {self._next} of {len(self._buffers)} is due")
        self._next += 1
        buffer = self._buffers[reference]
        if type(buffer) is bytearray:
            return buffer
        if isinstance(buffer, Lent):
            return buffer.take()
        count(copied_bytes=num_bytes(buffer))
        return bytearray(view_of(buffer).cast("B"))

    def finish(self) -> None:
        """Check that nothing was left over."""
        if self._open_marks:
            raise DecodeError("a tag stands outside the head of a list")
        if self._next != len(self._buffers):
            raise DecodeError(f"the message has {len(self._buffers)} buffers and its tree uses {self._next}")


def _load_reader(code: int) -> Reader:
    part = None
    for first, module in _TAG_MODULES:
        if code >= first:
            part = module
    if part is not None:
        try:
            importlib.import_module(part)
        except ImportError as error:
            raise DecodeError(f"a message holds a value of a library that is not installed here: {error}") from error
    reader = READERS.get(code)
    if reader is None:
        raise DecodeError(f"unknown tag {code}")
    return reader
