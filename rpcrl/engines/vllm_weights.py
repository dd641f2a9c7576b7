"""How do a trainer's weights get into a vLLM model in place?

vLLM packs and fuses layers when it loads them (q, k and v become one matrix; on CPUs a matrix becomes an opaque
handle), so nothing can be copied over a parameter. Its own layerwise reload is used: it gathers what belongs to a
layer, loads and packs the layer once all is there, and writes the result into the memory that the layer had. Two things
are added: what vLLM still holds of a bucket when the next one comes is copied first, because a bucket's memory is used
again; and on CPUs an output layer that shares its weights with the embedding is packed again, which vLLM leaves out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rpcrl.engines.base import NamedTensors
from rpcrl.engines.hf_model import build_model, load_config
from rpcrl.engines.parameters import ParameterStore

__all__ = ["HfWeights", "load_in_place"]


class HfWeights:
    """Which weights a model folder has under Hugging Face names: known from its configuration, without memory."""

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        with torch.device("meta"):
            module = build_model(load_config(folder), dtype=dtype)
        self.store = ParameterStore(module)
        first: dict[int, str] = {id(tensor): name for name, tensor in module.named_parameters()}
        every = dict(module.named_parameters(remove_duplicate=False))
        self.loaded_as: dict[str, str] = {name: first[id(tensor)] for name, tensor in every.items()}
        """Name → the one of its tied names that vLLM loads."""
        self.size_bytes = sum(every[name].numel() * every[name].element_size() for name in first.values())
        self.vocabulary = int(module.get_input_embeddings().weight.shape[0])

    def checked(self, buckets: Iterable[NamedTensors]) -> Iterator[list[tuple[str, Tensor]]]:
        """Yield the buckets under the names that vLLM loads; see ``ParameterStore.checked``."""
        for bucket in self.store.checked(buckets):
            yield [(self.loaded_as[name], tensor) for name, tensor in bucket]


def load_in_place(worker: Any, buckets: Iterable[list[tuple[str, Tensor]]]) -> None:
    """Load weights into a vLLM worker's model, whatever buckets its fused layers are spread over.

    When ``buckets`` raises, or vLLM does, layers that were complete have the new weights, the others the old ones, and
    a later complete load gives what a new engine would have.
    """
    from vllm.config import set_current_vllm_config

    model = worker.get_model()
    with set_current_vllm_config(worker.vllm_config):
        try:
            worker.reload_weights(weights_iterator=_streamed(model, buckets))
        except BaseException:
            _put_back(worker, model)
            raise
        _pack_tied_output(model)


def _streamed(model: Any, buckets: Iterable[list[tuple[str, Tensor]]]) -> Iterator[tuple[str, Tensor]]:
    for bucket in buckets:
        yield from bucket
        _keep_pending(model, {tensor.untyped_storage().data_ptr() for _, tensor in bucket})


def _keep_pending(model: Any, storages: set[int]) -> None:
    """Copy those tensors of a bucket that wait in vLLM for the rest of their layer: their memory is used again."""
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    copies: dict[tuple[int, tuple[int, ...], tuple[int, ...]], Tensor] = {}
    for layer in model.modules():
        for _, bound in get_layerwise_info(layer).loaded_weights:
            for name, value in bound.arguments.items():
                if isinstance(value, Tensor) and value.untyped_storage().data_ptr() in storages:
                    key = (value.data_ptr(), tuple(value.shape), tuple(value.stride()))
                    if key not in copies:
                        copies[key] = value.clone()
                    bound.arguments[name] = copies[key]


def _put_back(worker: Any, model: Any) -> None:
    """End a load that broke off: layers that were not complete get the memory back that they had."""
    from vllm.model_executor.model_loader.reload.layerwise import finalize_layerwise_reload, get_layerwise_info

    for layer in model.modules():
        info = get_layerwise_info(layer)
        info.loaded_weights.clear()
        info.load_numel = 0
    finalize_layerwise_reload(model, worker.model_config)


def _pack_tied_output(model: Any) -> None:
    """Pack output layers again that hold a packed copy of the embedding (CPUs); elsewhere there is none."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    for module in model.modules():
        if isinstance(module, ParallelLMHead) and hasattr(module, "cpu_linear"):
            module.quant_method.process_weights_after_loading(module)
