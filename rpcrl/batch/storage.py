"""How is a batch kept in a file that runs no code when it is read?

One safetensors file, readable with any safetensors tool:

* ``batch.KEY`` is a dense tensor column; ``values.KEY`` and ``offsets.N`` make a jagged one (columns that
  share offsets share them in the file, and again after loading);
* ``data.N`` is an array (its raw bytes) or a tensor inside of a Python value;
* ``document`` is UTF-8 JSON: the rows, the columns in order, the columns of Python values and meta_info.

In the JSON, None, bool, int, finite float, str, list and a dict with text keys are themselves; whatever else
is an object with one key that begins with ``$`` and names its type. The file is written aside, fsynced and
renamed.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import json
import math
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rpcrl.batch.objects import ObjectColumn, as_column, object_column
from rpcrl.batch.rows import is_tensor
from rpcrl.errors import BatchError

__all__ = ["load", "save"]

FORMAT = "rpcrl.batch"
VERSION = 1
DOCUMENT = "document"
MAX_DEPTH = 100
"""Deeper nesting is refused: it is a cycle as a rule."""

Parts = tuple[int, dict[str, Any] | None, dict[str, ObjectColumn], dict[str, Any]]


def save(
    path: Path,
    tensors: Mapping[str, Any] | None,
    non_tensors: Mapping[str, ObjectColumn],
    meta_info: Mapping[str, Any],
    rows: int,
) -> None:
    """Write the parts of a batch to ``path``; on any error what was there stays."""
    writer = _Writer()
    document = {
        "format": FORMAT,
        "version": VERSION,
        "rows": rows,
        "batch": None if tensors is None else {key: writer.column(key, value) for key, value in tensors.items()},
        "non_tensor_batch": {
            key: writer.value(value, f"non_tensor_batch[{key!r}]", 0) for key, value in non_tensors.items()
        },
        "meta_info": writer.value(dict(meta_info), "meta_info", 0),
    }
    text = json.dumps(document, allow_nan=False, ensure_ascii=True, separators=(",", ":"))
    writer.blobs[DOCUMENT] = np.frombuffer(text.encode("ascii"), dtype=np.uint8)
    _replace(path, writer.blobs)


def _replace(path: Path, blobs: dict[str, Any]) -> None:
    aside = path.with_name(f".{path.name}.{secrets.token_hex(6)}.tmp")
    try:
        _write(aside, blobs)
        with aside.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(aside, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            aside.unlink()
        raise
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def _write(path: Path, blobs: dict[str, Any]) -> None:
    # Not left to safetensors: a missing directory or a full disk must be the OSError that it is.
    path.touch(exist_ok=False)
    if any(is_tensor(blob) for blob in blobs.values()):
        import safetensors.torch
        import torch

        every = {name: blob if is_tensor(blob) else torch.tensor(blob) for name, blob in blobs.items()}
        safetensors.torch.save_file(every, path, metadata={"format": "pt"})
    else:
        import safetensors.numpy

        safetensors.numpy.save_file(blobs, path)


class _Writer:
    """Turns values into JSON, and puts what JSON cannot hold into ``blobs``."""

    def __init__(self) -> None:
        self.blobs: dict[str, Any] = {}
        self._offsets: dict[int, tuple[str, Any]] = {}
        self._storages: set[int] = set()

    def column(self, key: str, column: Any) -> dict[str, Any]:
        """Store one tensor column; returns what the document says of it."""
        if not is_tensor(column):
            raise BatchError(
                f"tensor column {key!r} is a nested {type(column).__name__}, which is not written to disk; "
                "make its "
                "entries columns of the batch"
            )
        return self._tensor(column, f"tensor column {key!r}", key)

    def _tensor(self, tensor: Any, place: str, name: str) -> dict[str, Any]:
        import torch

        if not tensor.is_nested:
            return {"dense": self._put(tensor, place, f"batch.{name}"), "complex": tensor.is_complex()}
        from rpcrl.batch.tensors import jagged_parts

        if tensor.layout is not torch.jagged:
            raise BatchError(f"{place} is a nested tensor of layout {tensor.layout}; use layout=torch.jagged")
        values, offsets, _, dim = jagged_parts(tensor)
        # The tensor is kept beside the name: an id says something only while its object lives.
        known = self._offsets.get(id(offsets))
        if known is None:
            known = self._put(offsets, place, f"offsets.{len(self._offsets)}"), offsets
            self._offsets[id(offsets)] = known
        stored = self._put(values, place, f"values.{name}")
        return {"values": stored, "offsets": known[0], "ragged": dim, "complex": values.is_complex()}

    def _put(self, tensor: Any, place: str, name: str) -> str:
        import torch
        from safetensors.torch import _TYPES as known

        tensor = tensor.detach()
        if tensor.is_complex():
            tensor = torch.view_as_real(tensor.resolve_conj())
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.dtype not in known.values():
            raise BatchError(f"{place} is a {tensor.layout} tensor of {tensor.dtype}, which safetensors cannot hold")
        tensor = tensor.cpu().contiguous()
        storage = tensor.untyped_storage().data_ptr()
        if storage in self._storages:  # safetensors refuses views of one storage
            tensor = tensor.clone()
        self._storages.add(tensor.untyped_storage().data_ptr())
        self.blobs[name] = tensor
        return name

    def value(self, value: Any, place: str, depth: int) -> Any:
        """Return a Python value as JSON; raises ``BatchError`` naming the place of one that has no form."""
        if depth > MAX_DEPTH:
            raise BatchError(f"{place[:80]}… is nested deeper than {MAX_DEPTH} levels, or contains itself")
        kind = type(value)
        if value is None or kind in (bool, int, str):
            return value
        if kind is float:
            return value if math.isfinite(value) else {"$float": repr(value)}
        if kind is list:
            return [self.value(entry, f"{place}[{at}]", depth + 1) for at, entry in enumerate(value)]
        if kind is dict:
            return self._dict(value, place, depth)
        if kind is tuple:
            return {"$tuple": [self.value(entry, f"{place}[{at}]", depth + 1) for at, entry in enumerate(value)]}
        if kind in (bytes, bytearray):
            return {f"${kind.__name__}": base64.b64encode(value).decode("ascii")}
        if kind is complex:
            return {"$complex": [self.value(part, place, depth) for part in (value.real, value.imag)]}
        if kind is np.str_:
            return str(value)
        if isinstance(value, np.generic) and value.dtype != object:
            return {"$scalar": self._array(np.asarray(value), place, depth)}
        if kind is np.ndarray:
            return {"$array": self._array(value, place, depth)}
        if is_tensor(value):
            return {"$tensor": self._tensor(value, place, f"inner.{len(self.blobs)}")}
        raise BatchError(
            f"{place} is of type {kind.__module__}.{kind.__qualname__}, which is not written to disk; "
            "convert it to "
            "numbers, text, bytes, lists, tuples, dicts, arrays or tensors, or drop it with select first"
        )

    def _dict(self, value: dict[Any, Any], place: str, depth: int) -> Any:
        if all(type(key) is str and not key.startswith("$") for key in value):
            return {key: self.value(entry, f"{place}[{key!r}]", depth + 1) for key, entry in value.items()}
        pairs = [
            [
                self.value(key, f"a key of {place}", depth + 1),
                self.value(entry, f"{place}[{key!r}]", depth + 1),
            ]
            for key, entry in value.items()
        ]
        return {"$dict": pairs}

    def _array(self, array: npt.NDArray[Any], place: str, depth: int) -> dict[str, Any]:
        shape = list(array.shape)
        if array.dtype == object:
            entries = [self.value(entry, f"{place}[{at}]", depth + 1) for at, entry in enumerate(array.ravel())]
            return {"shape": shape, "entries": entries}
        if array.dtype.kind == "V":
            raise BatchError(f"{place} is an array of {array.dtype}, which is not written to disk; store its fields")
        name = f"data.{len(self.blobs)}"
        raw = np.ascontiguousarray(array).tobytes()
        self.blobs[name] = np.frombuffer(raw, dtype=np.uint8)
        return {"shape": shape, "dtype": array.dtype.str, "data": name}


def load(path: Path) -> Parts:
    """Return rows, tensor columns, other columns and meta_info of a file that ``save`` wrote."""
    import safetensors

    with path.open("rb"):  # a missing file is a FileNotFoundError, not a damaged batch
        pass
    try:
        with safetensors.safe_open(path, framework="numpy") as file:
            names = set(file.keys())
            if DOCUMENT not in names:
                raise BatchError(f"{path} is a safetensors file, but not of a batch: it has no {DOCUMENT!r}")
            document = json.loads(file.get_tensor(DOCUMENT).tobytes())
        if not isinstance(document, dict):
            raise TypeError("the document is not an object")
        _check_version(path, document)
        with_torch = any(not name.startswith("data.") and name != DOCUMENT for name in names)
        with safetensors.safe_open(path, framework="pt" if with_torch else "numpy") as file:
            return _Reader(file, with_torch).batch(document)
    except (safetensors.SafetensorError, KeyError, TypeError, ValueError, binascii.Error) as error:
        if isinstance(error, BatchError):
            raise
        raise BatchError(f"{path} is not a batch or is damaged: {type(error).__name__}: {error}") from error


def _check_version(path: Path, document: Mapping[str, Any]) -> None:
    if document.get("format") != FORMAT or document.get("version") != VERSION:
        raise BatchError(
            f"{path} has format {document.get('format')!r} version {document.get('version')!r}; this rpcrl "
            "reads "
            f"{FORMAT!r} version {VERSION}; load it with the rpcrl that wrote it"
        )


class _Reader:
    """Turns the JSON of ``_Writer`` back into values that own their memory."""

    def __init__(self, file: Any, with_torch: bool) -> None:
        self._file = file
        self._with_torch = with_torch
        self._offsets: dict[str, Any] = {}

    def batch(self, document: Mapping[str, Any]) -> Parts:
        """Return the four parts of a batch."""
        columns = document["batch"]
        tensors = None if columns is None else {key: self._tensor(entry) for key, entry in columns.items()}
        others = {key: as_column(key, self.value(entry)) for key, entry in document["non_tensor_batch"].items()}
        return int(document["rows"]), tensors, others, self.value(document["meta_info"])

    def value(self, value: Any) -> Any:
        """Return the Python value of a piece of JSON."""
        if isinstance(value, list):
            return [self.value(entry) for entry in value]
        if not isinstance(value, dict):
            return value
        tag = next(iter(value), "")
        if not tag.startswith("$"):
            return {key: self.value(entry) for key, entry in value.items()}
        return self._tagged(tag, value[tag])

    def _tagged(self, tag: str, value: Any) -> Any:
        match tag:
            case "$float":
                return float(value)
            case "$tuple":
                return tuple(self.value(entry) for entry in value)
            case "$bytes":
                return base64.b64decode(value, validate=True)
            case "$bytearray":
                return bytearray(base64.b64decode(value, validate=True))
            case "$complex":
                return complex(*(self.value(part) for part in value))
            case "$dict":
                return {self.value(key): self.value(entry) for key, entry in value}
            case "$scalar":
                return self._array(value)[()]
            case "$array":
                return self._array(value)
            case "$tensor":
                return self._tensor(value)
        raise BatchError(f"the file holds a value of unknown type {tag!r}; it was written by a newer rpcrl")

    def _array(self, entry: Mapping[str, Any]) -> npt.NDArray[Any]:
        if "entries" in entry:
            return object_column([self.value(item) for item in entry["entries"]]).reshape(entry["shape"])
        raw = self._file.get_tensor(entry["data"])
        data = bytearray((raw.numpy() if self._with_torch else raw).tobytes())
        dtype = np.dtype(entry["dtype"])
        if dtype.kind in "OV":
            raise ValueError(f"an array of dtype {dtype}")
        return np.ndarray(entry["shape"], dtype, buffer=data)

    def _tensor(self, entry: Mapping[str, Any]) -> Any:
        import torch

        # safetensors maps the file; a copy is the reader's own whatever becomes of the file.
        values = self._file.get_tensor(entry.get("dense") or entry["values"]).clone()
        if entry["complex"]:
            values = torch.view_as_complex(values)
        if "dense" in entry:
            return values
        name = entry["offsets"]
        if name not in self._offsets:
            self._offsets[name] = self._file.get_tensor(name).clone()
        return torch.nested.nested_tensor_from_jagged(values, self._offsets[name], jagged_dim=entry["ragged"])
