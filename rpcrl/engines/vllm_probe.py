"""Does the installed vLLM have everything that the engine will call? Asked once, before an engine is made.

An upgrade that takes a call away is then an error at the start that names it, and not a run that ends at its first
weight sync.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from rpcrl.config.vllm_versions import INSTALL_VLLM, TESTED_RANGE, installed_vllm, is_tested
from rpcrl.errors import UsageError

__all__ = ["NEEDED", "Needed", "missing_capabilities", "require_vllm"]


@dataclass(frozen=True)
class Needed:
    """What the engine uses of one class or function of vLLM's."""

    module: str
    name: str
    members: Sequence[str] = ()
    """Methods of it."""
    parameters: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Method (empty: the class or function itself) → parameters that are given by name."""


NEEDED: tuple[Needed, ...] = (
    Needed(
        "vllm.v1.engine.llm_engine",
        "LLMEngine",
        ("add_request", "step", "abort_request", "collective_rpc", "sleep", "wake_up", "has_unfinished_requests"),
        {"reset_prefix_cache": ("reset_running_requests",), "from_engine_args": ("engine_args",)},
    ),
    Needed(
        "vllm.engine.arg_utils",
        "EngineArgs",
        (),
        {
            "": (
                "model", "dtype", "load_format", "skip_tokenizer_init", "seed", "enforce_eager", "max_model_len",
                "max_num_seqs", "kv_cache_memory_bytes", "gpu_memory_utilization", "enable_prefix_caching",
                "logprobs_mode", "async_scheduling", "distributed_executor_backend", "tensor_parallel_size",
                "generation_config", "enable_sleep_mode", "disable_log_stats",
            )
        },
    ),
    Needed(
        "vllm.sampling_params",
        "SamplingParams",
        (),
        {
            "": (
                "temperature", "top_p", "top_k", "seed", "max_tokens", "logprobs", "prompt_logprobs", "flat_logprobs",
                "stop_token_ids", "ignore_eos", "detokenize", "output_kind",
            )
        },
    ),
    Needed("vllm.sampling_params", "RequestOutputKind", ("DELTA", "FINAL_ONLY")),
    Needed("vllm.inputs.engine", "tokens_input"),
    Needed("vllm.v1.executor.abstract", "Executor", ("discard",)),
    Needed("vllm.v1.worker.gpu_worker", "Worker", ("get_model", "discard"), {"reload_weights": ("weights_iterator",)}),
    Needed("vllm.config", "set_current_vllm_config"),
    Needed("vllm.model_executor.model_loader.reload.layerwise", "get_layerwise_info"),
    Needed("vllm.model_executor.model_loader.reload.layerwise", "finalize_layerwise_reload"),
    Needed("vllm.model_executor.layers.vocab_parallel_embedding", "ParallelLMHead"),
)  # fmt: skip
"""Everything of vLLM that rpcrl touches."""


def missing_capabilities(load: Callable[[str], Any] = import_module) -> list[str]:
    """Return what of ``NEEDED`` is not there, one line each; ``load`` gives the module of a name."""
    missing = []
    for needed in NEEDED:
        where = f"{needed.module}.{needed.name}"
        try:
            found = getattr(load(needed.module), needed.name)
        except (ImportError, AttributeError) as error:
            missing.append(f"{where} ({type(error).__name__}: {error})")
            continue
        missing += [f"{where}.{member}" for member in needed.members if not hasattr(found, member)]
        for method, names in needed.parameters.items():
            target = getattr(found, method, None) if method else found
            if target is None:
                missing.append(f"{where}.{method}")
                continue
            given = inspect.signature(target).parameters
            if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in given.values()):
                label = f"{where}.{method}" if method else where
                missing += [f"{label}({name}=…)" for name in names if name not in given]
    return missing


def require_vllm(
    installed: Callable[[], tuple[str, str] | None] = installed_vllm, load: Callable[[str], Any] = import_module
) -> str:
    """Return the installed vLLM as ``name version``. Raises UsageError when there is none, or one that will not do."""
    found = installed()
    if found is None:
        raise UsageError(f"rollout.name=vllm: vLLM is not installed in this environment; {INSTALL_VLLM}")
    name, version = found
    if not is_tested(version):
        raise UsageError(
            f"rollout.name=vllm: {name} {version} is installed, and rpcrl is tested with vLLM {TESTED_RANGE}; "
            f"install one of these: {INSTALL_VLLM}"
        )
    missing = missing_capabilities(load)
    if missing:
        listed = "\n  ".join(missing)
        raise UsageError(
            f"rollout.name=vllm: {name} {version} does not have what the engine calls (vLLM {TESTED_RANGE} has it):\n"
            f"  {listed}\nIf an import failed, the installation is damaged: {INSTALL_VLLM}. rollout.name=torch works "
            "without vLLM"
        )
    return f"{name} {version}"
