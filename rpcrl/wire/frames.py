"""How does a message become frames?

Frame 0, the envelope, MUST be one msgpack array ``[PROTOCOL_VERSION, kind, fields …]`` with the fields in the order
of the message's dataclass; a message with a payload ends with the payload's tree, spliced in as it was encoded
(``header`` costs microseconds and is made per peer, the payload is encoded once). The other frames MUST be the
payload's buffers in order; a message without a payload has none. Nested records (``CallId``, ``FailureInfo``,
``WorkerStart``) are arrays of their fields. A receiver MUST look at the version first and refuse another with
ProtocolMismatchError; it answers every other violation with DecodeError. A kind's number never changes its meaning.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import UnionType
from typing import Any

import msgpack

from rpcrl.errors import DecodeError, EncodeError, ProtocolMismatchError
from rpcrl.wire import messages
from rpcrl.wire.messages import PROTOCOL_VERSION, Buffer, Encoded, Message

__all__ = ["KINDS", "FrameLimits", "from_frames", "to_frames"]

Frame = Buffer

KINDS: dict[int, type] = {
    1: messages.Hello,
    2: messages.Welcome,
    3: messages.Ready,
    4: messages.Call,
    5: messages.Result,
    6: messages.Failure,
    7: messages.Probe,
    8: messages.Status,
    9: messages.Shutdown,
    10: messages.StartWorkers,
    11: messages.StopWorkers,
    12: messages.WorkerStarted,
    13: messages.WorkerExited,
    14: messages.WorkerOutput,
}


@dataclass(frozen=True)
class FrameLimits:
    """Bounds that a received message must keep."""

    max_buffers: int = 1 << 16
    max_envelope_bytes: int = 1 << 30


DEFAULT_LIMITS = FrameLimits()
_SCAN_BYTES = 4096

Check = Callable[[Any], Any]
"""Turns what msgpack read into a field's value; raises DecodeError."""


def _exact(*types: type) -> Check:
    def check(value: Any) -> Any:
        if type(value) not in types:
            raise DecodeError(f"a {type(value).__qualname__} where {' or '.join(t.__qualname__ for t in types)} is due")
        return value

    return check


def _float(value: Any) -> float:
    if type(value) not in (float, int):
        raise DecodeError(f"a {type(value).__qualname__} where a number is due")
    return float(value)


def _tuple_of(check: Check) -> Check:
    def read(value: Any) -> tuple[Any, ...]:
        if type(value) is not list:
            raise DecodeError(f"a {type(value).__qualname__} where an array is due")
        return tuple([check(each) for each in value])

    return read


def _map_of(key: Check, item: Check) -> Check:
    def read(value: Any) -> dict[Any, Any]:
        if type(value) is not dict:
            raise DecodeError(f"a {type(value).__qualname__} where a map is due")
        return {key(name): item(each) for name, each in value.items()}

    return read


def _record(cls: type) -> Check:
    checks = _checks(cls)

    def read(value: Any) -> Any:
        if type(value) is not list or len(value) != len(checks):
            raise DecodeError(f"a {cls.__name__} is an array of {len(checks)} fields")
        return cls(*[check(each) for (_, check), each in zip(checks, value, strict=True)])

    return read


def _check_of(hint: Any) -> Check:
    """Return the check of one field's annotation."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (UnionType, typing.Union):
        return _exact(*args)
    if origin is tuple:
        return _tuple_of(_check_of(args[0]))
    if origin is Mapping:
        return _map_of(_check_of(args[0]), _check_of(args[1]))
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return _record(hint)
    return _float if hint is float else _exact(hint)


def _checks(cls: type) -> list[tuple[str, Check]]:
    """Return (field, check) of every field but the payload, which must come last in the envelope."""
    hints = typing.get_type_hints(cls)
    return [(field.name, _check_of(hints[field.name])) for field in dataclasses.fields(cls) if field.name != "payload"]


_NUMBERS = {cls: number for number, cls in KINDS.items()}
_CHECKS = {cls: _checks(cls) for cls in KINDS.values()}
_HAS_PAYLOAD = {cls: any(field.name == "payload" for field in dataclasses.fields(cls)) for cls in KINDS.values()}


def to_frames(message: Message) -> list[Frame]:
    """Return the frames of a message: the envelope and the payload's buffers. Raises EncodeError."""
    cls = type(message)
    number = _NUMBERS.get(cls)
    if number is None:
        raise EncodeError(f"{cls.__qualname__} is not a message")
    head: list[object] = [PROTOCOL_VERSION, number]
    head += [_plain(getattr(message, name)) for name, _ in _CHECKS[cls]]
    packer = msgpack.Packer(unicode_errors="surrogatepass", buf_size=512)
    try:
        packed: bytes = packer.pack(head)
    except (TypeError, ValueError, OverflowError) as error:
        raise EncodeError(f"a field of {cls.__name__} does not fit its message: {error}") from error
    if not _HAS_PAYLOAD[cls]:
        return [packed]
    payload: Encoded = message.payload  # type: ignore[union-attr]
    # An array of fewer than 16 elements has a head of one byte, and every message has fewer: make it one longer.
    return [
        b"".join((bytes((0x90 | (len(head) + 1),)), memoryview(packed)[1:], payload.tree)),
        *payload.buffers,
    ]


def _plain(value: Any) -> Any:
    cls = type(value)
    if cls in (str, int, float, bool, bytes, type(None)):
        return value
    if dataclasses.is_dataclass(value):
        return [_plain(getattr(value, name)) for name in cls.__dataclass_fields__]
    if isinstance(value, Mapping):
        return dict(value)
    return [_plain(each) for each in value] if isinstance(value, (tuple, list)) else value


def from_frames(frames: Sequence[Frame], *, limits: FrameLimits = DEFAULT_LIMITS) -> Message:
    """Return the message of these frames; a payload stays encoded and refers to the frames.

    Raises ProtocolMismatchError for another version, DecodeError for everything else that is wrong.
    """
    if not frames:
        raise DecodeError("a message without frames")
    if len(frames) - 1 > limits.max_buffers:
        raise DecodeError(f"a message with {len(frames) - 1} buffers; the limit is {limits.max_buffers}")
    envelope = frames[0]
    size = memoryview(envelope).nbytes
    if size > limits.max_envelope_bytes:
        raise DecodeError(f"an envelope of {size} bytes; the limit is {limits.max_envelope_bytes}")
    try:
        return _read(bytes(envelope), tuple(frames[1:]))
    except (DecodeError, ProtocolMismatchError):
        raise
    except Exception as error:
        raise DecodeError(f"not a valid envelope ({type(error).__name__}: {str(error)[:500]})") from error


def _reader(envelope: bytes) -> Any:
    """Return a reader of the envelope; its size bounds every count that the reader believes."""
    size = len(envelope)
    reader = msgpack.Unpacker(
        max_buffer_size=size, read_size=size, strict_map_key=False, unicode_errors="surrogatepass", timestamp=1
    )
    reader.feed(envelope)
    return reader


def _read(envelope: bytes, buffers: tuple[Frame, ...]) -> Message:
    size = len(envelope)
    reader = _reader(envelope)
    count = reader.read_array_header()
    version = reader.unpack()
    if type(version) is not int or version != PROTOCOL_VERSION:
        raise ProtocolMismatchError(
            f"the peer speaks version {version!r} of the wire format and this process version {PROTOCOL_VERSION};"
            " install the same rpcrl on both sides"
        )
    number = reader.unpack()
    cls = KINDS.get(number) if type(number) is int else None
    if cls is None:
        raise DecodeError(f"unknown kind of message {number!r:.100}")
    checks, has_payload = _CHECKS[cls], _HAS_PAYLOAD[cls]
    if count != 2 + len(checks) + has_payload:
        raise DecodeError(f"a {cls.__name__} with {count - 2} fields; it has {len(checks) + has_payload}")
    if size > _SCAN_BYTES:
        # Walking before building keeps nested arrays that claim more than there is from multiplying memory.
        scan = _reader(envelope)
        scan.read_array_header()
        for _ in range(2 + len(checks)):
            scan.skip()
    values = {name: check(reader.unpack()) for name, check in checks}
    end = reader.tell()
    if has_payload:
        if end == size:
            raise DecodeError(f"a {cls.__name__} without its payload")
        values["payload"] = Encoded(envelope[end:], buffers)
    elif end != size or buffers:
        raise DecodeError(f"a {cls.__name__} with {size - end} bytes and {len(buffers)} buffers too many")
    return typing.cast("Message", cls(**values))
