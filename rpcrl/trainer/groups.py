"""Which processes does a run have, and how are they started without waiting for one another?

The global pool holds one process a slot with actor, rollout and (where there are any) reference and critic in it, and
one more a slot for each of the two that has its own group. In the separate modes the rollout has a pool of its own,
on devices behind the trainer's, and weights are synced between the two. A reward model is one more role of the global
pool, or has a pool of its own. Reward functions run in plain CPU processes that never load torch.
All start at once, in threads, so that the driver can load its own libraries meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rpcrl.config.account import (
    account,
    has_agent_loop,
    is_separate,
    needs_critic,
    needs_reference,
    own_groups,
    replica_devices,
    reward_pool_devices,
    rollout_devices,
    trainer_devices,
)
from rpcrl.config.registry import AGENT_LOOPS, POLICY_LOSSES
from rpcrl.env import THREAD_VARIABLES
from rpcrl.runtime.future import wait_all
from rpcrl.runtime.loading import loading
from rpcrl.topology import ResourcePool, ResourcePoolManager

if TYPE_CHECKING:
    from rpcrl.agents.manager import AgentLoopManager
    from rpcrl.config.run import ActorRolloutRef, Data, RunConfig
    from rpcrl.roles.critic import CriticWorker
    from rpcrl.roles.pool_sync import WeightSync
    from rpcrl.roles.reference import ReferenceWorker
    from rpcrl.roles.reward_model import RewardModelWorker
    from rpcrl.runtime.controller import Controller
    from rpcrl.runtime.worker_group import ClassWithInitArgs
    from rpcrl.trainer.replicas import ReplicaSync

__all__ = ["GroupStart", "RoleGroups", "named_processes", "resolve_device"]

CONNECT_S = 120.0
"""How long agent-loop workers may take to know the replicas."""


@dataclass(frozen=True)
class RoleGroups:
    """The groups of a run, one view a role; None for those that the run needs none of."""

    actor: Any
    rollout: Any
    reference: Any | None
    reward: Any | None
    """Processes that run the reward function."""
    critic: Any | None = None
    sync: WeightSync | ReplicaSync | None = None
    """The way of the weights to a rollout in processes of its own; None where it shares the actor's."""
    reward_model: Any | None = None
    agents: AgentLoopManager | None = None
    """The processes of agent loops, which make the samples where there are any."""

    @property
    def sampler(self) -> Any:
        """Whoever has ``generate_sequences``: the rollout, or agent loops that call it."""
        return self.rollout if self.agents is None else self.agents

    def learners(self) -> dict[str, Any]:
        """Return the groups whose models are trained and saved."""
        return {"actor": self.actor} if self.critic is None else {"actor": self.actor, "critic": self.critic}

    def by_role(self) -> dict[str, Any]:
        """Return the groups that are there, by the names that the summary uses."""
        groups = {
            "actor": self.actor,
            "critic": self.critic,
            "rollout": self.rollout,
            "ref": self.reference,
            "reward": self.reward,
            "reward_model": self.reward_model,
            "agent_loop": self.agents,
        }
        return {role: group for role, group in groups.items() if group is not None}

    def close(self) -> dict[str, int]:
        """End all groups; returns the most bytes that a process of each role has had resident."""
        return {role: max(exit.peak_rss_bytes for exit in group.close()) for role, group in self.by_role().items()}


def resolve_device(config: RunConfig) -> str:
    """Return ``cpu`` or ``cuda``; ``auto`` takes cuda where every slot of a node has a device, in both pools."""
    device = config.trainer.device
    if device != "auto":
        return device
    with loading():
        import torch

    wanted = config.trainer.n_gpus_per_node
    if is_separate(config):
        wanted += config.actor_rollout_ref.rollout.n_gpus_per_node
    if reward_pool_devices(config):
        wanted += config.reward.reward_model.n_gpus_per_node
    return "cuda" if torch.cuda.device_count() >= wanted else "cpu"


def named_processes(config: RunConfig, reward_fn: str | None) -> str:
    """Return which processes a run starts, for a person."""
    parts = [f"{trainer_devices(config)} trainer"]
    if is_separate(config):
        parts.append(f"{rollout_devices(config)} rollout")
    if reward_fn is not None:
        parts.append(f"{config.reward.num_workers} reward")
    if has_agent_loop(config):
        parts.append(f"{config.actor_rollout_ref.rollout.agent.num_workers} agent-loop")
    if reward_pool_devices(config):
        parts.append(f"{reward_pool_devices(config)} reward model")
    shown = f"{', '.join(parts[:-1])} and {parts[-1]}" if len(parts) > 1 else parts[0]
    return f"{shown} processes"


def _portable(roles: ActorRolloutRef) -> ActorRolloutRef:
    """Name a policy loss that was registered in this process by its import path, for the workers to find it."""
    chosen = roles.actor.policy_loss
    chosen = chosen.model_copy(update={"loss_mode": POLICY_LOSSES.portable(chosen.loss_mode)})
    return roles.model_copy(update={"actor": roles.actor.model_copy(update={"policy_loss": chosen})})


def _with_lengths(roles: ActorRolloutRef, data: Data) -> ActorRolloutRef:
    """Fill in how long a sequence may get, where the setting leaves that to the lengths of the data."""
    if roles.rollout.max_model_len is not None:
        return roles
    longest = data.max_prompt_length + data.max_response_length
    return roles.model_copy(update={"rollout": roles.rollout.model_copy(update={"max_model_len": longest})})


class GroupStart:
    """Starts the groups in the background; ``result`` waits for them."""

    def __init__(
        self,
        controller: Controller,
        config: RunConfig,
        *,
        model_path: str,
        critic_path: str,
        reward_fn: str | None,
        device: str,
    ) -> None:
        threads = str(config.trainer.threads_per_worker)
        self._environment = dict.fromkeys(THREAD_VARIABLES, threads)
        self._controller = controller
        self._config = config
        self._model_path = model_path
        self._critic_path = critic_path
        self._reward_fn = reward_fn
        self._device = device
        # The manager gives each pool the devices behind those of the pool before it.
        names = ["global_pool"] + ["rollout_pool"] * is_separate(config)
        own_reward_pool = reward_pool_devices(config) > 0
        names += ["reward_pool"] * own_reward_pool
        self._pools = ResourcePoolManager(
            {name: self._processes(name) for name in names},
            {},
            max_colocate_count=config.trainer.max_colocate_count,
            device=device,
        ).pools
        self._pool = self._pools["global_pool"]
        self._own = own_groups(config)
        has_agents = has_agent_loop(config)
        self._executor = ThreadPoolExecutor(8, thread_name_prefix="group-start")
        self._global: Future[Mapping[str, Any]] = self._executor.submit(self._start_global)
        self._reward = self._submit_if(reward_fn is not None, self._start_reward)
        self._critic = self._submit_if("critic" in self._own, self._start_critic)
        self._reference = self._submit_if("ref" in self._own, self._start_reference)
        # in mode separate-async each replica is a group of its own, which may be lost and started again; agent loops
        # know the replicas by their handles, and keep one group
        one_by_one = config.trainer.mode == "separate-async" and not has_agent_loop(config)
        self._windows = self._pools["rollout_pool"].split(replica_devices(config)) if one_by_one else []
        self._replicas = [self._executor.submit(self._start_replica, index) for index in range(len(self._windows))]
        self._rollout = self._submit_if(is_separate(config) and not one_by_one, self._start_rollout)
        self._reward_model = self._submit_if(own_reward_pool, self._start_reward_model)
        agent = config.actor_rollout_ref.rollout.agent
        self._agents = [self._executor.submit(self._start_agent, i) for i in range(agent.num_workers * has_agents)]
        self._executor.shutdown(wait=False)

    def _submit_if(self, wanted: bool, start: Callable[[], Any]) -> Future[Any] | None:
        return self._executor.submit(start) if wanted else None

    def result(self) -> RoleGroups:
        """Wait until every process is up; raises what the start of a group raised."""
        views = self._global.result()
        critic = views.get("critic") if self._critic is None else self._critic.result()
        reference = views.get("ref") if self._reference is None else self._reference.result()
        rollout = views.get("rollout") if self._rollout is None else self._rollout.result()
        reward = None if self._reward is None else self._reward.result()
        model = views.get("reward_model") if self._reward_model is None else self._reward_model.result()
        sync: WeightSync | ReplicaSync | None = None
        if self._replicas:
            from rpcrl.trainer.replicas import ReplicaSet, ReplicaSync

            groups = [starting.result() for starting in self._replicas]
            rollout = ReplicaSet(groups, self._start_replica, lambda group: self._weight_sync(views["actor"], group))
            sync = ReplicaSync(rollout)
        elif self._rollout is not None:
            sync = self._weight_sync(views["actor"], rollout)
        agents = self._connected_agents(rollout, reward) if self._agents else None
        return RoleGroups(views["actor"], rollout, reference, reward, critic, sync, model, agents)

    def _connected_agents(self, rollout: Any, reward: Any | None) -> AgentLoopManager:
        from rpcrl.agents.manager import AgentLoopManager
        from rpcrl.engines.hf_model import pad_token_id

        workers = [starting.result() for starting in self._agents]
        # a replica of several ranks is called at its first
        ranks = range(0, rollout.world_size, replica_devices(self._config))
        replicas = {f"replica-{number}": rollout.workers[rank] for number, rank in enumerate(ranks)}
        wait_all([worker.connect.submit(replicas, reward) for worker in workers], timeout_s=CONNECT_S)
        agent = self._config.actor_rollout_ref.rollout.agent
        return AgentLoopManager(workers, agent, pad_token_id=pad_token_id(self._model_path))

    def _start_agent(self, number: int) -> Any:
        from rpcrl.agents.worker import AgentLoopWorker
        from rpcrl.runtime.worker_group import WorkerGroup

        agent, data = self._config.actor_rollout_ref.rollout.agent, self._config.data
        portable = AGENT_LOOPS.portable(str(agent.default_agent_loop))
        return WorkerGroup(
            ResourcePool([1], device=None, name="agent_workers"),
            AgentLoopWorker,
            agent.model_copy(update={"default_agent_loop": portable}),
            number=number,
            model_path=self._model_path,
            max_prompt_length=data.max_prompt_length,
            max_response_length=data.max_response_length,
            name=f"agent_loop_{number}",
            environment=dict.fromkeys(THREAD_VARIABLES, "1"),
            controller=self._controller,
        )

    def _weight_sync(self, actor: Any, rollout: Any) -> WeightSync:
        from rpcrl.roles.pool_sync import WeightSync

        engine = self._config.actor_rollout_ref.rollout.checkpoint_engine
        return WeightSync(
            actor,
            rollout,
            bucket_bytes=engine.update_weights_bucket_megabytes * 2**20,
            timeout_s=engine.update_weights_timeout_s,
        )

    def _processes(self, pool_name: str) -> tuple[int, ...]:
        """Return the processes on each node of a pool, from the account that ``rpcrl plan`` prints."""
        return next(pool.process_on_nodes for pool in account(self._config).pools if pool.name == pool_name)

    def _start_global(self) -> Mapping[str, Any]:
        from rpcrl.roles.actor import ActorWorker
        from rpcrl.runtime.worker_group import ClassWithInitArgs, WorkerGroup

        roles = _portable(self._config.actor_rollout_ref)
        classes: dict[str, ClassWithInitArgs[Any]] = {
            "actor": ClassWithInitArgs(ActorWorker, roles, **self._common(), seed=self._config.trainer.seed)
        }
        if not is_separate(self._config):
            classes["rollout"] = self._rollout_class()
        if needs_reference(self._config) and "ref" not in self._own:
            classes["ref"] = self._reference_class()
        if needs_critic(self._config) and "critic" not in self._own:
            classes["critic"] = self._critic_class()
        if self._config.reward.reward_model.enable and not reward_pool_devices(self._config):
            classes["reward_model"] = self._reward_model_class()
        group = WorkerGroup(
            self._pool, classes, name="trainer", environment=self._environment, controller=self._controller
        )
        views: Mapping[str, Any] = group.spawn()
        return views

    def _common(self) -> dict[str, Any]:
        """Return what actor, rollout and reference are all constructed with."""
        threads = self._config.trainer.threads_per_worker
        return {"model_path": self._model_path, "device": self._device, "threads": threads}

    def _rollout_class(self) -> ClassWithInitArgs[Any]:
        from rpcrl.roles.rollout import RolloutWorker
        from rpcrl.runtime.worker_group import ClassWithInitArgs

        roles = _with_lengths(_portable(self._config.actor_rollout_ref), self._config.data)
        return ClassWithInitArgs(RolloutWorker, roles, **self._common())

    def _start_rollout(self) -> Any:
        return self._start_rollout_on(self._pools["rollout_pool"], "rollout")

    def _start_replica(self, index: int) -> Any:
        return self._start_rollout_on(self._windows[index], f"rollout_{index}")

    def _start_rollout_on(self, pool: ResourcePool, name: str) -> Any:
        from rpcrl.runtime.worker_group import WorkerGroup

        return WorkerGroup(
            pool,
            {"rollout": self._rollout_class()},
            name=name,
            environment=self._environment,
            controller=self._controller,
        ).spawn()["rollout"]

    def _critic_class(self) -> ClassWithInitArgs[CriticWorker]:
        from rpcrl.roles.critic import CriticWorker
        from rpcrl.runtime.worker_group import ClassWithInitArgs

        trainer, roles = self._config.trainer, self._config.actor_rollout_ref
        return ClassWithInitArgs(
            CriticWorker,
            self._config.critic,
            model_path=self._critic_path,
            policy=roles,
            device=self._device,
            threads=trainer.threads_per_worker,
            seed=trainer.seed,
        )

    def _reference_class(self) -> ClassWithInitArgs[ReferenceWorker]:
        from rpcrl.roles.reference import ReferenceWorker
        from rpcrl.runtime.worker_group import ClassWithInitArgs

        return ClassWithInitArgs(ReferenceWorker, _portable(self._config.actor_rollout_ref), **self._common())

    def _start_critic(self) -> Any:
        return self._start_beside("critic", self._critic_class())

    def _start_reference(self) -> Any:
        return self._start_beside("ref", self._reference_class())

    def _start_beside(self, name: str, role: ClassWithInitArgs[Any]) -> Any:
        """Start a role in processes of its own on the trainer's devices."""
        from rpcrl.runtime.worker_group import WorkerGroup

        return WorkerGroup(
            self._pool,
            role,
            name=name,
            environment=self._environment,
            controller=self._controller,
        )

    def _reward_model_class(self) -> ClassWithInitArgs[RewardModelWorker]:
        from rpcrl.roles.reward_model import RewardModelWorker
        from rpcrl.runtime.worker_group import ClassWithInitArgs

        model, threads = self._config.reward.reward_model, self._config.trainer.threads_per_worker
        folder = str(Path(str(model.model_path)).expanduser().absolute())
        model = model.model_copy(update={"model_path": folder})
        return ClassWithInitArgs(RewardModelWorker, model, device=self._device, threads=threads)

    def _start_reward_model(self) -> Any:
        from rpcrl.runtime.worker_group import WorkerGroup

        return WorkerGroup(
            self._pools["reward_pool"],
            self._reward_model_class(),
            name="reward_model",
            environment=self._environment,
            controller=self._controller,
        )

    def _start_reward(self) -> Any:
        from rpcrl.rewards.worker import RewardWorker
        from rpcrl.runtime.worker_group import WorkerGroup

        reward = self._config.reward
        pool = ResourcePool(self._processes("reward_workers"), device=None, name="reward_workers")
        return WorkerGroup(
            pool,
            RewardWorker,
            self._reward_fn,
            reward.reward_kwargs,
            name="reward",
            environment=dict.fromkeys(THREAD_VARIABLES, "1"),
            controller=self._controller,
        )
