"""What is one row of a batch?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rpcrl.batch import meta

if TYPE_CHECKING:
    from tensordict import TensorDict

__all__ = ["DataProtoItem"]


class DataProtoItem:
    """One row of a DataProto: ``batch`` without a batch dimension, one Python value per key, and the
    meta_info.
    """

    def __init__(
        self,
        batch: TensorDict | None = None,
        non_tensor_batch: Mapping[str, Any] | None = None,
        meta_info: Mapping[str, Any] | None = None,
    ) -> None:
        self.batch = batch
        self.non_tensor_batch = dict(non_tensor_batch or {})
        self.meta_info = meta.own(dict(meta_info or {}))

    def __repr__(self) -> str:
        tensors = [] if self.batch is None else list(self.batch.keys())
        return f"DataProtoItem(batch: {tensors}; non_tensor: {list(self.non_tensor_batch)})"
