"""How long does a worker keep a result for others? As long as somebody has its lease.

Light on purpose: everything that handles calls imports this, and only references themselves need arrays.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from importlib import import_module
from typing import Any

from rpcrl.errors import UsageError
from rpcrl.runtime.store import is_keepable
from rpcrl.wire.codec import register_reader

__all__ = [
    "Lease",
    "as_references",
    "check_run",
    "is_reference",
    "materialize",
    "materialize_stayed",
    "read_references_here",
    "references_in",
]


class Lease:
    """Keeps a result stored: when the last reference to this object is gone, the worker is told to free it."""

    __slots__ = ("__weakref__", "identity", "key")

    def __init__(self, identity: str, key: int, release: Callable[[str, int], None]) -> None:
        self.identity = identity
        self.key = key
        weakref.finalize(self, release, identity, key).atexit = False


def is_reference(value: object) -> bool:
    """Tell whether a value is a BatchRef, without loading what nobody has loaded."""
    kind = getattr(sys.modules.get("rpcrl.batch.reference"), "BatchRef", None)
    return kind is not None and isinstance(value, kind)


def references_in(value: object) -> list[Any]:
    """Return the references in a value: itself, or in lists, tuples and dicts at any depth."""
    if is_reference(value):
        return [value]
    if "rpcrl.batch.reference" not in sys.modules or not isinstance(value, list | tuple | dict):
        return []
    entries = value.values() if isinstance(value, dict) else value
    return [found for entry in entries for found in references_in(entry)]


def check_run(references: list[Any], run_id: str, *, call: str) -> None:
    """Raise UsageError for a reference whose rows are kept in another run: no worker of this one can read them."""
    for ref in references:
        if ref.run_id not in ("", run_id):
            raise UsageError(
                f"{call}: {ref!r} belongs to run {ref.run_id}, and this group to run {run_id}; nothing was sent. Read "
                "the rows while their run is open (ref.fetch()), and pass the batch"
            )


def materialize_stayed(value: Any) -> Any:
    """Return the batch of a result that stayed on its worker; a reference that a method has returned is its value."""
    return materialize(value) if is_reference(value) and value.stayed else value


def materialize(value: Any) -> Any:
    """Return the batch of a reference, read now, in the form in which it was made; anything else as it is."""
    if not is_reference(value):
        return value
    batch = value.fetch()
    return batch.to_tensordict() if value.as_tensordict else batch


def as_references(outputs: list[Any]) -> list[Any]:
    """Return outputs of which some stayed on their workers with all batches as references; others as they are."""
    if not any(map(is_reference, outputs)):
        return outputs
    held = import_module("rpcrl.runtime.references").held
    return [held(output) if is_keepable(output) else output for output in outputs]


def read_references_here() -> None:
    """Let this process understand references that it is sent."""

    def read(plain: Any) -> Any:
        return import_module("rpcrl.runtime.references").read(plain)

    register_reader("rpcrl.BatchRef", read)
