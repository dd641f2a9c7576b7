"""With which settings is a vLLM engine started, and what does its start say when they do not do?"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rpcrl import env
from rpcrl.errors import UsageError

__all__ = ["CPU_KV_CACHE_BYTES", "VllmSettings", "kv_cache_bytes", "open_engine"]

CPU_KV_CACHE_BYTES = 256 << 20
"""KV cache on a CPU when no setting says how large; vLLM alone would take 92 % of the machine's memory."""


@dataclass(frozen=True)
class VllmSettings:
    """Settings of ``actor_rollout_ref.rollout`` that only vLLM has."""

    max_model_len: int | None = None
    """Most tokens of a sequence; None: as many as the model has positions."""
    max_num_seqs: int = 256
    """Most sequences in one step."""
    kv_cache_bytes: int | None = None
    """Size of the KV cache; None: on GPUs what ``gpu_memory_utilization`` leaves, on CPUs 256 MiB."""
    gpu_memory_utilization: float = 0.5
    """Part of a GPU's memory that weights, activations and KV cache together may take."""
    enforce_eager: bool = True
    """Run without torch.compile and CUDA graphs."""
    enable_prefix_caching: bool = True
    """Compute the keys and values of equal beginnings once."""


def open_engine(folder: Path, settings: VllmSettings, *, dtype: str, device: str, limit: int, load: bool) -> Any:
    """Start vLLM's engine in this process.

    Collective over the default process group where there is one. Raises UsageError with vLLM's own words when it does
    not start.
    """
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    cache_bytes = settings.kv_cache_bytes
    if cache_bytes is None and device == "cpu":
        cache_bytes = CPU_KV_CACHE_BYTES
    arguments = EngineArgs(
        model=str(folder),
        skip_tokenizer_init=True,
        dtype=dtype,
        seed=0,
        load_format="auto" if load else "dummy",
        generation_config="vllm",
        enforce_eager=settings.enforce_eager,
        max_model_len=limit,
        max_num_seqs=settings.max_num_seqs,
        kv_cache_memory_bytes=cache_bytes,
        gpu_memory_utilization=settings.gpu_memory_utilization,
        enable_prefix_caching=settings.enable_prefix_caching,
        # Log-probs of the distribution that was sampled from: after temperature and filters.
        logprobs_mode="processed_logprobs",
        # A step returns what it has sampled: scheduled ahead, tokens of old weights would come after an update.
        async_scheduling=False,
        distributed_executor_backend=_executor(device),
        enable_sleep_mode=device == "cuda",
        disable_log_stats=True,
    )
    with _local_rank(device):
        if device == "cpu" and settings.enforce_eager:
            # If it was imported already, its variable came too late.
            torch._dynamo.config.disable = True
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)  # of torch, about names that vLLM looks at
                return LLMEngine.from_engine_args(arguments)
        except (ValueError, RuntimeError, AssertionError, NotImplementedError) as error:
            raise UsageError(_explained(error, settings, cache_bytes, limit)) from error


def _executor(device: str) -> str:
    """Name the executor: within the trainer's process group, or with a group of this process alone."""
    if dist.is_initialized():
        return "external_launcher"
    if device == "cpu":
        # vLLM would make one over a file in the temporary folder, and leave that there.
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    return "uni"


@contextlib.contextmanager
def _local_rank(device: str) -> Iterator[None]:
    """Name the device of this process by the index that it has here: a worker sees only its own."""
    own = env.get("LOCAL_RANK")
    if device == "cuda" and own is not None:
        env.put({"LOCAL_RANK": str(torch.cuda.current_device())})
    try:
        yield
    finally:
        if own is not None:
            env.put({"LOCAL_RANK": own})


def _explained(error: Exception, settings: VllmSettings, cache_bytes: int | None, limit: int) -> str:
    size = "what gpu_memory_utilization leaves" if cache_bytes is None else f"{cache_bytes >> 20} MiB"
    return (
        f"vLLM did not start: {type(error).__name__}: {error}\nIt was asked for sequences of up to {limit} tokens "
        f"(rollout.max_model_len), {settings.max_num_seqs} at once (rollout.max_num_seqs), and a KV cache of {size} "
        "(rollout.kv_cache_megabytes, rollout.gpu_memory_utilization)"
    )


def kv_cache_bytes(engine: Any) -> int:
    """Return the bytes of the KV cache as it was allocated."""
    (tensors,) = engine.collective_rpc(_cache_tensors)
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def _cache_tensors(worker: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for cache in worker.model_runner.kv_caches:
        found += [cache] if isinstance(cache, torch.Tensor) else list(cache)
    return found
