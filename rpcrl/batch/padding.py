"""How many rows must a batch gain to be cut equally, and how are they taken away again?

The number of added rows is returned, never hidden in the batch: whoever pads also unpads.
"""

from __future__ import annotations

from typing import TypeVar

from rpcrl.batch.splittable import cut, pad
from rpcrl.errors import BatchError

__all__ = ["pad_to_multiple", "unpad"]

Batch = TypeVar("Batch")


def pad_to_multiple(batch: Batch, multiple: int, *, at_least: int = 0) -> tuple[Batch, int]:
    """Return the batch with rows added until their number is a multiple, and how many were added.

    The batch is a DataProto, a TensorDict, or of a type of your own (see ``Splittable``). Added rows repeat the batch
    from its start, more than once if need be. With ``at_least`` the result has no fewer rows than that. Raises
    ``BatchError`` when a batch without rows would need some.
    """
    if multiple < 1:
        raise BatchError(f"a batch is padded to a multiple of at least 1, not {multiple}")
    rows = _rows(batch)
    target = -(-max(rows, at_least) // multiple) * multiple
    if target == rows:
        return _cut(batch, rows), 0
    if not rows:
        raise BatchError(
            f"a batch without rows cannot be padded to {target}: there is no row to repeat; skip the call, "
            "or allow empty parts with uneven=True"
        )
    padded: Batch = pad(batch, target)
    return padded, target - rows


def unpad(batch: Batch, num_padding: int) -> Batch:
    """Return the batch without its last ``num_padding`` rows."""
    rows = _rows(batch)
    if not 0 <= num_padding <= rows:
        raise BatchError(f"cannot take {num_padding} padding rows off a batch of {rows} rows")
    return _cut(batch, rows - num_padding)


def _rows(batch: object) -> int:
    return len(batch)  # type: ignore[arg-type]  # what has no length is no batch and says so itself


def _cut(batch: Batch, rows: int) -> Batch:
    kept: Batch = cut(batch, 0, rows)
    return kept
