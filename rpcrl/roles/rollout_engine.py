"""Which engine does a rollout worker sample with, and with which settings is it made?"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rpcrl.errors import UsageError

if TYPE_CHECKING:
    from rpcrl.config.run import ActorRolloutRef, Rollout
    from rpcrl.engines.base import RolloutEngine
    from rpcrl.engines.vllm_start import VllmSettings

__all__ = ["open_rollout_engine", "vllm_settings"]


def open_rollout_engine(config: ActorRolloutRef, *, model_path: str, device: str, threads: int) -> RolloutEngine:
    """Return the engine that ``rollout.name`` says, without weights: a rollout that misses them refuses to sample.

    The trainer's process group, where the worker has one, must be there already. Raises UsageError for an engine that
    this version does not have, or that is not installed.
    """
    rollout = config.rollout
    dtype = rollout.dtype or config.model.dtype
    if rollout.name == "torch":
        from rpcrl.engines.torch_rollout import TorchRolloutEngine

        return TorchRolloutEngine(model_path, dtype=dtype, device=device, threads=threads, load_weights=False)
    if rollout.name == "vllm":
        from rpcrl.engines.vllm_rollout import VllmRolloutEngine

        return VllmRolloutEngine(
            model_path,
            dtype=dtype,
            device=device,
            threads=threads,
            load_weights=False,
            settings=vllm_settings(rollout),
        )
    raise UsageError(f"rollout.name={rollout.name!r}: this version has the engines 'torch' and 'vllm'")


def vllm_settings(rollout: Rollout) -> VllmSettings:
    """Return the settings that only vLLM has."""
    from rpcrl.engines.vllm_start import VllmSettings

    megabytes = rollout.kv_cache_megabytes
    return VllmSettings(
        max_model_len=rollout.max_model_len,
        max_num_seqs=rollout.max_num_seqs,
        kv_cache_bytes=None if megabytes is None else megabytes << 20,
        gpu_memory_utilization=rollout.gpu_memory_utilization,
        enforce_eager=rollout.enforce_eager,
        enable_prefix_caching=rollout.enable_prefix_caching,
    )
