"""How does a causal language model get its responses' log-probs, and learn from losses of them?"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rpcrl.algorithms.logits import log_prob_and_entropy
from rpcrl.engines.hf_model import load_model
from rpcrl.engines.packing import Packed
from rpcrl.engines.sharded import Sharded

if TYPE_CHECKING:
    from rpcrl.batch.data_proto import DataProto

__all__ = ["FsdpEngine"]


class FsdpEngine(Sharded):
    """A training engine (``rpcrl.engines.base.TrainEngine``) over a Transformers causal LM."""

    def _load(self, folder: Path, dtype: torch.dtype) -> Any:
        return load_model(folder, dtype=dtype)

    def compute_log_prob(
        self, batch: DataProto, *, micro_batch_size: int | None = None, max_tokens: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return log-probs and entropy of the responses, each ``[N, R]`` float32, without gradient (collective).

        Reads ``input_ids``, ``attention_mask``, ``responses`` and meta_info ``temperature`` (default 1); columns
        without a token are 0. All ranks must have the same number of rows.
        """
        log_prob, entropy = self._scored(
            batch, micro_batch_size, max_tokens, lambda micro: self._score(micro, entropy_gradient=False)
        )
        return log_prob, entropy

    def copy_weights(self) -> dict[str, Tensor]:
        """Return a copy, in CPU memory, of what this rank holds of each weight."""
        return {name: local.detach().to("cpu", copy=True) for name, local in self._locals.items()}

    def put_weights(self, kept: Mapping[str, Tensor]) -> None:
        """Put the weights of ``copy_weights`` back; optimizer state and version stay as they are."""
        with torch.no_grad():
            for name, local in self._locals.items():
                local.copy_(kept[name])

    def _outputs(self, micro: DataProto, loss_fn: Callable[..., Any]) -> tuple[Tensor, Tensor]:
        return self._score(micro, entropy_gradient=bool(getattr(loss_fn, "needs_entropy_gradient", True)))

    def _score(self, micro: DataProto, *, entropy_gradient: bool) -> tuple[Tensor, Tensor]:
        """Return log-probs and entropies ``[n, R]`` of a micro-batch, on the device."""
        shown = self._shown(micro)
        keep = shown.predicting if isinstance(shown, Packed) else shown.width
        with self._computing():
            logits = self._model(**shown.arguments, logits_to_keep=keep).logits
        if isinstance(shown, Packed):
            logits = logits.squeeze(0)
        temperature = float(micro.meta_info.get("temperature", 1.0))
        log_prob, entropy = log_prob_and_entropy(
            logits, shown.targets, temperature=temperature, entropy_gradient=entropy_gradient
        )
        return shown.pad_back(log_prob), shown.pad_back(entropy)
