"""How is the account of a run shown to a human? Each figure with the formula and the settings it comes from."""

from __future__ import annotations

from rpcrl.config.account import (
    Account,
    account,
    is_separate,
    learners,
    replica_devices,
    reward_pool_devices,
    rollout_devices,
    trainer_devices,
)
from rpcrl.config.run import RunConfig

__all__ = ["account_lines", "account_rows", "title"]


def title(config: RunConfig) -> str:
    """Return one line that names the run."""
    trainer = config.trainer
    length = (
        f"{trainer.total_epochs} epochs"
        if trainer.total_training_steps is None
        else f"{trainer.total_training_steps} steps"
    )
    task = config.data.train_files or "sort_digits"
    return f"{trainer.mode} · {config.algorithm.adv_estimator} · {task} · {length} · seed {trainer.seed}"


def account_rows(config: RunConfig) -> list[tuple[str, str, str]]:
    """Return (what, value, formula) of every figure; a figure that does not come out whole is a dash."""
    figures = account(config)
    actor, rollout, trainer = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout, config.trainer
    batch, mini, n = config.data.train_batch_size, actor.ppo_mini_batch_size, rollout.n
    tp, dp, pp = (
        rollout.tensor_model_parallel_size,
        rollout.data_parallel_size,
        rollout.pipeline_model_parallel_size,
    )
    kind = "" if trainer.device == "cuda" else f", {trainer.device}"
    rows = [
        ("prompts per step", str(batch), "B = data.train_batch_size"),
        ("samples per step", str(figures.samples), f"B x n = {batch} x {n}"),
        (
            "rollout replicas",
            _or_dash(figures.replicas),
            f"{rollout_devices(config)} / (TP {tp} x DP {dp} x PP {pp} = {replica_devices(config)})",
        ),
        ("actor mini-batch, samples", str(mini * n), f"M x n = {mini} x {n}"),
        (
            "actor updates per step",
            _or_dash(figures.actor_updates),
            f"B / M x epochs = {batch} / {mini} x {actor.ppo_epochs}",
        ),
        *_critic_rows(config),
        (
            "device share of a worker",
            f"{float(figures.worker_gpu_share):.3f}",
            f"1 / max_colocate_count = 1 / {trainer.max_colocate_count}",
        ),
        ("devices", str(figures.gpus), _devices_formula(config) + kind),
        ("weight syncs per step", str(figures.weight_syncs.per_step), figures.weight_syncs.where),
    ]
    if trainer.mode.endswith("-async"):
        rows.append(_staleness_row(config, figures))
    return rows


def _critic_rows(config: RunConfig) -> list[tuple[str, str, str]]:
    batch = config.data.train_batch_size
    return [
        (
            f"{learner.name} updates per step",
            "-" if batch % learner.mini_batch else str(batch // learner.mini_batch * learner.epochs),
            f"B / M x epochs = {batch} / {learner.mini_batch} x {learner.epochs}",
        )
        for learner in learners(config)[1:]
    ]


def _devices_formula(config: RunConfig) -> str:
    parts = [f"trainer {trainer_devices(config)}"]
    parts.append(f"rollout {rollout_devices(config) if is_separate(config) else 0}")
    if reward_pool_devices(config):
        parts.append(f"reward {reward_pool_devices(config)}")
    return " + ".join(parts)


def _staleness_row(config: RunConfig, figures: Account) -> tuple[str, str, str]:
    versions = config.trainer.max_staleness
    updates = "?" if figures.actor_updates is None else str(versions * figures.actor_updates)
    return ("oldest sample, versions", str(versions), f"trainer.max_staleness; that is {updates} actor updates")


def account_lines(config: RunConfig) -> list[str]:
    """Return the account as aligned lines, pools last."""
    rows = account_rows(config)
    width = max(len(what) for what, _, _ in rows)
    value_width = max(len(value) for _, value, _ in rows)
    lines = [f"  {what:<{width}}  {value:>{value_width}}   {formula}" for what, value, formula in rows]
    lines.append("  pools")
    for pool in account(config).pools:
        per_node = " + ".join(map(str, pool.process_on_nodes))
        devices = f"{pool.gpus} devices" if pool.gpus else "no device"
        lines.append(f"    {pool.name:<16} {per_node} processes, {devices}: {', '.join(pool.roles)}")
    return lines


def _or_dash(value: int | None) -> str:
    return "-" if value is None else str(value)
