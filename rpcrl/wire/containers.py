"""How do the types of the standard library travel: containers, scalars, times and paths?"""

from __future__ import annotations

import uuid
from collections import OrderedDict, defaultdict, deque
from datetime import date, datetime, time, timedelta, timezone, tzinfo
from decimal import Decimal
from pathlib import Path, PosixPath, PurePath, PurePosixPath, PureWindowsPath
from typing import Any
from zoneinfo import ZoneInfo

from rpcrl.errors import DecodeError
from rpcrl.wire.tree import INLINE_BYTES, Decoder, Encoder, Tag, Unencodable, reads, tagged, writes

__all__ = ["expect"]


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
    taken = decoder.take(*expect(node, (int, bytes)))
    return taken if type(taken) is bytearray else bytearray(taken)


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
