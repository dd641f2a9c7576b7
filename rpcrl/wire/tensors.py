"""How do torch tensors travel, jagged ones included, and dtypes, devices and sizes?

Nodes: ``[TENSOR, dtype, shape, bytes]``; ``[JAGGED, values, offsets, lengths, ragged_idx, min, max]`` where offsets
and lengths are a tensor node or, for one that came before, its number: columns that shared their offsets still do,
and torch combines only those; ``[NESTED, [tensors]]`` for the older strided layout. A dtype is torch's own name
without ``torch.``. Tensors travel detached, contiguous and by main memory, and arrive on the CPU.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from rpcrl.errors import DecodeError
from rpcrl.wire.arrays import read_shape
from rpcrl.wire.containers import expect
from rpcrl.wire.tree import Decoder, Encoder, Tag, Unencodable, reads, tagged, writes

__all__: list[str] = []

_NAMES = {value: str(value).removeprefix("torch.") for value in vars(torch).values() if isinstance(value, torch.dtype)}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}


@writes(torch.Tensor, torch.nn.Parameter)
def _write_tensor(encoder: Encoder, value: torch.Tensor) -> object:
    if value.is_nested:
        return tagged(Tag.NESTED, encoder.sequence(value, list(value.unbind())))
    if value.layout is not torch.strided:
        raise Unencodable(value, f"its layout is {value.layout}", "convert it with .to_dense()")
    if value.is_quantized:
        raise Unencodable(value, "it is quantized", "send .int_repr() with scale and zero point, or .dequantize()")
    if value.is_meta:
        raise Unencodable(value, "it is on the meta device and has no data", "give it data with .to_empty(device=…)")
    plain = value.detach()
    if not plain.is_cpu:
        plain = plain.cpu()
    if plain.is_conj() or plain.is_neg():
        plain = plain.resolve_conj().resolve_neg()
    raw = plain.contiguous().reshape(-1).view(torch.uint8).numpy()
    return tagged(Tag.TENSOR, _NAMES[value.dtype], list(value.shape), encoder.buffer(raw.data))


@reads(Tag.TENSOR)
def _read_tensor(decoder: Decoder, node: list[Any]) -> object:
    name, sizes, reference = expect(node, str, list, (int, bytes))
    dtype, shape, data = _dtype(name), read_shape(sizes), decoder.take(reference)
    if math.prod(shape) * dtype.itemsize != len(data):
        raise DecodeError(f"a tensor of shape {shape} and dtype {name} does not have {len(data)} bytes")
    if not data:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(data, dtype=dtype).reshape(shape)


def _dtype(name: str) -> torch.dtype:
    dtype = _DTYPES.get(name)
    if dtype is None or name.startswith("q"):
        raise DecodeError(f"{name[:100]!r} is no dtype of this torch ({torch.__version__})")
    return dtype


@reads(Tag.NESTED)
def _read_nested(decoder: Decoder, node: list[Any]) -> object:
    (parts,) = expect(node, list)
    if not all(type(part) is torch.Tensor and not part.is_nested for part in parts):
        raise DecodeError("a nested tensor consists of tensors")
    return torch.nested.nested_tensor(parts, layout=torch.strided)


# --- jagged -----------------------------------------------------------------------------------------------------


@writes(torch.Tensor, subclasses=True)
def _write_subclass(encoder: Encoder, value: torch.Tensor) -> object:
    kind = type(value)
    if kind in (torch.Tensor, torch.nn.Parameter):
        return _write_tensor(encoder, value)
    if value.is_nested and value.layout is torch.jagged:
        return _write_jagged(encoder, value)
    if kind.__name__ == "DTensor":
        raise Unencodable(value, "it is spread over a device mesh", "send .full_tensor() or .to_local()")
    if kind.__name__ in ("MemoryMappedTensor", "Buffer"):
        return _write_tensor(encoder, value.detach().as_subclass(torch.Tensor))
    raise Unencodable(value, "it is a subclass of torch.Tensor, which would be lost", "use .as_subclass(torch.Tensor)")


def _write_jagged(encoder: Encoder, value: Any) -> object:
    """Read the parts by torch's private names: no public accessor tells a transposed jagged tensor from a plain one."""
    nodes = encoder.attributes(value, {"values": value._values.detach()})
    offsets = _write_shared(encoder, value._offsets)
    lengths = None if value._lengths is None else _write_shared(encoder, value._lengths)
    cache = value._metadata_cache or {}
    bounds = [int(cache[key].shape[0]) if key in cache else None for key in ("min_seqlen", "max_seqlen")]
    return tagged(Tag.JAGGED, nodes["values"], offsets, lengths, value._ragged_idx, *bounds)


def _write_shared(encoder: Encoder, tensor: torch.Tensor) -> object:
    known = encoder.shared.get(id(tensor))
    if known is not None:
        return known[0]
    encoder.shared[id(tensor)] = (len(encoder.shared), tensor)
    return encoder.node(tensor)


def _read_shared(decoder: Decoder, node: Any) -> torch.Tensor:
    if type(node) is int:
        found = decoder.shared[node] if 0 <= node < len(decoder.shared) else None
        if type(found) is not torch.Tensor:
            raise DecodeError(f"no shared tensor number {node}")
        return found
    if type(node) is not torch.Tensor or node.dim() != 1 or node.dtype not in (torch.int64, torch.int32):
        raise DecodeError("offsets and lengths of a jagged tensor are int tensors of one dimension")
    decoder.shared.append(node)
    return node


@reads(Tag.JAGGED)
def _read_jagged(decoder: Decoder, node: list[Any]) -> object:
    optional = (int, type(None))
    values, first, second, ragged_idx, shortest, longest = expect(
        node, torch.Tensor, (torch.Tensor, int), (torch.Tensor, int, type(None)), int, optional, optional
    )
    offsets = _read_shared(decoder, first)
    lengths = None if second is None else _read_shared(decoder, second)
    if not 1 <= ragged_idx <= values.dim():
        raise DecodeError(f"ragged dimension {ragged_idx} of a jagged tensor with values of shape {values.shape}")
    steps = offsets.diff()
    # with lengths there may be gaps, before the first row too
    if offsets.numel() == 0 or int(offsets[0]) < 0 or bool((steps < 0).any()):
        raise DecodeError("offsets of a jagged tensor must not be negative and never fall")
    if lengths is None and int(offsets[0]) != 0:
        raise DecodeError("offsets of a jagged tensor without lengths must start at 0")
    rows = values.shape[ragged_idx - 1]
    if int(offsets[-1]) > rows or (lengths is None and int(offsets[-1]) != rows):
        raise DecodeError(f"offsets of a jagged tensor end at {int(offsets[-1])}; its values have {rows} rows")
    sizes = steps
    if lengths is not None:
        if lengths.numel() != steps.numel() or bool(((lengths < 0) | (lengths > steps)).any()):
            raise DecodeError("lengths of a jagged tensor do not fit its offsets")
        sizes = lengths
    for bound, wrong in ((shortest, sizes.min), (longest, sizes.max)) if sizes.numel() else ():
        if bound is not None and bound != int(wrong()):
            raise DecodeError("the length bounds of a jagged tensor do not fit its offsets")
    return torch.nested.nested_tensor_from_jagged(
        values, offsets, lengths, jagged_dim=ragged_idx, min_seqlen=shortest, max_seqlen=longest
    )


# --- dtype, device, size ----------------------------------------------------------------------------------------


@writes(torch.dtype)
def _write_dtype(encoder: Encoder, value: torch.dtype) -> object:
    return tagged(Tag.TORCH_DTYPE, _NAMES[value])


@reads(Tag.TORCH_DTYPE)
def _read_dtype(decoder: Decoder, node: list[Any]) -> object:
    (name,) = expect(node, str)
    if name not in _DTYPES:
        raise DecodeError(f"{name[:100]!r} is no dtype of this torch ({torch.__version__})")
    return _DTYPES[name]


@writes(torch.device)
def _write_device(encoder: Encoder, value: torch.device) -> object:
    return tagged(Tag.TORCH_DEVICE, str(value))


@reads(Tag.TORCH_DEVICE)
def _read_device(decoder: Decoder, node: list[Any]) -> object:
    return torch.device(*expect(node, str))


@writes(torch.Size)
def _write_size(encoder: Encoder, value: torch.Size) -> object:
    return tagged(Tag.TORCH_SIZE, list(value))


@reads(Tag.TORCH_SIZE)
def _read_size(decoder: Decoder, node: list[Any]) -> object:
    return torch.Size(read_shape(*expect(node, list)))
