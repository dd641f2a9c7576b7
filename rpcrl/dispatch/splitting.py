"""How is a batch split over ranks and put together again? By its own ``len``, ``chunk`` and ``concat``.

DataProto, TensorDict and any class with those three (and slicing, for padding) will do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from rpcrl.batch.splittable import chunk, concat, is_splittable
from rpcrl.errors import DispatchError

__all__ = ["UnevenPolicy", "chunk_all", "concat_all", "unpad_result"]

UnevenPolicy = Literal["pad", "uneven", "error"]
"""What to do when rows do not divide: ``pad`` and take the padding off again, split unevenly, or refuse."""


def chunk_all(
    values: Sequence[Any], labels: Sequence[str], num_parts: int, *, policy: UnevenPolicy, call: str
) -> tuple[list[list[Any]], int]:
    """Split every batch of one call into ``num_parts`` parts; returns the parts of each and the rows of padding.

    Raises DispatchError if a value is not a batch, if lengths differ, or if the policy forbids the remainder.
    """
    for label, value in zip(labels, values, strict=True):
        if not is_splittable(value):
            raise DispatchError(
                f"{call} splits batches over ranks: {label} is a {type(value).__name__}, which has no len, chunk and "
                "concat. Put it into meta_info of the batch, or register the method with Dispatch.ONE_TO_ALL"
            )
    if not values:
        raise DispatchError(f"{call} splits batches over ranks, but it was called without one")
    lengths = [len(value) for value in values]
    if len(set(lengths)) > 1:
        listed = ", ".join(f"{label} has {length}" for label, length in zip(labels, lengths, strict=True))
        raise DispatchError(f"{call} needs batches of equal length: {listed} rows")
    rest = lengths[0] % num_parts
    if rest == 0:
        return [chunk(value, num_parts) for value in values], 0
    if policy == "error":
        raise DispatchError(
            f"cannot split {lengths[0]} rows into {num_parts} equal parts for {call} (registered with uneven='error'): "
            f"{rest} rows are left over. Use a multiple of {num_parts} rows, or register the method with uneven='pad' "
            "or uneven='uneven'"
        )
    if policy == "uneven":
        return [chunk(value, num_parts, uneven=True) for value in values], 0
    num_padding = num_parts - rest
    return [chunk(_pad(value, num_padding), num_parts) for value in values], num_padding


def _pad(batch: Any, num_padding: int) -> Any:
    """Append copies of the first rows, over and over if need be."""
    from rpcrl.batch.data_proto import DataProto
    from rpcrl.batch.padding import pad_to_multiple

    if isinstance(batch, DataProto):  # keeps meta_info as it is, which concat would merge
        return pad_to_multiple(batch, len(batch) + num_padding)[0]
    pieces, left = [batch], num_padding
    while left > 0:
        piece = batch[: min(left, len(batch))]
        pieces.append(piece)
        left -= len(piece)
    return concat(pieces)


def concat_all(outputs: list[Any], *, call: str) -> Any:
    """Put the results of all ranks together in rank order. Raises DispatchError naming the rank that does not fit."""
    first = outputs[0]
    for rank, output in enumerate(outputs):
        if not is_splittable(output) or type(output) is not type(first):
            expected = type(first).__name__ if is_splittable(first) else "a batch"
            raise DispatchError(
                f"{call} must return {expected} on every rank so that the results can be concatenated; rank {rank} "
                f"returned {type(output).__name__}. To get the list of all results, register the method with "
                "Dispatch.DP_COMPUTE_METRIC"
            )
    return concat(outputs)


def unpad_result(result: Any, num_padding: int, num_rows: int, *, call: str) -> Any:
    """Take the padding off a concatenated result.

    ``num_rows`` is the padded length that went out. A result of another length is not row by row: then padding
    cannot be told from rows, which is an error and not a guess.
    """
    if num_padding == 0 or not is_splittable(result):
        return result
    if len(result) != num_rows:
        raise DispatchError(
            f"{call} got {num_rows} rows ({num_padding} of them padding) and returned {len(result)}: padding cannot "
            "be taken off a result that is not row by row. Register the method with uneven='uneven', or pass a batch "
            "whose rows divide by the number of ranks"
        )
    return result[: num_rows - num_padding]
