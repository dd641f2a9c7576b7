"""How do a module's weights change in place, go away and come back?"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rpcrl.engines.base import NamedTensors
from rpcrl.errors import UsageError

__all__ = ["ParameterStore"]

SHOWN_NAMES = 8


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:SHOWN_NAMES])
    return shown if len(names) <= SHOWN_NAMES else f"{shown} and {len(names) - SHOWN_NAMES} more"


class ParameterStore:
    """The parameters of one module under their Hugging Face names; a tied parameter answers to each of its names."""

    def __init__(self, module: Any) -> None:
        self._by_name: dict[str, Tensor] = dict(module.named_parameters(remove_duplicate=False))
        self._unique: dict[int, Tensor] = {id(tensor): tensor for tensor in self._by_name.values()}
        # Weights that were read from a file may lie in a mapping of it, which can be neither shrunk nor given back.
        for tensor in self._unique.values():
            tensor.data = tensor.data.clone()
        self._sizes_bytes = {key: tensor.untyped_storage().nbytes() for key, tensor in self._unique.items()}
        self.torn = False
        """An update broke off half-way: old and new weights are mixed."""

    @property
    def size_bytes(self) -> int:
        """Bytes of the parameters' storage that are resident now."""
        return sum(tensor.untyped_storage().nbytes() for tensor in self._unique.values())

    def free(self) -> int:
        """Give the storage of every parameter back; returns the freed bytes."""
        freed = self.size_bytes
        for tensor in self._unique.values():
            tensor.untyped_storage().resize_(0)
        return freed

    def allocate(self) -> None:
        """Take the storage back, with arbitrary content. On failure everything is freed again and the error raised."""
        try:
            for key, tensor in self._unique.items():
                self._resize(tensor, self._sizes_bytes[key])
        except BaseException:
            self.free()
            raise

    def _resize(self, tensor: Tensor, size_bytes: int) -> None:
        tensor.untyped_storage().resize_(size_bytes)

    def update(self, buckets: Iterable[NamedTensors]) -> None:
        """Copy the named tensors over the parameters; all parameters must come.

        Raises UsageError naming what is unknown, misshapen or missing. ``torn`` tells whether anything was changed
        by an update that failed.
        """
        changed = False
        try:
            for named in self.checked(buckets):
                changed = True
                with torch.no_grad():
                    for name, tensor in named:
                        if tensor.data_ptr() != self._by_name[name].data_ptr():  # else it is in its place
                            self._by_name[name].copy_(tensor)
        except BaseException:
            self.torn = self.torn or changed
            raise
        self.torn = False

    def place(self, name: str) -> Tensor | None:
        """Return a parameter to be written to by whoever feeds ``update``; what it held counts as lost from here on."""
        tensor = self._by_name.get(name)
        if tensor is None:
            return None
        self.torn = True
        return tensor.detach()

    def checked(self, buckets: Iterable[NamedTensors]) -> Iterator[list[tuple[str, Tensor]]]:
        """Yield the buckets, each checked before it is given out; all parameters must come.

        Raises UsageError naming what is unknown, misshapen or missing: before the first bucket if ``buckets`` is a
        list, else where it comes up, and for what is missing at the end.
        """
        missing = dict(self._unique)
        for bucket in self._checked_ahead(buckets):
            named = list(bucket)
            self._check({name: tensor.shape for name, tensor in named})
            yield named
            for name, _ in named:
                missing.pop(id(self._by_name[name]), None)
        self._refuse_missing(missing)

    def check(self, shapes: Mapping[str, Sequence[int]]) -> None:
        """Raise UsageError naming what is unknown, misshapen or missing among weights of these names and shapes."""
        self._check(shapes)
        given = {id(self._by_name[name]) for name in shapes}
        self._refuse_missing({key: tensor for key, tensor in self._unique.items() if key not in given})

    def _checked_ahead(self, buckets: Iterable[NamedTensors]) -> Iterable[NamedTensors]:
        """Check everything first if it is all here; a stream can only be checked bucket by bucket."""
        if not isinstance(buckets, (list, tuple)):
            return buckets
        complete = [list(bucket) for bucket in buckets]
        self.check({name: tensor.shape for bucket in complete for name, tensor in bucket})
        return complete

    def _check(self, shapes: Mapping[str, Sequence[int]]) -> None:
        unknown = [name for name in shapes if name not in self._by_name]
        if unknown:
            raise UsageError(f"update_weights: the model has no parameter {_listed(unknown)}")
        wrong = [
            f"{name} (got {list(shape)}, the model has {list(self._by_name[name].shape)})"
            for name, shape in shapes.items()
            if tuple(shape) != tuple(self._by_name[name].shape)
        ]
        if wrong:
            raise UsageError(f"update_weights: wrong shapes: {_listed(wrong)}")

    def _refuse_missing(self, missing: dict[int, Tensor]) -> None:
        if missing:
            names = [name for name, tensor in self._by_name.items() if id(tensor) in missing]
            raise UsageError(
                f"update_weights: {len(missing)} of {len(self._unique)} parameters did not come: {_listed(names)}"
            )
