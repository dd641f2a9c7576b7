"""How do the types of the standard library travel, and classes and functions of the user's modules?"""

from __future__ import annotations

import dataclasses
import functools
import uuid
from collections import OrderedDict, defaultdict, deque
from datetime import date, datetime, time, timedelta, timezone, tzinfo
from decimal import Decimal
from enum import Enum, Flag
from pathlib import Path, PosixPath, PurePath, PurePosixPath, PureWindowsPath
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any
from zoneinfo import ZoneInfo

from rpcrl.errors import DecodeError, EncodeError
from rpcrl.wire.imports import path_of, resolve
from rpcrl.wire.tree import INLINE_BYTES, Decoder, Encoder, Tag, Unencodable, reads, tagged, writes

__all__ = ["expect", "read_class", "write_class", "write_other"]


def expect(node: list[Any], *types: type | tuple[type, ...]) -> tuple[Any, ...]:
    """Return the fields of a tagged list after checking their number and exact types; ``object`` fits any."""
    if len(node) != len(types) + 1:
        raise DecodeError(f"tag {node[0].code} with {len(node) - 1} fields; it has {len(types)}")
    for value, kind in zip(node[1:], types, strict=True):
        kinds = kind if isinstance(kind, tuple) else (kind,)
        if type(value) not in kinds and object not in kinds:
            raise DecodeError(f"tag {node[0].code} with a field of type {type(value).__qualname__}")
    return tuple(node[1:])


# --- containers ------------------------------------------------------------------------------------------------


@writes(list)
def _write_list(encoder: Encoder, value: list[Any]) -> object:
    return encoder.sequence(value, value)


@writes(dict)
def _write_dict(encoder: Encoder, value: dict[Any, Any]) -> object:
    return encoder.mapping(value, value)


@writes(tuple)
def _write_tuple(encoder: Encoder, value: tuple[Any, ...]) -> object:
    return tagged(Tag.TUPLE, *encoder.sequence(value, value))


@reads(Tag.TUPLE)
def _read_tuple(decoder: Decoder, node: list[Any]) -> object:
    return tuple(node[1:])


@writes(set, frozenset)
def _write_set(encoder: Encoder, value: set[Any] | frozenset[Any]) -> object:
    return tagged(Tag.SET if type(value) is set else Tag.FROZENSET, *encoder.sequence(value, value))


@reads(Tag.SET)
def _read_set(decoder: Decoder, node: list[Any]) -> object:
    return set(node[1:])


@reads(Tag.FROZENSET)
def _read_frozenset(decoder: Decoder, node: list[Any]) -> object:
    return frozenset(node[1:])


@reads(Tag.PAIRS)
def _read_pairs(decoder: Decoder, node: list[Any]) -> object:
    (flat,) = expect(node, list)
    return dict(zip(flat[::2], flat[1::2], strict=True))


@writes(OrderedDict)
def _write_ordered(encoder: Encoder, value: OrderedDict[Any, Any]) -> object:
    return tagged(Tag.ORDERED_DICT, encoder.mapping(value, value))


@reads(Tag.ORDERED_DICT)
def _read_ordered(decoder: Decoder, node: list[Any]) -> object:
    return OrderedDict(*expect(node, dict))


@writes(defaultdict)
def _write_default_dict(encoder: Encoder, value: defaultdict[Any, Any]) -> object:
    return tagged(Tag.DEFAULT_DICT, encoder.node(value.default_factory), encoder.mapping(value, value))


@reads(Tag.DEFAULT_DICT)
def _read_default_dict(decoder: Decoder, node: list[Any]) -> object:
    return defaultdict(*expect(node, object, dict))


@writes(deque)
def _write_deque(encoder: Encoder, value: deque[Any]) -> object:
    return tagged(Tag.DEQUE, encoder.sequence(value, value), value.maxlen)


@reads(Tag.DEQUE)
def _read_deque(decoder: Decoder, node: list[Any]) -> object:
    return deque(*expect(node, list, (int, type(None))))


# --- scalars ---------------------------------------------------------------------------------------------------


@reads(Tag.BIG_INT)
def _read_big_int(decoder: Decoder, node: list[Any]) -> object:
    return int.from_bytes(expect(node, bytes)[0], "little", signed=True)


@writes(complex)
def _write_complex(encoder: Encoder, value: complex) -> object:
    return tagged(Tag.COMPLEX, value.real, value.imag)


@reads(Tag.COMPLEX)
def _read_complex(decoder: Decoder, node: list[Any]) -> object:
    return complex(*expect(node, float, float))


@writes(bytes)
def _write_bytes(encoder: Encoder, value: bytes) -> object:
    return value if len(value) < INLINE_BYTES else tagged(Tag.BYTES, encoder.buffer(value))


@reads(Tag.BYTES)
def _read_bytes(decoder: Decoder, node: list[Any]) -> object:
    return bytes(decoder.take(*expect(node, (int, bytes))))


@writes(bytearray)
def _write_bytearray(encoder: Encoder, value: bytearray) -> object:
    return tagged(Tag.BYTEARRAY, encoder.buffer(memoryview(value)))


@reads(Tag.BYTEARRAY)
def _read_bytearray(decoder: Decoder, node: list[Any]) -> object:
    return decoder.take(*expect(node, (int, bytes)))


@writes(slice)
def _write_slice(encoder: Encoder, value: slice) -> object:
    return tagged(Tag.SLICE, *encoder.sequence(value, (value.start, value.stop, value.step)))


@reads(Tag.SLICE)
def _read_slice(decoder: Decoder, node: list[Any]) -> object:
    return slice(*expect(node, object, object, object))


@writes(range)
def _write_range(encoder: Encoder, value: range) -> object:
    return tagged(Tag.RANGE, value.start, value.stop, value.step)


@reads(Tag.RANGE)
def _read_range(decoder: Decoder, node: list[Any]) -> object:
    return range(*expect(node, int, int, int))


@writes(type(...))
def _write_ellipsis(encoder: Encoder, value: object) -> object:
    return tagged(Tag.ELLIPSIS)


@reads(Tag.ELLIPSIS)
def _read_ellipsis(decoder: Decoder, node: list[Any]) -> object:
    expect(node)
    return ...


@writes(Decimal)
def _write_decimal(encoder: Encoder, value: Decimal) -> object:
    return tagged(Tag.DECIMAL, str(value))


@reads(Tag.DECIMAL)
def _read_decimal(decoder: Decoder, node: list[Any]) -> object:
    return Decimal(*expect(node, str))


@writes(uuid.UUID)
def _write_uuid(encoder: Encoder, value: uuid.UUID) -> object:
    return tagged(Tag.UUID, value.bytes)


@reads(Tag.UUID)
def _read_uuid(decoder: Decoder, node: list[Any]) -> object:
    return uuid.UUID(bytes=expect(node, bytes)[0])


# --- time and paths ---------------------------------------------------------------------------------------------


def _write_zone(value: object, zone: tzinfo | None) -> object:
    """None, microseconds east of UTC, or a zone's key."""
    if zone is None:
        return None
    if type(zone) is timezone:
        return zone.utcoffset(None) // timedelta(microseconds=1)
    if type(zone) is ZoneInfo and zone.key:
        return zone.key
    remedy = "use datetime.timezone or zoneinfo.ZoneInfo, or convert with .astimezone(timezone.utc)"
    raise Unencodable(value, f"its time zone is a {type(zone).__qualname__}", remedy)


def _read_zone(zone: int | str | None) -> tzinfo | None:
    if zone is None:
        return None
    return timezone(timedelta(microseconds=zone)) if isinstance(zone, int) else ZoneInfo(zone)


_ZONE = (int, str, type(None))


@writes(datetime)
def _write_datetime(encoder: Encoder, value: datetime) -> object:
    zone = _write_zone(value, value.tzinfo)
    return tagged(Tag.DATETIME, value.replace(tzinfo=None).isoformat(), value.fold, zone)


@reads(Tag.DATETIME)
def _read_datetime(decoder: Decoder, node: list[Any]) -> object:
    text, fold, zone = expect(node, str, int, _ZONE)
    return datetime.fromisoformat(text).replace(fold=fold, tzinfo=_read_zone(zone))


@writes(date)
def _write_date(encoder: Encoder, value: date) -> object:
    return tagged(Tag.DATE, value.isoformat())


@reads(Tag.DATE)
def _read_date(decoder: Decoder, node: list[Any]) -> object:
    return date.fromisoformat(*expect(node, str))


@writes(time)
def _write_time(encoder: Encoder, value: time) -> object:
    zone = _write_zone(value, value.tzinfo)
    return tagged(Tag.TIME, value.replace(tzinfo=None).isoformat(), value.fold, zone)


@reads(Tag.TIME)
def _read_time(decoder: Decoder, node: list[Any]) -> object:
    text, fold, zone = expect(node, str, int, _ZONE)
    return time.fromisoformat(text).replace(fold=fold, tzinfo=_read_zone(zone))


@writes(timedelta)
def _write_timedelta(encoder: Encoder, value: timedelta) -> object:
    return tagged(Tag.TIMEDELTA, value.days, value.seconds, value.microseconds)


@reads(Tag.TIMEDELTA)
def _read_timedelta(decoder: Decoder, node: list[Any]) -> object:
    return timedelta(*expect(node, int, int, int))


_PATHS: dict[str, type[PurePath]] = {"": Path, "posix": PurePosixPath, "windows": PureWindowsPath}


@writes(PosixPath, PurePosixPath, PureWindowsPath)
def _write_path(encoder: Encoder, value: PurePath) -> object:
    kind = "" if isinstance(value, Path) else "posix" if isinstance(value, PurePosixPath) else "windows"
    return tagged(Tag.PATH, kind, str(value))


@reads(Tag.PATH)
def _read_path(decoder: Decoder, node: list[Any]) -> object:
    kind, text = expect(node, str, str)
    return _PATHS[kind](text)


# --- what is named by import path ------------------------------------------------------------------------------


def write_class(encoder: Encoder, value: object, obj: Any) -> str:
    """Return the import path of ``obj`` (for ``value``'s sake) after checking that both sides may use it."""
    try:
        path = path_of(obj)
    except EncodeError as error:
        raise Unencodable(value, str(error)) from None
    if not encoder.imports.allows_path(path):
        module = path.partition(":")[0]
        raise Unencodable(value, f"this run does not allow {path}", encoder.imports.remedy(module))
    return path


def read_class(decoder: Decoder, path: str, base: type) -> Any:
    """Return the class that ``path`` names after checking that it is a ``base``."""
    cls = resolve(path, decoder.imports)
    if not isinstance(cls, type) or not issubclass(cls, base):
        raise DecodeError(f"{path} is no {base.__name__} class")
    return cls


@writes(type, FunctionType, BuiltinFunctionType, subclasses=True)
def _write_reference(encoder: Encoder, value: object) -> object:
    if isinstance(value, BuiltinFunctionType) and not isinstance(value.__self__, (type(None), type(dataclasses))):
        raise Unencodable(value, "it is a bound method", "send the object and the method's name")
    return tagged(Tag.REFERENCE, write_class(encoder, value, value))


@reads(Tag.REFERENCE)
def _read_reference(decoder: Decoder, node: list[Any]) -> object:
    (path,) = expect(node, str)
    return resolve(path, decoder.imports)


@writes(functools.partial)
def _write_partial(encoder: Encoder, value: functools.partial[Any]) -> object:
    fields = encoder.attributes(value, {"func": value.func, "args": list(value.args), "keywords": dict(value.keywords)})
    return tagged(Tag.PARTIAL, fields["func"], fields["args"], fields["keywords"])


@reads(Tag.PARTIAL)
def _read_partial(decoder: Decoder, node: list[Any]) -> object:
    function, args, keywords = expect(node, object, list, dict)
    return functools.partial(function, *args, **keywords)


@writes(Enum, subclasses=True)
def _write_enum(encoder: Encoder, value: Enum) -> object:
    path = write_class(encoder, value, type(value))
    if isinstance(value, Flag):
        return tagged(Tag.FLAG, path, encoder.node(value.value))
    return tagged(Tag.ENUM, path, value.name)


@reads(Tag.ENUM)
def _read_enum(decoder: Decoder, node: list[Any]) -> object:
    path, name = expect(node, str, str)
    return read_class(decoder, path, Enum)[name]


@reads(Tag.FLAG)
def _read_flag(decoder: Decoder, node: list[Any]) -> object:
    path, bits = expect(node, str, int)
    return read_class(decoder, path, Flag)(bits)


@reads(Tag.NAMED_TUPLE)
def _read_named_tuple(decoder: Decoder, node: list[Any]) -> object:
    path, values = expect(node, str, list)
    cls = read_class(decoder, path, tuple)
    if len(values) != len(cls._fields):
        raise DecodeError(f"{path} has {len(cls._fields)} fields; the message holds {len(values)}")
    return tuple.__new__(cls, values)


def _write_dataclass(encoder: Encoder, value: Any) -> object:
    path = write_class(encoder, value, type(value))
    names = [field.name for field in dataclasses.fields(value)]
    for name in names:
        if not hasattr(value, name):
            raise Unencodable(value, f"its field {name!r} has no value", "set it")
    return tagged(Tag.DATACLASS, path, encoder.attributes(value, {name: getattr(value, name) for name in names}))


@reads(Tag.DATACLASS)
def _read_dataclass(decoder: Decoder, node: list[Any]) -> object:
    path, values = expect(node, str, dict)
    cls = read_class(decoder, path, object)
    if not hasattr(cls, "__dataclass_fields__"):
        raise DecodeError(f"{path} is no dataclass")
    if {field.name for field in dataclasses.fields(cls)} != values.keys():
        raise DecodeError(f"the fields of {path} differ between sender and receiver: {', '.join(map(str, values))}")
    instance: Any = object.__new__(cls)
    for name, value in values.items():
        object.__setattr__(instance, name, value)
    return instance


@reads(Tag.CUSTOM)
def _read_custom(decoder: Decoder, node: list[Any]) -> object:
    name, plain = expect(node, str, object)
    read = decoder.customs.get(name)
    if read is None:
        raise DecodeError(f"no codec {name[:200]!r} here: register_codec must run on both sides")
    return read(plain)


_REMEDY = "register a codec for the type (rpcrl.wire.codec.register_codec) or send its data as dicts, lists and arrays"


def write_other(encoder: Encoder, value: Any) -> object:
    """Write a value whose type nobody registered: dataclasses and named tuples; everything else raises."""
    cls = type(value)
    if dataclasses.is_dataclass(cls):
        return _write_dataclass(encoder, value)
    if isinstance(value, tuple) and isinstance(getattr(cls, "_fields", None), tuple):
        return tagged(Tag.NAMED_TUPLE, write_class(encoder, value, cls), encoder.sequence(value, list(value)))
    if isinstance(value, MethodType):
        raise Unencodable(value, "it is a bound method", "send a function, or the object and the method's name")
    for base in (dict, list, tuple, set, str, bytes, int, float):
        if isinstance(value, base):
            remedy = f"convert it with {base.__name__}(…), or register a codec (rpcrl.wire.codec.register_codec)"
            raise Unencodable(value, f"it is a subclass of {base.__name__}, which would be lost", remedy)
    raise Unencodable(value, "its type has no codec", _REMEDY)
