"""Does every value of the standard library come back as it was: same value, same type, own memory?"""

from __future__ import annotations

import functools
from collections import OrderedDict, defaultdict
from datetime import datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rpcrl.wire.codec import decode, encode, register_codec
from rpcrl.wire.messages import Encoded
from tests.unit.wire.samples import PARTIAL, POLICY, STANDARD_VALUES, Frozen, Model, Plain, WithCodec, double


def round_trip(value: Any) -> Any:
    return decode(encode(value, imports=POLICY), imports=POLICY)


def same(a: Any, b: Any) -> bool:
    """Equal, and of the same type all the way down."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return (
            all(same(x, y) for x, y in zip(a.keys(), b.keys(), strict=True))
            and all(same(x, y) for x, y in zip(a.values(), b.values(), strict=True))
            and len(a) == len(b)
        )
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return repr(a) == repr(b) if isinstance(a, float) else bool(a == b)


@pytest.mark.parametrize("name", STANDARD_VALUES)
def test_comes_back_the_same(name: str) -> None:
    value = STANDARD_VALUES[name]
    assert same(round_trip(value), value)
    assert same(round_trip([value, {"k": value}])[1]["k"], value)


def test_details_that_equality_does_not_see() -> None:
    zone = round_trip(STANDARD_VALUES["datetime zone"])
    assert isinstance(zone, datetime)
    assert (zone.fold, zone.utcoffset()) == (1, STANDARD_VALUES["datetime zone"].utcoffset())
    assert round_trip(defaultdict(None, {1: 2})).default_factory is None
    assert round_trip(STANDARD_VALUES["default dict"])["new"] == []
    assert round_trip(STANDARD_VALUES["deque"]).maxlen == 5
    assert list(round_trip(OrderedDict.fromkeys("cab"))) == ["c", "a", "b"]
    partial = round_trip(functools.partial(double, x=(1,)))
    assert (partial.func, partial.args, partial.keywords) == (double, (), {"x": (1,)})
    assert round_trip(PARTIAL)() == 6


def test_fields_are_set_and_no_constructor_runs() -> None:
    value = Plain("n")
    value.hidden = 9
    assert round_trip(value).hidden == 9
    bad = Frozen(1)
    object.__setattr__(bad, "value", -1)  # __post_init__ would refuse it
    assert round_trip(bad).value == -1


def test_pydantic_models_keep_extra_private_and_set_fields() -> None:
    model = Model(number=1, more=2)
    model._secret = 8
    back = round_trip(model)
    assert back.model_fields_set == {"number", "more"}
    assert (back.more, back._secret, back.inner) == (2, 8, {})
    assert back == model


def test_omegaconf_containers() -> None:
    omegaconf = pytest.importorskip("omegaconf")
    config = omegaconf.OmegaConf.create({"a": {"b": "${c}", "d": [1, 2]}, "c": 5, "m": "???"})
    omegaconf.OmegaConf.set_readonly(config, True)
    back = round_trip(config)
    assert type(back) is omegaconf.DictConfig
    assert back.a.b == 5
    assert omegaconf.OmegaConf.is_missing(back, "m")
    assert omegaconf.OmegaConf.is_readonly(back)
    assert omegaconf.OmegaConf.to_container(back) == omegaconf.OmegaConf.to_container(config)
    # a part of it: what it refers to stays behind, so its values go
    assert round_trip(config.a) == {"b": 5, "d": [1, 2]}
    assert type(round_trip(config.a.d)) is omegaconf.ListConfig


def register_with_codec() -> None:
    register_codec(
        WithCodec,
        name="tests.WithCodec",
        encode=lambda v: tuple(v.values),
        decode=lambda p: WithCodec([*p]),
        replace=True,
    )


def test_registered_codec() -> None:
    register_with_codec()
    assert round_trip({"x": [WithCodec([1, 2])]}) == {"x": [WithCodec([1, 2])]}


def test_decoding_twice_gives_two_values_and_leaves_the_encoded_one_alone() -> None:
    encoded = encode({"raw": bytearray(b"x" * 5000)})
    first, second = decode(encoded), decode(encoded)
    first["raw"][:] = b"y" * 5000
    assert second["raw"] == b"x" * 5000
    assert decode(encoded)["raw"] == b"x" * 5000


def test_encoding_never_aliases_the_callers_memory_after_decoding() -> None:
    source = bytearray(b"x" * 5000)
    value = decode(encode(source))
    source[:] = b"y" * 5000
    assert value == b"x" * 5000


def test_long_bytes_are_buffers_without_a_copy_and_short_ones_stay_in_the_tree() -> None:
    data = bytes(10_000)
    encoded = encode([data, b"short"])
    assert len(encoded.buffers) == 1
    assert memoryview(encoded.buffers[0]).obj is data
    assert len(encoded.tree) < 50
    assert encoded.num_bytes == len(encoded.tree) + 10_000


def test_received_bytearrays_are_handed_on_without_a_copy() -> None:
    encoded = encode(bytearray(b"x" * 10_000))
    frame = bytearray(encoded.buffers[0])
    assert decode(Encoded(encoded.tree, (frame,))) is frame


keys = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(), st.binary())
scalars = st.one_of(
    keys, st.complex_numbers(allow_nan=False), st.dates(), st.datetimes(), st.timedeltas(), st.decimals(allow_nan=False)
)
hashables = st.recursive(keys, lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=3), max_leaves=4)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.tuples(inner, inner)
        | st.dictionaries(hashables, inner, max_size=4)
        | st.sets(hashables, max_size=3)
    ),
    max_leaves=20,
)


@given(values)
def test_any_nesting_comes_back_the_same(value: Any) -> None:
    assert same(round_trip(value), value)
