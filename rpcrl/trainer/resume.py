"""Is the run that goes on the run that stopped? The settings that decide a run are compared before anything starts.

A checkpoint holds the values that its run had. What only says how long, how often or where (steps, evaluations,
checkpoints, micro-batches, names) may differ; what decides the samples, the loss or the updates may not.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rpcrl.config.keys import settings, short_key
from rpcrl.config.run import GSM8K_PREFIX
from rpcrl.errors import ConfigError, Violation

if TYPE_CHECKING:
    from rpcrl.config.run import RunConfig

__all__ = ["check_same_run", "deciding_settings", "named_checkpoint", "run_path"]

_DECIDING_SECTIONS = ("data.", "algorithm.", "actor_rollout_ref.model.", "actor_rollout_ref.actor.", "critic.")
_DECIDING = frozenset(
    {
        "actor_rollout_ref.rollout.agent.agent_loop_kwargs",
        "actor_rollout_ref.rollout.agent.default_agent_loop",
        "actor_rollout_ref.rollout.n",
        "actor_rollout_ref.rollout.name",
        "actor_rollout_ref.rollout.temperature",
        "actor_rollout_ref.rollout.top_k",
        "actor_rollout_ref.rollout.top_p",
        "reward.fn",
        "reward.reward_kwargs",
        "reward.reward_model.enable",
        "reward.reward_model.model_path",
        "reward.reward_model.weight",
        "trainer.critic_warmup",
        "trainer.mode",
        "trainer.seed",
    }
)
_FREE = frozenset(
    {
        "data.val_files",
        "data.val_batch_size",
        "data.val_max_samples",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu",
        "actor_rollout_ref.actor.use_dynamic_bsz",
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu",
        "actor_rollout_ref.actor.strategy",
        "actor_rollout_ref.actor.fsdp_config.mixed_precision.reduce_dtype",
        "actor_rollout_ref.model.use_remove_padding",
        "actor_rollout_ref.ref.own_group",
        "actor_rollout_ref.model.enable_gradient_checkpointing",
        "critic.model.use_remove_padding",
        "critic.model.enable_gradient_checkpointing",
        "critic.use_dynamic_bsz",
        "critic.ppo_max_token_len_per_gpu",
        "critic.forward_max_token_len_per_gpu",
        "critic.own_group",
        "critic.ppo_micro_batch_size_per_gpu",
        "critic.forward_micro_batch_size_per_gpu",
    }
)
_PATHS = frozenset(
    {"data.train_files", "actor_rollout_ref.model.path", "critic.model.path", "reward.reward_model.model_path"}
)


def deciding_settings(config: RunConfig) -> dict[str, Any]:
    """Return the settings that decide a run by their full keys, as plain JSON; paths that exist are absolute."""
    tree = config.model_dump(mode="json")
    found: dict[str, Any] = {}
    for key in settings():
        if key in _DECIDING or (key.startswith(_DECIDING_SECTIONS) and key not in _FREE):
            value: Any = tree
            for part in key.split("."):
                value = value[part]
            found[key] = _absolute(value) if key in _PATHS and isinstance(value, str) else value
    return found


def check_same_run(saved: Mapping[str, Any], config: RunConfig, *, directory: Path) -> None:
    """Raise ConfigError with every deciding setting whose value is not the one of the checkpoint in ``directory``.

    A setting that the checkpoint does not know is not compared; neither is a path that is no longer there.
    """
    violations = []
    for key, mine in deciding_settings(config).items():
        theirs = saved.get(key, mine)
        if theirs == mine or (key in _PATHS and isinstance(theirs, str) and mine and not _exists(theirs)):
            continue
        name = short_key(key)
        was, now = (_shown(value) for value in (theirs, mine))
        problem = f"the run in {directory} was made with {name}={was}, this command has {name}={now}"
        remedies = (f"set {name}={was}", "or start a new run from its model: model.path=RUN_DIR/hf --run-dir runs/new")
        violations.append(Violation(key, problem, remedies))
    if violations:
        raise ConfigError(violations)


def named_checkpoint(config: RunConfig) -> Path | None:
    """Return the checkpoint that ``trainer.resume`` names by its path, if it names one."""
    resume = config.trainer.resume
    return None if resume in ("disable", "auto") else Path(resume).expanduser().absolute()


def run_path(config: RunConfig, given: Path | str | None) -> Path:
    """Return the run's directory: ``given``, else the configuration's, else the checkpoint's run, else a new one."""
    trainer = config.trainer
    given = given or trainer.run_dir
    checkpoint = named_checkpoint(config)
    if given is not None:
        return Path(given).expanduser().absolute()
    if checkpoint is not None:
        return checkpoint.parent.parent
    if trainer.resume == "auto":
        problem = "auto needs to know which run to go on with"
        raise ConfigError([Violation("trainer.resume", problem, ("name it: --run-dir DIR",))])
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    return Path("runs").absolute() / trainer.project_name / f"{trainer.experiment_name}-{stamp}"


def _absolute(path: str) -> str:
    """Return a path that is the same from every folder; what names no file (a built-in task) stays."""
    prefix = GSM8K_PREFIX if path.startswith(GSM8K_PREFIX) else ""
    file = Path(path.removeprefix(prefix)).expanduser()
    return f"{prefix}{file.resolve()}" if file.exists() else path


def _exists(path: str) -> bool:
    """Say whether a path that was written into a checkpoint still leads somewhere here; a task always does."""
    return "/" not in path or Path(path.removeprefix(GSM8K_PREFIX)).exists()


def _shown(value: object) -> str:
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)
