"""What will a response still earn? A language model with a scalar head answers before each of its tokens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rpcrl.engines.hf_model import load_value_model
from rpcrl.engines.packing import Packed
from rpcrl.engines.sharded import Sharded

if TYPE_CHECKING:
    from rpcrl.batch.data_proto import DataProto

__all__ = ["FsdpCritic"]


class FsdpCritic(Sharded):
    """A critic: the training engine with a token-level value head instead of the vocabulary's.

    It trains, saves, loads and exports as ``FsdpEngine`` does; its loss functions get (values [n, R], micro-batch).
    """

    def _load(self, folder: Path, dtype: torch.dtype) -> Any:
        return load_value_model(folder, dtype=dtype)

    def compute_values(
        self, batch: DataProto, *, micro_batch_size: int | None = None, max_tokens: int | None = None
    ) -> Tensor:
        """Return the value before each response token, ``[N, R]`` float32, without gradient (collective).

        The value of a token is read where the token itself has not been seen yet: at the position before it. Reads
        ``input_ids``, ``attention_mask``, ``responses``; columns without a token are 0. All ranks must have the same
        number of rows.
        """
        (values,) = self._scored(batch, micro_batch_size, max_tokens, lambda micro: (self._values(micro),))
        return values

    def _outputs(self, micro: DataProto, loss_fn: Callable[..., Any]) -> tuple[Tensor]:
        return (self._values(micro),)

    def _values(self, micro: DataProto) -> Tensor:
        shown = self._shown(micro)
        with self._computing():
            scores: Tensor = self._model(**shown.arguments).logits.squeeze(-1)
        exact = scores if scores.dtype is torch.float64 else scores.float()
        if isinstance(shown, Packed):
            return shown.pad_back(exact[0, shown.predicting])
        return shown.pad_back(exact[:, exact.shape[1] - shown.width :])
