"""How does a message become frames?

Frame 0, the envelope, MUST be one msgpack array ``[PROTOCOL_VERSION, kind, fields …]`` with the fields in the order
of the message's dataclass; a message with a payload ends with the payload's tree as msgpack bin, spliced in as it was
encoded (the head costs microseconds and is made per peer, the payload is encoded once). The other frames MUST be the
payload's buffers in order; a message without a payload has none. Nested records (``CallId``, ``FailureInfo``,
``WorkerStart``) are arrays of their fields. A receiver MUST look at the version first and refuse another with
ProtocolMismatchError (so every later version MUST stay an array that begins with its number); it answers every other
violation with DecodeError. A kind's number never changes its meaning.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import UnionType
from typing import Any

import msgpack

from rpcrl.errors import DecodeError, EncodeError, MessageTooLargeError, ProtocolMismatchError
from rpcrl.shm.buffers import Buffer, view_of
from rpcrl.wire import messages
from rpcrl.wire.messages import PROTOCOL_VERSION, Encoded, Message

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
    15: messages.Cancel,
    16: messages.AllowImports,
    17: messages.Introduce,
    18: messages.ExpectPeer,
    19: messages.PeerExpected,
    20: messages.Introduction,
    21: messages.GroupEnded,
    22: messages.ForgetPeer,
    23: messages.Free,
    24: messages.AskProgress,
    25: messages.Progress,
}


@dataclass(frozen=True)
class FrameLimits:
    """Bounds that a received message must keep."""

    max_buffers: int = 1 << 16
    max_envelope_bytes: int = 1 << 30


DEFAULT_LIMITS = FrameLimits()
_SCAN_BYTES = 4096
_HEAD_ROOM_BYTES = 1 << 20
"""What the other fields of an envelope may take."""

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


Plain = Callable[[Any], Any]
"""Turns a field's value into what msgpack carries."""


def _plain_of(hint: Any) -> Plain | None:
    """Return how a field of this annotation is written; None where msgpack carries it as it is (tuples too)."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Mapping:
        return dict
    if origin is tuple:
        inner = _plain_of(args[0])
        return None if inner is None else lambda values: [inner(value) for value in values]
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        writers = _writers(hint)

        def write(record: Any) -> list[Any]:
            return [getattr(record, name) if plain is None else plain(getattr(record, name)) for name, plain in writers]

        return write
    return None


def _writers(cls: type) -> list[tuple[str, Plain | None]]:
    hints = typing.get_type_hints(cls)
    return [(field.name, _plain_of(hints[field.name])) for field in dataclasses.fields(cls) if field.name != "payload"]


_WRITERS = {cls: _writers(cls) for cls in KINDS.values()}
_NUMBERS = {cls: number for number, cls in KINDS.items()}
_CHECKS = {cls: _checks(cls) for cls in KINDS.values()}
_HAS_PAYLOAD = {cls: any(field.name == "payload" for field in dataclasses.fields(cls)) for cls in KINDS.values()}


def to_frames(message: Message) -> list[Frame]:
    """Return the frames of a message: the envelope and the payload's buffers.

    Raises EncodeError, and MessageTooLargeError for what the receiver would refuse.
    """
    cls = type(message)
    number = _NUMBERS.get(cls)
    if number is None:
        raise EncodeError(f"{cls.__qualname__} is not a message")
    head: list[object] = [PROTOCOL_VERSION, number]
    try:
        for name, plain in _WRITERS[cls]:
            value = getattr(message, name)
            head.append(value if plain is None else plain(value))
        packer = msgpack.Packer(unicode_errors="surrogatepass", buf_size=512)
        packed: bytes = packer.pack(head)
    except (TypeError, ValueError, OverflowError, AttributeError) as error:
        raise EncodeError(f"a field of {cls.__name__} does not fit its message: {error}") from error
    if not _HAS_PAYLOAD[cls]:
        return [packed]
    payload: Encoded = message.payload  # type: ignore[union-attr]
    _check_size(payload)
    # An array of fewer than 16 elements has a head of one byte, and every message has fewer: make it one longer.
    head_byte = bytes((0x90 | (len(head) + 1),))
    tree = payload.tree
    return [b"".join((head_byte, memoryview(packed)[1:], _bin_head(len(tree)), tree)), *payload.buffers]


def _check_size(payload: Encoded) -> None:
    """Raise MessageTooLargeError for what a receiver would refuse: it could not even say so to the caller."""
    limits = DEFAULT_LIMITS
    if len(payload.buffers) > limits.max_buffers:
        raise MessageTooLargeError(
            f"{len(payload.buffers)} arrays and tensors of 512 bytes and more in one message; the limit is "
            f"{limits.max_buffers}, and nothing was sent. Stack them into fewer and longer ones, or make several calls"
        )
    if len(payload.tree) > limits.max_envelope_bytes - _HEAD_ROOM_BYTES:
        raise MessageTooLargeError(
            f"{len(payload.tree)} bytes of Python values in one message; the limit is {limits.max_envelope_bytes}, and "
            "nothing was sent. Send arrays and tensors instead of lists of Python objects, or make several calls"
        )


def _bin_head(size: int) -> bytes:
    if size < 1 << 8:
        return bytes((0xC4, size))
    if size < 1 << 16:
        return b"\xc5" + size.to_bytes(2, "big")
    if size < 1 << 32:
        return b"\xc6" + size.to_bytes(4, "big")
    raise EncodeError(
        f"a payload's tree of {size} bytes is beyond 4 GiB: send arrays and tensors instead of lists of Python objects"
    )


def from_frames(frames: Sequence[Frame], *, limits: FrameLimits = DEFAULT_LIMITS) -> Message:
    """Return the message of these frames; a payload stays encoded and refers to the frames.

    Raises ProtocolMismatchError for another version, DecodeError for everything else that is wrong.
    """
    if not frames:
        raise DecodeError("a message without frames")
    if len(frames) - 1 > limits.max_buffers:
        raise DecodeError(f"a message with {len(frames) - 1} buffers; the limit is {limits.max_buffers}")
    envelope = view_of(frames[0])
    size = envelope.nbytes
    if size > limits.max_envelope_bytes:
        raise DecodeError(f"an envelope of {size} bytes; the limit is {limits.max_envelope_bytes}")
    try:
        return _read(bytes(envelope), tuple(frames[1:]))
    except (DecodeError, ProtocolMismatchError):
        raise
    except Exception as error:
        raise DecodeError(f"not a valid envelope ({type(error).__name__}: {str(error)[:500]})") from error


def _read(envelope: bytes, buffers: tuple[Frame, ...]) -> Message:
    if len(envelope) > _SCAN_BYTES:
        # Walking before building keeps nested arrays that claim more than there is from multiplying memory.
        scan = msgpack.Unpacker(max_buffer_size=len(envelope), read_size=len(envelope))
        scan.feed(envelope)
        scan.skip()
    fields = msgpack.unpackb(envelope, strict_map_key=False, unicode_errors="surrogatepass", timestamp=1)
    if type(fields) is not list or len(fields) < 2:
        raise DecodeError("an envelope that is no array of a version, a kind and fields")
    version, number = fields[:2]
    if type(version) is not int or version != PROTOCOL_VERSION:
        raise ProtocolMismatchError(
            f"the peer speaks version {version!r:.100} of the wire format and this process version {PROTOCOL_VERSION};"
            " install the same rpcrl on both sides"
        )
    cls = KINDS.get(number) if type(number) is int else None
    if cls is None:
        raise DecodeError(f"unknown kind of message {number!r:.100}")
    checks, has_payload = _CHECKS[cls], _HAS_PAYLOAD[cls]
    if len(fields) != 2 + len(checks) + has_payload:
        raise DecodeError(f"a {cls.__name__} with {len(fields) - 2} fields; it has {len(checks) + has_payload}")
    values = {name: check(value) for (name, check), value in zip(checks, fields[2:], strict=False)}
    if has_payload:
        if type(fields[-1]) is not bytes:
            raise DecodeError(f"a {cls.__name__} whose payload is a {type(fields[-1]).__qualname__}; it must be bin")
        values["payload"] = Encoded(fields[-1], buffers)
    elif buffers:
        raise DecodeError(f"a {cls.__name__} with {len(buffers)} buffers; it has no payload")
    return typing.cast("Message", cls(**values))
