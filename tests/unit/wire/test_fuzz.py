"""Can any bytes do more than raise DecodeError? Random ones, and valid messages that were cut or changed."""

from __future__ import annotations

import pickle
import resource
import struct
import sys
from typing import Any

import msgpack
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rpcrl.errors import DecodeError, ProtocolMismatchError
from rpcrl.wire.codec import decode, encode
from rpcrl.wire.frames import from_frames, to_frames
from rpcrl.wire.messages import Encoded, Message
from rpcrl.wire.tree import READERS, Tag, tagged
from tests.unit.wire.samples import POLICY
from tests.unit.wire.test_frames import MESSAGES
from tests.unit.wire.test_golden import VALUES
from tests.unit.wire.test_values import register_with_codec

register_with_codec()
ENCODED = {name: encode(value, imports=POLICY) for name, value in VALUES.items()}


def try_decode(encoded: Encoded) -> bool:
    """Whether it decodes; anything but DecodeError escapes and fails the test."""
    try:
        decode(encoded, imports=POLICY)
    except DecodeError:
        return False
    return True


def try_frames(frames: list[bytes]) -> Message | None:
    try:
        return from_frames(frames)
    except (DecodeError, ProtocolMismatchError):
        return None


@given(st.binary(max_size=200), st.lists(st.binary(max_size=50), max_size=3))
def test_random_trees(tree: bytes, buffers: list[bytes]) -> None:
    try_decode(Encoded(tree, tuple(buffers)))


@given(st.lists(st.binary(max_size=200), max_size=4))
def test_random_frames(frames: list[bytes]) -> None:
    message = try_frames(frames)
    if message is not None and hasattr(message, "payload"):
        try_decode(message.payload)


tree_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=8)
    | st.binary(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=5)
        | st.dictionaries(st.text(max_size=3), inner, max_size=3)
        | st.builds(
            lambda code, fields: [msgpack.ExtType(code, b""), *fields],
            st.sampled_from(list(Tag)),
            st.lists(inner, max_size=7),
        )
    ),
    max_leaves=15,
)


@settings(max_examples=400)
@given(tree_values, st.lists(st.binary(max_size=600), max_size=2))
def test_well_formed_trees_with_wrong_fields(tree: Any, buffers: list[bytes]) -> None:
    try_decode(Encoded(msgpack.packb(tree), tuple(buffers)))


@settings(max_examples=600)
@given(
    st.sampled_from(list(ENCODED)),
    st.integers(0, 2**31),
    st.integers(0, 7),
    st.sampled_from(["flip", "cut", "insert", "drop"]),
)
def test_damaged_values(name: str, position: int, bit: int, damage: str) -> None:
    encoded = ENCODED[name]
    tree = bytearray(encoded.tree)
    at = position % len(tree)
    buffers = list(encoded.buffers)
    if damage == "flip":
        tree[at] ^= 1 << bit
    elif damage == "cut":
        tree = tree[:at]
    elif damage == "insert":
        tree.insert(at, bit * 36)
    elif buffers:
        buffers.pop()
    try_decode(Encoded(bytes(tree), tuple(buffers)))


@settings(max_examples=400)
@given(st.sampled_from(list(MESSAGES)), st.integers(0, 2**31), st.integers(0, 7), st.booleans())
def test_damaged_messages(name: str, position: int, bit: int, cut: bool) -> None:
    frames = [bytearray(frame) for frame in to_frames(MESSAGES[name])]
    at = position % len(frames[0])
    if cut:
        del frames[0][at:]
    else:
        frames[0][at] ^= 1 << bit
    found = try_frames([bytes(frame) for frame in frames])
    if found is not None and hasattr(found, "payload"):
        try_decode(found.payload)


def ext(tag: Tag, *fields: object) -> bytes:
    return bytes(msgpack.packb(tagged(tag, *fields)))


HUGE = 2**60
BOMBS = {
    "array header": b"\xdd\xff\xff\xff\xff",
    "map header": b"\xdf\xff\xff\xff\xff",
    "bin header": b"\xc6\xff\xff\xff\xff",
    "nested array headers": b"\xdd\x00\xff\xff\xff" * 1000 + b"\xc0" * 20_000_000,
    "deep nesting": b"\x91" * 100_000 + b"\xc0",
    "ndarray": ext(Tag.NDARRAY, "<f4", [HUGE], b"1234"),
    "ndarray of two dimensions": ext(Tag.NDARRAY, "<f4", [2**32, 2**32], b""),
    "ndarray with zero and huge": ext(Tag.NDARRAY, "<f4", [0, HUGE, HUGE], b""),
    "ndarray of no-size type": ext(Tag.NDARRAY, "<U0", [HUGE], b""),
    "ndarray of a huge type": ext(Tag.NDARRAY, "<U999999999", [1], b""),
    "negative shape": ext(Tag.NDARRAY, "<f4", [-1, -1], b"1234"),
    "structured dtype": ext(Tag.NDARRAY, "f4,f4", [1], b"12345678"),
    "object dtype": ext(Tag.NDARRAY, "|O", [1], b"12345678"),
    "object array": ext(Tag.OBJECT_ARRAY, [HUGE], []),
    "tensor": ext(Tag.TENSOR, "float32", [HUGE], b"1234"),
    "tensor of unknown dtype": ext(Tag.TENSOR, "float3", [1], b"1234"),
    "quantized tensor": ext(Tag.TENSOR, "qint8", [1], b"1"),
    "range as set": ext(Tag.SET, [1]),
    "size": ext(Tag.TORCH_SIZE, [-1]),
    "deque": ext(Tag.DEQUE, [1], -1),
    "decimal": ext(Tag.DECIMAL, "1e99999999999999999999999"),
    "tag alone": msgpack.packb({"a": msgpack.ExtType(1, b"")}),
    "tag as second": msgpack.packb([1, msgpack.ExtType(1, b"")]),
    "tag with content": msgpack.packb([msgpack.ExtType(1, b"x")]),
    "unknown tag": msgpack.packb([msgpack.ExtType(100, b"")]),
    "buffer that is not there": ext(Tag.BYTES, 0),
    "buffer by bool": ext(Tag.BYTES, True),
    "negative buffer": ext(Tag.BYTES, -1),
    "two values": b"\xc0\xc0",
    "unhashable key": msgpack.packb([msgpack.ExtType(Tag.PAIRS, b""), [[], 1]]),
    "odd pairs": ext(Tag.PAIRS, [1]),
    "partial of a number": ext(Tag.PARTIAL, 1, [], {}),
    "default dict of a number": ext(Tag.DEFAULT_DICT, 1, {}),
    "enum that is none": ext(Tag.ENUM, "builtins:int", "x"),
    "dataclass that is none": ext(Tag.DATACLASS, "builtins:int", {}),
    "named tuple that is none": ext(Tag.NAMED_TUPLE, "builtins:tuple", []),
    "model that is none": ext(Tag.PYDANTIC, "builtins:int", {}, [], None, None),
}


@pytest.mark.parametrize("name", BOMBS)
def test_bombs_raise_and_allocate_nothing(name: str) -> None:
    try_decode(encode([np.zeros(1), torch.zeros(1)]))  # what is loaded lazily is loaded now
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(DecodeError):
        decode(Encoded(BOMBS[name]), imports=POLICY)
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib
    assert grown_kib < (len(BOMBS[name]) >> 10) + 50_000


def test_bombs_in_the_envelope() -> None:
    for body in (
        b"\xdd\x00\xff\xff\xff" * 1000 + b"\xc0" * 1_000_000,
        b"\xa1x" + b"\x91" * 50_000,
        b"\xdf\xff\xff\xff\xff",
    ):
        for kind in range(1, 20):
            assert try_frames([b"\x9c\x01" + bytes((kind,)) + body]) is None


def test_a_range_that_lies_about_its_length_costs_nothing() -> None:
    assert len(decode(Encoded(ext(Tag.RANGE, 0, HUGE, 1)))) == HUGE


def test_buffers_are_used_once_in_order_and_all() -> None:
    two = encode([b"x" * 1000, b"y" * 1000])
    assert decode(two) == [b"x" * 1000, b"y" * 1000]
    for buffers in (two.buffers[:1], (*two.buffers, b"z"), ()):
        with pytest.raises(DecodeError):
            decode(Encoded(two.tree, tuple(buffers)))
    swapped = msgpack.packb([tagged(Tag.BYTES, 1), tagged(Tag.BYTES, 0)])
    twice = msgpack.packb([tagged(Tag.BYTES, 0), tagged(Tag.BYTES, 0)])
    for tree in (swapped, twice):
        with pytest.raises(DecodeError, match="is due"):
            decode(Encoded(tree, two.buffers))


def jagged_with(**changes: Any) -> Encoded:
    """A jagged tensor of rows 1 and 2 with some of its parts replaced."""
    parts: dict[str, Any] = {
        "values": np.zeros((3, 2), "f4"),
        "offsets": [0, 1, 3],
        "lengths": None,
        "idx": 1,
        "lo": 1,
        "hi": 2,
    }
    parts.update(changes)

    def tensor(array: Any, name: str) -> object:
        data = np.asarray(array, "f4" if name == "float32" else "i8")
        return tagged(Tag.TENSOR, name, list(data.shape), data.tobytes())

    offsets = parts["offsets"] if isinstance(parts["offsets"], int) else tensor(parts["offsets"], "int64")
    lengths = None if parts["lengths"] is None else tensor(parts["lengths"], "int64")
    node = tagged(
        Tag.JAGGED, tensor(parts["values"], "float32"), offsets, lengths, parts["idx"], parts["lo"], parts["hi"]
    )
    return Encoded(msgpack.packb(node))


def test_offsets_of_jagged_tensors_are_checked() -> None:
    assert decode(jagged_with()).is_nested
    for changes in (
        {"offsets": [1, 1, 3]},
        {"offsets": [0, 2, 1, 3]},
        {"offsets": [0, 1, 4]},
        {"offsets": [0, 1, 2]},
        {"offsets": []},
        {"offsets": [[0, 1, 3]]},
        {"offsets": 0},
        {"offsets": -1},
        {"lengths": [1]},
        {"lengths": [1, 9]},
        {"lengths": [-1, 1]},
        {"idx": 0},
        {"idx": 3},
        {"lo": 0},
        {"hi": HUGE},
    ):
        with pytest.raises(DecodeError):
            decode(jagged_with(**changes))


class Boom:
    def __reduce__(self) -> tuple[Any, ...]:
        return (__import__, ("antigravity",))


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_pickle_is_refused_and_imports_nothing(protocol: int) -> None:
    data = pickle.dumps(Boom(), protocol)
    before = set(sys.modules)
    assert try_frames([data]) is None
    assert not try_decode(Encoded(data))
    assert not try_decode(Encoded(msgpack.packb([msgpack.ExtType(Tag.REFERENCE, b""), "pickle:loads"])))
    assert "antigravity" not in set(sys.modules) - before


def test_every_tag_has_a_reader() -> None:
    for tag in Tag:
        try_decode(Encoded(msgpack.packb([msgpack.ExtType(tag, b"")])))
    assert {int(tag) for tag in Tag} == set(READERS)


def test_timestamps_of_msgpack_are_no_type_of_ours() -> None:
    stamp = b"\xd6\xff" + struct.pack(">I", 5)
    assert decode(Encoded(stamp)) == 5.0
