"""What does ``rpcrl launch`` refuse that ``rpcrl plan`` accounts? What this version does not run.

The checks start nothing and change nothing; each returns violations for ``load(also=...)``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from rpcrl.config.account import has_agent_loop, is_separate, replica_devices, rollout_devices
from rpcrl.config.keys import settings, short_key
from rpcrl.config.rule import BACKEND, ROLLOUT
from rpcrl.config.run import RunConfig
from rpcrl.config.vllm_rules import vllm_checks
from rpcrl.errors import Violation

__all__ = ["IDLE", "resume_checks", "version_checks"]

_AGENT = f"{ROLLOUT}.agent"
_REWARD_MODEL = "reward.reward_model"
_SEPARATE = ("separate", "separate-async")
_ASYNC = ("colocate-async", "separate-async")
_SAMPLER = "trainer.v1.sampler"
_OF_MODES: Mapping[str, tuple[tuple[str, ...], str]] = {
    f"{ROLLOUT}.n_gpus_per_node": (_SEPARATE, "belongs to the rollout's own pool in the separate modes"),
    f"{ROLLOUT}.checkpoint_engine.update_weights_timeout_s": (_SEPARATE, "belongs to weight syncs between 2 pools"),
    f"{ROLLOUT}.checkpoint_engine.backend": (
        _SEPARATE,
        "is how weights cross pools in the separate modes; in one pool they are handed over in place",
    ),
    f"{ROLLOUT}.free_cache_engine": (
        ("colocate", "colocate-async"),
        "is about devices that trainer and rollout share; in the separate modes they share none",
    ),
    "trainer.max_staleness": (_ASYNC, "belongs to the async modes"),
    f"{_SAMPLER}.max_off_policy_strategy": (_ASYNC, "belongs to the async modes"),
    f"{_SAMPLER}.task_timeout_s": (_ASYNC, "belongs to the async modes"),
    "trainer.v1.colocate_async.num_warmup_batches": (("colocate-async",), "belongs to mode colocate-async"),
    "trainer.v1.separate_async.num_warmup_batches": (("separate-async",), "belongs to mode separate-async"),
    "trainer.v1.separate_async.parameter_sync_step": (("separate-async",), "belongs to mode separate-async"),
}
"""Settings that some modes read: those modes, and what to say in the others."""
IDLE: Mapping[str, str] = {
    **dict.fromkeys(
        (
            f"{_AGENT}.{name}"
            for name in (
                "num_workers",
                "agent_loop_kwargs",
                "task_timeout_s",
                "max_attempts",
                "on_failed_task",
                "placement",
            )
        ),
        "belongs to agent loops, and rollout.agent.default_agent_loop is null",
    ),
    **{key: why for key, (_, why) in _OF_MODES.items()},
    **dict.fromkeys(
        (
            f"{_REWARD_MODEL}.{name}"
            for name in (
                "enable_resource_pool",
                "nnodes",
                "n_gpus_per_node",
                "model_path",
                "micro_batch_size_per_gpu",
                "weight",
            )
        ),
        "belongs to a reward model, and reward.reward_model.enable is false",
    ),
}
"""Settings that not every run reads, each with the reason; a launch that does not takes only their defaults."""

_PARALLEL = ("tensor_model_parallel_size", "data_parallel_size", "pipeline_model_parallel_size")


def version_checks(config: RunConfig) -> list[Violation]:
    """Return what this version accounts but does not run."""
    rules = (_nodes, _engines, vllm_checks, _transports, _agent_loops, _idle)
    return [violation for rule in rules for violation in rule(config)]


def _nodes(config: RunConfig) -> Iterator[Violation]:
    if config.trainer.nnodes > 1:
        yield Violation(
            "trainer.nnodes",
            f"this version runs on one machine; {config.trainer.nnodes} nodes are accounted by `rpcrl plan`",
            (f"set trainer.nnodes=1 (with trainer.n_gpus_per_node={config.trainer.n_gpus_per_node})",),
        )
    rollout = config.actor_rollout_ref.rollout
    if is_separate(config) and rollout.nnodes > 1:
        yield Violation(
            f"{ROLLOUT}.nnodes",
            f"this version runs on one machine; {rollout.nnodes} nodes of the rollout are accounted by `rpcrl plan`",
            (f"set rollout.nnodes=1 (with rollout.n_gpus_per_node={rollout.n_gpus_per_node})",),
        )


def _transports(config: RunConfig) -> Iterator[Violation]:
    backend = config.actor_rollout_ref.rollout.checkpoint_engine.backend
    if is_separate(config) and backend == "nccl" and config.trainer.device == "cpu":
        ranks = 1 + rollout_devices(config)
        yield Violation(
            BACKEND,
            f"nccl moves weights between GPUs, one for each of its {ranks} ranks (trainer rank 0 and "
            f"{rollout_devices(config)} of the rollout); with trainer.device=cpu there are 0",
            ("set rollout.checkpoint_engine.backend=broadcast (gloo on CPUs)", "or set trainer.device=cuda"),
        )


def _engines(config: RunConfig) -> Iterator[Violation]:
    rollout = config.actor_rollout_ref.rollout
    if rollout.name == "vllm":
        return
    if rollout.name != "torch":
        yield Violation(
            f"{ROLLOUT}.name",
            f"this version samples with the engines torch and vllm; {rollout.name} is accounted by `rpcrl plan` and "
            "not run",
            ("set rollout.name=torch", "or set rollout.name=vllm"),
        )
        return
    for name in _PARALLEL:
        size = getattr(rollout, name)
        if size > 1:
            yield Violation(
                f"{ROLLOUT}.{name}",
                f"the engine torch runs a replica in 1 process, but {name}={size} spreads it over TP x DP x PP = "
                f"{replica_devices(config)}",
                (f"set rollout.{name}=1",),
            )


def _agent_loops(config: RunConfig) -> Iterator[Violation]:
    if has_agent_loop(config) and config.trainer.mode in _ASYNC:
        yield Violation(
            f"{_AGENT}.default_agent_loop",
            f"agent loops make whole batches in this version; mode {config.trainer.mode} asks for 1 prompt at a time",
            ("choose --mode colocate or --mode separate", "or leave rollout.agent.default_agent_loop out"),
        )


def _idle(config: RunConfig) -> Iterator[Violation]:
    """Yield what is set and would be ignored."""
    mode = config.trainer.mode
    idle = {key: why for key, why in IDLE.items() if mode not in _OF_MODES.get(key, ((), ""))[0]}
    idle = {key: why for key, why in idle.items() if not _is_used(config, key)}
    for key, why in idle.items():
        value: object = config
        for part in key.split("."):
            value = getattr(value, part)
        default = settings()[key].default
        if value != default:
            name, usual = short_key(key), "null" if default is None else str(default).lower()
            yield Violation(
                key, f"{value} would change nothing: {name} {why}", (f"leave it out, or set {name}={usual}",)
            )


def _is_used(config: RunConfig, key: str) -> bool:
    """Say whether a setting of agent loops or of the reward model steers something in this run."""
    model = config.reward.reward_model
    if key.startswith(f"{_AGENT}."):
        return has_agent_loop(config)
    if not model.enable or not key.startswith(_REWARD_MODEL):
        return False
    if key.endswith(("nnodes", "n_gpus_per_node")):
        return model.enable_resource_pool
    return not key.endswith("weight") or config.reward.fn is not None


def resume_checks(config: RunConfig) -> list[Violation]:
    """Return a violation when a checkpoint is named that is not there."""
    resume = config.trainer.resume
    if resume in ("disable", "auto") or Path(resume).expanduser().is_dir():
        return []
    folder = Path(resume).expanduser().absolute()
    return [
        Violation(
            "trainer.resume",
            f"no folder {folder}",
            ("name a checkpoint: --resume RUN_DIR/checkpoints/global_step_10", "or the run: --run-dir DIR --resume"),
        )
    ]
