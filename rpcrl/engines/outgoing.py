"""In which portions do whole weights leave the ranks that train?"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from rpcrl.engines.sharding import DataParallel

__all__ = ["full_weights", "sent_weights"]

NamedTensor = tuple[str, Tensor]


def _buckets(named: Iterable[NamedTensor], bucket_bytes: int) -> list[dict[str, Tensor]]:
    buckets: list[dict[str, Tensor]] = [{}]
    filled_bytes = 0
    for name, parameter in named:
        size_bytes = parameter.numel() * parameter.element_size()
        if buckets[-1] and filled_bytes + size_bytes > bucket_bytes:
            buckets.append({})
            filled_bytes = 0
        buckets[-1][name] = parameter
        filled_bytes += size_bytes
    return buckets


def full_weights(dp: DataParallel, named: Iterable[NamedTensor], bucket_bytes: int) -> Iterator[list[NamedTensor]]:
    """Yield whole tensors on every rank, bucket by bucket (collective); at least one a bucket."""
    for bucket in _buckets(named, bucket_bytes):
        yield list(zip(bucket, dp.full(list(bucket.values())), strict=True))


def sent_weights(dp: DataParallel, named: Iterable[NamedTensor], bucket_bytes: int) -> Iterator[list[NamedTensor]]:
    """Yield the same on rank 0, and empty buckets on the others (collective).

    A tensor that is gathered and is larger than a bucket comes in parts: so many of its rows as fit one.
    """
    for bucket in _buckets(named, bucket_bytes):
        (name, tensor), *more = bucket.items()
        size_bytes = tensor.numel() * tensor.element_size()
        if not more and dp.gathers and size_bytes > bucket_bytes:
            rows = max(1, bucket_bytes * tensor.shape[0] // size_bytes)
            for parts in dp.rows_on_first(tensor, rows):
                yield [(name, part) for part in parts]
        else:
            yield list(zip(bucket, dp.full_on_first(list(bucket.values())), strict=False))
