"""What does a configuration amount to? Samples, updates, replicas, devices, shares and weight syncs.

Arithmetic only. ``rpcrl plan`` prints this account and ``rpcrl.config.rules`` checks with the same
functions, so the two cannot differ.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

from rpcrl.config.run import RunConfig

__all__ = [
    "ACCOUNT_KEYS",
    "Account",
    "Learner",
    "Pool",
    "WeightSyncs",
    "account",
    "account_json",
    "all_devices",
    "has_agent_loop",
    "is_separate",
    "learners",
    "needs_critic",
    "needs_reference",
    "needs_reward_function",
    "optimizer_steps",
    "own_groups",
    "replica_devices",
    "reward_pool_devices",
    "rollout_devices",
    "trainer_devices",
]

ACCOUNT_KEYS = ("samples", "actor_updates", "replicas", "gpus", "worker_gpu_share", "weight_syncs", "pools")
"""Keys of the account in ``rpcrl plan --json``, frozen: programs read them."""


@dataclass(frozen=True)
class Pool:
    """One set of processes that worker groups share."""

    name: str
    process_on_nodes: tuple[int, ...]
    """Processes on each node."""
    gpus: int
    """Devices of the pool; 0 for plain CPU processes."""
    roles: tuple[str, ...]


@dataclass(frozen=True)
class WeightSyncs:
    """How often the rollout takes new weights, and over which distance."""

    per_step: int
    where: str
    """``same pool`` or ``cross pool``."""


@dataclass(frozen=True)
class Account:
    """The figures of one step of a run; a figure that does not come out whole is None."""

    samples: int
    """Responses per step: B x n."""
    actor_updates: int | None
    """Optimizer steps per step: B / M x epochs."""
    replicas: int | None
    """Rollout replicas: rollout devices / (TP x DP x PP)."""
    gpus: int
    """Devices of all pools (virtual ones where the device is a CPU)."""
    worker_gpu_share: Fraction
    """Part of a device that one worker accounts for: 1 / max_colocate_count."""
    weight_syncs: WeightSyncs
    pools: tuple[Pool, ...]


def is_separate(config: RunConfig) -> bool:
    """Say whether the rollout has a pool of its own."""
    return config.trainer.mode in ("separate", "separate-async")


def trainer_devices(config: RunConfig) -> int:
    """Return the world of the trainer's pool, devices; the actor's data-parallel size too."""
    return config.trainer.nnodes * config.trainer.n_gpus_per_node


def rollout_devices(config: RunConfig) -> int:
    """Return the devices that rollout replicas are made of."""
    if is_separate(config):
        rollout = config.actor_rollout_ref.rollout
        return rollout.nnodes * rollout.n_gpus_per_node
    return trainer_devices(config)


def all_devices(config: RunConfig) -> int:
    """Return the devices of trainer and rollout together, whether they share them or not."""
    return trainer_devices(config) + (rollout_devices(config) if is_separate(config) else 0)


def replica_devices(config: RunConfig) -> int:
    """Return the devices of one replica: TP x DP x PP."""
    rollout = config.actor_rollout_ref.rollout
    return rollout.tensor_model_parallel_size * rollout.data_parallel_size * rollout.pipeline_model_parallel_size


def reward_pool_devices(config: RunConfig) -> int:
    """Return the devices of the reward model's own pool; 0 without one."""
    model = config.reward.reward_model
    return model.nnodes * model.n_gpus_per_node if model.enable and model.enable_resource_pool else 0


def optimizer_steps(config: RunConfig) -> int | None:
    """Return B / M x epochs; None when M does not divide B."""
    actor = config.actor_rollout_ref.actor
    mini_batches, rest = divmod(config.data.train_batch_size, actor.ppo_mini_batch_size)
    return None if rest else mini_batches * actor.ppo_epochs


def needs_reference(config: RunConfig) -> bool:
    """Say whether the run has a reference policy."""
    return config.actor_rollout_ref.actor.use_kl_loss or config.algorithm.use_kl_in_reward


def needs_reward_function(config: RunConfig) -> bool:
    """Say whether a function scores responses: it does unless a reward model does, and none is named beside it."""
    return not config.reward.reward_model.enable or config.reward.fn is not None


def has_agent_loop(config: RunConfig) -> bool:
    """Say whether agent loops make the samples."""
    return config.actor_rollout_ref.rollout.agent.default_agent_loop is not None


def needs_critic(config: RunConfig) -> bool:
    """Say whether the run trains a critic."""
    enable = config.critic.enable
    return config.algorithm.adv_estimator == "gae" if enable is None else enable


def own_groups(config: RunConfig) -> tuple[str, ...]:
    """Return the roles of the trainer's pool that have a group beside the actor's."""
    found = ["ref"] if needs_reference(config) and config.actor_rollout_ref.ref.own_group else []
    return (*found, "critic") if needs_critic(config) and config.critic.own_group else tuple(found)


@dataclass(frozen=True)
class Learner:
    """A model that is trained, with the sizes of its updates."""

    name: str
    key: str
    """Full key of its section."""
    mini_batch: int
    """Prompts per optimizer step."""
    micro_batch: int | None
    epochs: int


def learners(config: RunConfig) -> tuple[Learner, ...]:
    """Return the actor and, where there is one, the critic, whose sizes are the actor's unless it has its own."""
    actor, critic = config.actor_rollout_ref.actor, config.critic
    found = [
        Learner(
            "actor",
            "actor_rollout_ref.actor",
            actor.ppo_mini_batch_size,
            actor.ppo_micro_batch_size_per_gpu,
            actor.ppo_epochs,
        )
    ]
    if needs_critic(config):
        found.append(
            Learner(
                "critic",
                "critic",
                critic.ppo_mini_batch_size or actor.ppo_mini_batch_size,
                critic.ppo_micro_batch_size_per_gpu,
                critic.ppo_epochs or actor.ppo_epochs,
            )
        )
    return tuple(found)


def _pools(config: RunConfig) -> tuple[Pool, ...]:
    separate = is_separate(config)
    trainer, rollout, reward = config.trainer, config.actor_rollout_ref.rollout, config.reward
    roles = ["actor"]
    if not separate:
        roles.append("rollout")
    if needs_reference(config):
        roles.append("ref")
    if needs_critic(config):
        roles.append("critic")
    if reward.reward_model.enable and not reward.reward_model.enable_resource_pool:
        roles.append("reward_model")
    pools = [Pool("global_pool", (trainer.n_gpus_per_node,) * trainer.nnodes, trainer_devices(config), tuple(roles))]
    if separate:
        pools.append(
            Pool(
                "rollout_pool",
                (rollout.n_gpus_per_node,) * rollout.nnodes,
                rollout_devices(config),
                ("rollout",),
            )
        )
    if reward.reward_model.enable and reward.reward_model.enable_resource_pool:
        model = reward.reward_model
        pools.append(
            Pool(
                "reward_pool",
                (model.n_gpus_per_node,) * model.nnodes,
                reward_pool_devices(config),
                ("reward_model",),
            )
        )
    if needs_reward_function(config):
        pools.append(Pool("reward_workers", (reward.num_workers,), 0, ("reward",)))
    if has_agent_loop(config):
        pools.append(Pool("agent_workers", (rollout.agent.num_workers,), 0, ("agent_loop",)))
    return tuple(pools)


def account(config: RunConfig) -> Account:
    """Return the figures of ``config``, whether or not it passes the rules."""
    replicas, rest = divmod(rollout_devices(config), replica_devices(config))
    pools = _pools(config)
    return Account(
        samples=config.data.train_batch_size * config.actor_rollout_ref.rollout.n,
        actor_updates=optimizer_steps(config),
        replicas=None if rest else replicas,
        gpus=sum(pool.gpus for pool in pools),
        worker_gpu_share=Fraction(1, config.trainer.max_colocate_count),
        weight_syncs=WeightSyncs(1, "cross pool" if is_separate(config) else "same pool"),
        pools=pools,
    )


def account_json(figures: Account | None) -> Mapping[str, object]:
    """Return the account under its frozen keys; every figure is null when there is no account."""
    if figures is None:
        return dict.fromkeys(ACCOUNT_KEYS)
    return {
        "samples": figures.samples,
        "actor_updates": figures.actor_updates,
        "replicas": figures.replicas,
        "gpus": figures.gpus,
        "worker_gpu_share": float(figures.worker_gpu_share),
        "weight_syncs": figures.weight_syncs.per_step,
        "pools": [
            {
                "name": pool.name,
                "process_on_nodes": list(pool.process_on_nodes),
                "gpus": pool.gpus,
                "roles": list(pool.roles),
            }
            for pool in figures.pools
        ],
    }
