"""How do functions, classes, dataclasses, enums and named tuples travel? By import path, never as code.

Fields are read and set as they are: neither ``__init__`` nor ``__post_init__`` of the user's class runs on the way.
"""

from __future__ import annotations

import dataclasses
import functools
from enum import Enum, Flag
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

from rpcrl.errors import DecodeError, EncodeError
from rpcrl.wire.containers import expect
from rpcrl.wire.imports import path_of, resolve
from rpcrl.wire.tree import Decoder, Encoder, Tag, Unencodable, reads, tagged, writes

__all__ = ["read_class", "write_class", "write_other"]


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
    if isinstance(value, BuiltinFunctionType) and not isinstance(value.__self__, (type(None), ModuleType)):
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
