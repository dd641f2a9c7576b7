"""How does a Python value look on the wire?

The format, version 1
---------------------
A value is *encoded* as one msgpack **tree** and zero or more raw **buffers**. A message is a list of frames: frame 0
is the envelope (see ``frames``) that ends with the tree, frames 1 … n are the buffers in order.

1. ``None``, ``bool``, 64-bit ``int``, ``float`` and ``str`` MUST be msgpack nil, bool, integer, float 64 and str;
   ``bytes`` of fewer than 512 bytes MUST be bin. A str MAY hold lone surrogates (UTF-8 with "surrogatepass").
2. A ``list`` MUST be a msgpack array of nodes; a ``dict`` whose keys are all of rule 1 (without bytes) MUST be a
   msgpack map in the dict's order, and a receiver MUST keep that order.
3. Every other value MUST be a **tagged list**: an array whose first element is an extension without content, whose
   code is a number of ``tree.Tag``; what follows depends on the tag. An extension MUST NOT stand anywhere else.
4. Raw bytes (of arrays, tensors, long bytes) of fewer than 512 bytes MUST be inline as bin, longer ones MUST be a
   buffer, and stand in the tree as the buffer's number. Buffers MUST be used in order, each exactly once.
5. Arrays and tensors are in C order with their dtype's own byte order (tensors: little-endian), and
   product(shape) × item size MUST equal the number of bytes.
6. Functions, classes and the classes of dataclasses, enums, named tuples and pydantic models are written as
   ``module:qualname``. A receiver MUST check its ``ImportPolicy`` before it imports anything, and MUST NOT call what
   it resolved, nor run ``__init__``: fields are set.
7. A sender MUST NOT nest containers more than 100 deep; a receiver MUST refuse what is nested more than 1024
   msgpack levels deep and MAY refuse earlier.
8. A receiver MUST answer any violation with DecodeError and drop the whole message. It MUST NOT reserve memory for
   content that is claimed but not there.

The same tensor twice is sent twice. A device is not kept: tensors travel by main memory and arrive on the CPU.
There is no pickle here, and no switch for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import msgpack

from rpcrl.errors import DecodeError, EncodeError
from rpcrl.traffic import count
from rpcrl.wire.imports import ImportPolicy
from rpcrl.wire.messages import Encoded
from rpcrl.wire.references import write_other
from rpcrl.wire.tree import WRITERS, Decoder, Encoder, Tag, Unencodable, tagged

__all__ = ["decode", "encode", "register_codec", "register_reader"]

T = TypeVar("T")

_SCAN_BYTES = 4096
"""Trees from this size on are walked without building anything before they are read, so that nested headers that
claim more than there is cannot multiply memory."""

_SHOWN_PARTS = 12

_customs: dict[str, Callable[[Any], object]] = {}


def encode(value: object, *, path: str | tuple[str, ...] = "value", imports: ImportPolicy | None = None) -> Encoded:
    """Return ``value`` in wire form. Buffers are views of the value's memory: send before you change it.

    ``path`` is what errors call the value; a tuple of names is for a tuple or list with as many elements, e.g.
    ``("args", "kwargs")`` gives ``args[1]["x"].field``. Raises EncodeError naming the place, the type and a remedy.
    """
    encoder = Encoder(imports if imports is not None else ImportPolicy(), write_other)
    try:
        tree = encoder.node(value)
    except Unencodable as error:
        raise EncodeError(_explain(error, path)) from error.__cause__
    packer = msgpack.Packer(
        default=_big_int, strict_types=True, unicode_errors="surrogatepass", buf_size=1024, autoreset=True
    )
    count(encodes=1)
    return Encoded(packer.pack(tree), tuple(encoder.buffers))


def decode(encoded: Encoded, *, imports: ImportPolicy | None = None) -> Any:
    """Return the value of ``encoded``: a new one, writable, that shares no memory with the sender.

    Buffers that are bytearrays are taken over, all others are copied. Raises DecodeError for everything that is not
    a valid value, whatever is wrong with it.
    """
    decoder = Decoder(encoded.buffers, imports if imports is not None else ImportPolicy(), _customs)
    try:
        if len(encoded.tree) > _SCAN_BYTES:
            _scan(encoded.tree)
        value = msgpack.unpackb(
            encoded.tree,
            ext_hook=decoder.mark,
            list_hook=decoder.collect,
            strict_map_key=False,
            unicode_errors="surrogatepass",
            timestamp=1,
        )
        decoder.finish()
    except DecodeError:
        raise
    except Exception as error:
        raise DecodeError(f"not a valid value ({type(error).__name__}: {str(error)[:500]})") from error
    return value


def register_codec(
    cls: type[T],
    *,
    name: str,
    encode: Callable[[T], object],
    decode: Callable[[Any], T],
    replace: bool = False,
) -> None:
    """Let values of exactly the type ``cls`` travel: ``encode`` gives a value that can, ``decode`` takes it back.

    Both sides register the same ``name``, e.g. in the module that defines the class. Raises EncodeError when the
    type or the name is taken; ``replace=True`` puts a new codec in its place.
    """
    if not replace and (name in _customs or cls in WRITERS):
        taken = f"the name {name!r}" if name in _customs else cls.__qualname__
        raise EncodeError(f"register_codec: {taken} has a codec already; pass replace=True to change it")

    def write(encoder: Encoder, value: T) -> object:
        try:
            plain = encode(value)
        except Exception as error:
            reason = f"its registered codec {name!r} failed: {type(error).__name__}: {error}"
            raise Unencodable(value, reason) from error
        if type(plain) is cls:
            raise Unencodable(value, f"its registered codec {name!r} returned the same type")
        encoder.enter(value)
        node = tagged(Tag.CUSTOM, name, encoder.node(plain))
        encoder.leave()
        return node

    _customs[name] = decode
    WRITERS[cls] = write


def register_reader(name: str, decode: Callable[[Any], object]) -> None:
    """Let values that were written under ``name`` be read here, before their class is loaded."""
    _customs[name] = decode


def _explain(error: Unencodable, path: str | tuple[str, ...]) -> str:
    parts = list(reversed(error.parts))
    if isinstance(path, tuple):
        place = "(" + ", ".join(path) + ")"
        if parts and parts[0][1:-1].isdigit() and int(parts[0][1:-1]) < len(path):
            place = path[int(parts[0][1:-1])]
            parts = parts[1:]
    else:
        place = path
    if len(parts) > _SHOWN_PARTS:
        parts = [*parts[:_SHOWN_PARTS], "…"]
    text = f"{place}{''.join(parts)} ({error.kind}) cannot be sent: {error.reason}"
    return f"{text}; {error.remedy}" if error.remedy else text


def _big_int(value: Any) -> object:
    """Write an int beyond 64 bits; msgpack asks here for nothing else."""
    if type(value) is not int:
        raise EncodeError(f"the codec left a {type(value).__qualname__} in the tree; this is a bug of rpcrl")
    size = value.bit_length() // 8 + 1
    return tagged(Tag.BIG_INT, value.to_bytes(size, "little", signed=True))


def _scan(tree: bytes) -> None:
    unpacker = msgpack.Unpacker(max_buffer_size=len(tree), read_size=len(tree))
    unpacker.feed(tree)
    unpacker.skip()
