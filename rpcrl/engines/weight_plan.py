"""Which bytes of the weights go over in which order, and how does a receiver know that they are the right ones?

Tensors are laid one after the other into buckets of a fixed size, each at a multiple of 64 bytes; one that is larger
than a bucket takes several. A bucket starts with a header: which sync, which bucket, of which plan, and a checksum.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch
from torch import Tensor

from rpcrl.errors import WeightSyncError

__all__ = ["HEADER_BYTES", "Piece", "WeightPlan", "WeightSpec", "checksum", "read_header", "write_header"]

ALIGNMENT_BYTES = 64
HEADER_BYTES = 64
MAGIC = 0x5250_4352_4C57_0001
BLOCK_WORDS = 512


@dataclass(frozen=True)
class WeightSpec:
    """What one tensor is."""

    name: str
    dtype: str
    """As torch calls it, without ``torch.``."""
    shape: tuple[int, ...]

    @classmethod
    def of(cls, name: str, tensor: Tensor) -> WeightSpec:
        """Describe a tensor; a sharded one by its whole shape."""
        return cls(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))

    @property
    def torch_dtype(self) -> torch.dtype:
        """The number type."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    @property
    def num_bytes(self) -> int:
        """Size of the whole tensor."""
        return prod(self.shape) * self.torch_dtype.itemsize

    def plain(self) -> list[object]:
        """Return the spec as plain values, for the control plane."""
        return [self.name, self.dtype, list(self.shape)]

    @classmethod
    def from_plain(cls, value: Sequence[object]) -> WeightSpec:
        """Read what ``plain`` wrote."""
        name, dtype, shape = value
        return cls(str(name), str(dtype), tuple(int(size) for size in shape))  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Piece:
    """A part of one tensor in one bucket; mostly all of it."""

    index: int
    """Of the tensor in the plan."""
    offset_bytes: int
    """Where it lies in the bucket, behind the header."""
    start_bytes: int
    """Where it lies in the tensor."""
    num_bytes: int


@dataclass(frozen=True)
class WeightPlan:
    """The tensors in their order, and the buckets that they are laid into."""

    specs: tuple[WeightSpec, ...]
    bucket_bytes: int
    """Most bytes of a bucket, without its header; at least 64."""

    @cached_property
    def buckets(self) -> tuple[tuple[Piece, ...], ...]:
        """The pieces of each bucket. A tensor that fits a bucket is never cut; one that does not begins its own."""
        room = max(self.bucket_bytes // ALIGNMENT_BYTES * ALIGNMENT_BYTES, ALIGNMENT_BYTES)
        buckets: list[list[Piece]] = [[]]
        filled = 0
        for index, spec in enumerate(self.specs):
            size = spec.num_bytes
            if buckets[-1] and filled + size > room:
                buckets.append([])
                filled = 0
            for start in range(0, max(size, 1), room):
                if start:
                    buckets.append([])
                    filled = 0
                part = min(size - start, room)
                buckets[-1].append(Piece(index, filled, start, part))
                filled += -(-part // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        return tuple(tuple(bucket) for bucket in buckets if bucket)

    def payload_bytes(self, bucket: int) -> int:
        """Return the bytes of a bucket without its header, a multiple of 64."""
        last = self.buckets[bucket][-1]
        return -(-(last.offset_bytes + last.num_bytes) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES

    @cached_property
    def buffer_bytes(self) -> int:
        """Size of a buffer that takes any of the buckets with its header."""
        return HEADER_BYTES + max((self.payload_bytes(bucket) for bucket in range(len(self.buckets))), default=0)

    @property
    def num_bytes(self) -> int:
        """Size of all tensors."""
        return sum(spec.num_bytes for spec in self.specs)

    @cached_property
    def digest(self) -> str:
        """Hex digest of names, order, dtypes, shapes and the size of a bucket: equal where all of these are."""
        text = json.dumps([self.bucket_bytes, [spec.plain() for spec in self.specs]], separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def with_names(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[WeightSpec, Tensor]]:
        """Yield the tensors with their specs; one may also come in parts, its rows in their order.

        Raises WeightSyncError at the first that is not the plan's next one.
        """
        found = rows = 0
        for name, tensor in tensors:
            spec = self.specs[found] if found < len(self.specs) else None
            if spec is None or not _is_next(spec, rows, WeightSpec.of(name, tensor)):
                behind = f", behind {rows} of its rows" if rows else ""
                raise WeightSyncError(
                    f"tensor {found} is {WeightSpec.of(name, tensor)}, the plan says {spec or 'the end'}{behind}"
                )
            yield spec, tensor
            rows += tensor.shape[0] if tensor.shape != spec.shape else 0
            if tensor.shape == spec.shape or rows == spec.shape[0]:
                found, rows = found + 1, 0
        if found < len(self.specs):
            raise WeightSyncError(f"the weights ended after {found} of {len(self.specs)} tensors")

    def difference(self, other: WeightPlan) -> str:
        """Say in words where two plans differ first; empty when they do not."""
        if self.bucket_bytes != other.bucket_bytes:
            return f"buckets of {self.bucket_bytes} and of {other.bucket_bytes} bytes"
        for index, (one, two) in enumerate(zip(self.specs, other.specs, strict=False)):
            if one != two:
                return f"tensor {index} is {one} and {two}"
        if len(self.specs) != len(other.specs):
            return f"{len(self.specs)} and {len(other.specs)} tensors"
        return ""


def _is_next(spec: WeightSpec, rows: int, came: WeightSpec) -> bool:
    """Return whether what came is a tensor of the plan, or its next rows behind those that have come."""
    if (came.name, came.dtype) != (spec.name, spec.dtype):
        return False
    if came.shape == spec.shape:
        return rows == 0
    return (
        bool(spec.shape and came.shape) and came.shape[1:] == spec.shape[1:] and rows + came.shape[0] <= spec.shape[0]
    )


def checksum(payload: Tensor) -> int:
    """Return a 64-bit sum of a payload (uint8, a multiple of 64 bytes) that sees changed words, and moved ones.

    Blocks of 512 words of 8 bytes are summed, and each sum counts by its place, modulo 2**64: one pass at the speed of
    memory, on the device that holds the bytes. Only an exchange within one block goes unseen. It guards against
    mistakes and damage, not against intent.
    """
    words = payload.view(torch.int64)
    whole = words.numel() // BLOCK_WORDS * BLOCK_WORDS
    blocks, rest = words[:whole].view(-1, BLOCK_WORDS).sum(1), words[whole:]
    places = torch.arange(1, blocks.numel() + rest.numel() + 1, device=words.device) * 0x5851_F42D_4C95_7F2D
    return int((torch.cat([blocks, rest]) * places).sum())


def _fields(plan: WeightPlan, number: int, bucket: int) -> list[int]:
    return [MAGIC, number, bucket, int(plan.digest[:15], 16), plan.payload_bytes(bucket)]


def write_header(buffer: Tensor, plan: WeightPlan, number: int, bucket: int) -> Tensor:
    """Write the header of a packed bucket; returns the part of the buffer that is to be sent."""
    used = HEADER_BYTES + plan.payload_bytes(bucket)
    fields = [*_fields(plan, number, bucket), checksum(buffer[HEADER_BYTES:used]), 0, 0]
    buffer[:HEADER_BYTES].view(torch.int64).copy_(torch.tensor(fields))
    return buffer[:used]


def read_header(buffer: Tensor, plan: WeightPlan, number: int, bucket: int) -> None:
    """Compare a bucket that came with what must have come. Raises WeightSyncError saying what differs."""
    fields = buffer[:HEADER_BYTES].view(torch.int64).tolist()
    names = ("mark", "number of the sync", "bucket", "plan", "payload bytes")
    for name, came, wanted in zip(names, fields, _fields(plan, number, bucket), strict=False):
        if came != wanted:
            raise WeightSyncError(f"sync {number}, bucket {bucket}: its header's {name} is {came}, not {wanted}")
    found = checksum(buffer[HEADER_BYTES : HEADER_BYTES + plan.payload_bytes(bucket)])
    if found != fields[5]:
        first = plan.specs[plan.buckets[bucket][0].index].name
        raise WeightSyncError(
            f"sync {number}, bucket {bucket} (from {first} on): its bytes have the checksum {found:#x}, the sender's "
            f"had {fields[5]:#x}"
        )
