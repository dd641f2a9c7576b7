"""How do numpy arrays, scalars and dtypes travel?

Nodes: ``[NDARRAY, dtype, shape, bytes]``, ``[OBJECT_ARRAY, shape, flat list]``, ``[NUMPY_SCALAR, dtype, bytes]``,
``[NUMPY_DTYPE, dtype]``; a dtype is numpy's own text with its byte order, e.g. ``<f4`` or ``<M8[ns]``. Arrays travel
in C order. An object array is one list, so a column of a million strings is one msgpack array.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from rpcrl.errors import DecodeError
from rpcrl.wire.containers import expect
from rpcrl.wire.tree import Decoder, Encoder, Tag, Unencodable, reads, tagged, writes

__all__ = ["read_shape"]

_MAX_DIMENSIONS = 64
_PLAIN_KINDS = "biufcSUmMV"


def read_shape(shape: list[Any]) -> tuple[int, ...]:
    """Return a checked shape: at most 64 non-negative ints."""
    if len(shape) > _MAX_DIMENSIONS or any(type(size) is not int or size < 0 for size in shape):
        raise DecodeError(f"{str(shape)[:200]} is not a shape")
    return tuple(shape)


def _write_type(value: object, dtype: np.dtype[Any]) -> str:
    if dtype.kind not in _PLAIN_KINDS or dtype.fields is not None or dtype.subdtype is not None:
        remedy = "send each field as an array of its own" if dtype.fields else "convert it with .astype"
        raise Unencodable(value, f"its dtype {dtype} is not a plain one", remedy)
    if dtype.kind == "V" and dtype.type is not np.void:
        raise Unencodable(value, f"its dtype {dtype} belongs to another library", "convert it with .astype")
    return dtype.str


def _read_type(text: str) -> np.dtype[Any]:
    # The text of a structured dtype would be parsed too; only the short form of a plain one may come through.
    if len(text) > 32 or text[:1] not in "<>|=" or text[1:2] not in _PLAIN_KINDS or "," in text:
        raise DecodeError(f"{text[:100]!r} is not a plain dtype")
    dtype = np.dtype(text)
    if dtype.itemsize == 0:
        raise DecodeError(f"dtype {text!r} has no size")
    return dtype


@writes(np.ndarray, np.memmap)
def _write_array(encoder: Encoder, value: np.ndarray[Any, Any]) -> object:
    array = np.asarray(value)
    if array.dtype.kind == "O":
        flat = array.reshape(-1).tolist()
        try:
            nodes = encoder.sequence(value, flat)
        except Unencodable as error:
            if array.ndim != 1:
                where = np.unravel_index(int(error.parts[-1][1:-1]), array.shape)
                error.parts[-1] = f"[{', '.join(str(int(index)) for index in where)}]"
            raise
        return tagged(Tag.OBJECT_ARRAY, list(array.shape), nodes)
    if array.dtype.itemsize == 0:
        array = array.astype(f"{array.dtype.kind}1")
    text = _write_type(value, array.dtype)
    raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return tagged(Tag.NDARRAY, text, list(array.shape), encoder.buffer(raw.data))


@reads(Tag.NDARRAY)
def _read_array(decoder: Decoder, node: list[Any]) -> object:
    text, sizes, reference = expect(node, str, list, (int, bytes))
    dtype, shape, data = _read_type(text), read_shape(sizes), decoder.take(reference)
    if math.prod(shape) * dtype.itemsize != len(data):
        raise DecodeError(f"an array of shape {shape} and dtype {text} does not have {len(data)} bytes")
    if not data:
        return np.empty(shape, dtype)
    return np.frombuffer(data, dtype).reshape(shape)


@reads(Tag.OBJECT_ARRAY)
def _read_object_array(decoder: Decoder, node: list[Any]) -> object:
    sizes, values = expect(node, list, list)
    shape = read_shape(sizes)
    if math.prod(shape) != len(values):
        raise DecodeError(f"an object array of shape {shape} does not have {len(values)} elements")
    if not values:
        return np.empty(shape, object)
    return np.fromiter(values, dtype=object, count=len(values)).reshape(shape)


@writes(np.generic, subclasses=True)
def _write_scalar(encoder: Encoder, value: np.generic) -> object:
    return tagged(Tag.NUMPY_SCALAR, _write_type(value, value.dtype), value.tobytes())


@reads(Tag.NUMPY_SCALAR)
def _read_scalar(decoder: Decoder, node: list[Any]) -> object:
    text, data = expect(node, str, bytes)
    if text[1:] in ("S0", "U0", "V0"):
        return np.dtype(text).type()
    dtype = _read_type(text)
    if len(data) != dtype.itemsize:
        raise DecodeError(f"a scalar of dtype {text} does not have {len(data)} bytes")
    return np.frombuffer(data, dtype)[0]


@writes(np.dtype, subclasses=True)
def _write_dtype(encoder: Encoder, value: np.dtype[Any]) -> object:
    return tagged(Tag.NUMPY_DTYPE, "|O" if value.kind == "O" else _write_type(value, value))


@reads(Tag.NUMPY_DTYPE)
def _read_dtype(decoder: Decoder, node: list[Any]) -> object:
    (text,) = expect(node, str)
    return np.dtype(object) if text == "|O" else _read_type(text)
