"""Which settings does sampling have: the engine, its replicas, its own pool, and how weights get there?"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rpcrl.config.agent import Agent
from rpcrl.config.section import Count, CountOrZero, NotNegative, Positive, Section, Text
from rpcrl.config.section import setting as _setting

__all__ = ["CheckpointEngine", "Rollout", "ValKwargs"]


class ValKwargs(Section):
    """Sampling on held-out prompts."""

    do_sample: bool = _setting(False, "Sample; false is greedy")
    temperature: NotNegative = _setting(0.0, "Temperature when do_sample is true")
    top_k: int = _setting(-1, "Keep the k likeliest tokens; -1 keeps all")
    top_p: Annotated[float, Field(gt=0, le=1)] = _setting(1.0, "Keep the likeliest tokens up to this probability")
    n: Count = _setting(1, "Responses per held-out prompt")


class CheckpointEngine(Section):
    """How weights get from the trainer to the rollout."""

    backend: Text = _setting(
        "naive",
        "naive (in place, one pool), broadcast or nccl (torch.distributed over two pools), or a channel of yours: "
        "module:Class or file.py:Class; broadcast if unset in separate",
    )
    update_weights_bucket_megabytes: Count = _setting(256, "Weights moved at once, MiB")
    update_weights_timeout_s: Positive = _setting(
        30.0, "Separate modes: how long ranks wait for one another in each part of a weight sync, s"
    )


class Rollout(Section):
    """Sampling: the engine, its replicas, and its own pool in the separate modes."""

    name: Literal["torch", "vllm", "sglang"] = _setting("torch", "Rollout engine")
    dtype: Literal["float32", "bfloat16", "float16"] | None = _setting(
        None, "Number type that the rollout computes in; null takes model.dtype"
    )
    n: Count = _setting(8, "Samples per prompt")
    temperature: Positive = _setting(1.0, "Sampling temperature in training")
    top_k: int = _setting(-1, "Keep the k likeliest tokens; -1 keeps all")
    top_p: Annotated[float, Field(gt=0, le=1)] = _setting(1.0, "Keep the likeliest tokens up to this probability")
    tensor_model_parallel_size: Count = _setting(1, "TP, devices that share each layer of a replica")
    data_parallel_size: Count = _setting(1, "DP inside one replica, devices")
    pipeline_model_parallel_size: Count = _setting(1, "PP, stages of a replica")
    nnodes: CountOrZero = _setting(
        0, "Nodes of the rollout's own pool; 0 in the colocate modes, 1 if unset in separate"
    )
    n_gpus_per_node: CountOrZero = _setting(0, "Devices per node of the rollout's own pool; 1 if unset in separate")
    calculate_log_probs: bool = _setting(True, "Return the log-prob of each sampled token")
    free_cache_engine: bool = _setting(
        True, "Free the rollout's weights and cache while the trainer works; colocate modes"
    )
    log_prob_micro_batch_size_per_gpu: Count | None = _setting(
        None, "Samples per forward pass when log-probs are recomputed; null takes all of the rank's"
    )
    log_prob_use_dynamic_bsz: bool | None = _setting(
        None, "Cut by tokens when log-probs are recomputed; null takes actor.use_dynamic_bsz"
    )
    log_prob_max_token_len_per_gpu: Count | None = _setting(
        None, "Tokens per forward pass then; null takes actor.ppo_max_token_len_per_gpu"
    )
    max_model_len: Count | None = _setting(
        None, "vLLM: most tokens of a sequence; null takes data.max_prompt_length + data.max_response_length"
    )
    max_num_seqs: Count = _setting(256, "vLLM: most sequences that one step advances")
    kv_cache_megabytes: Count | None = _setting(
        None, "vLLM: KV cache of a replica's rank, MiB; null takes 256 on a CPU, and what is left on a GPU"
    )
    gpu_memory_utilization: Annotated[float, Field(gt=0, lt=1)] = _setting(
        0.5, "vLLM: part of a GPU's memory for weights, activations and KV cache together"
    )
    enforce_eager: bool = _setting(True, "vLLM: run without torch.compile and CUDA graphs")
    enable_prefix_caching: bool = _setting(True, "vLLM: compute the keys and values of equal beginnings once")
    canary: bool = _setting(
        True,
        "vLLM: compare its log-probs of a fixed text with the trainer's after each weight sync; refuse to sample "
        "where they differ",
    )
    val_kwargs: ValKwargs = ValKwargs()
    agent: Agent = Agent()
    checkpoint_engine: CheckpointEngine = CheckpointEngine()
