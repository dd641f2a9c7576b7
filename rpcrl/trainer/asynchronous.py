"""How does generation overlap with training? Two modes over the steps of the synchronous ones.

``colocate-async``: one pool. Prompts of later batches are in flight too; as soon as a step's groups are there the
trainer takes the devices back, and what is unfinished goes on, behind the tokens that it has, with the next weights.
``separate-async``: two pools. The rollout samples while the trainer works; a step is ``parameter_sync_step``
mini-batches, and at its end the weights cross between two of the rollout's steps.

Only hooks differ. Prompt number k (from 0) is submitted no earlier than for step k // B − ``num_warmup_batches``, so
what a step trains on was begun at most that many versions before: capacity paces the samples, none is dropped for it.
"""

from __future__ import annotations

import json
from abc import abstractmethod
from contextlib import contextmanager
from typing import TYPE_CHECKING, ClassVar

from rpcrl.trainer.colocate import ColocateTrainer
from rpcrl.trainer.metrics import staleness_metrics
from rpcrl.trainer.tracking import cut_metrics

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rpcrl.batch.data_proto import DataProto
    from rpcrl.trainer.group_sampler import GroupSampler, Replicas
    from rpcrl.trainer.metrics import PhaseTimer
    from rpcrl.trainer.replay_buffer import ReplayBuffer

__all__ = ["AsyncTrainer", "ColocateAsyncTrainer", "SeparateAsyncTrainer"]

STABLE = "stable"
"""Name of the kept weights that a step began with."""
MOVED = "moved"
"""Name of those that its mini-batches have made of them."""


class AsyncTrainer(ColocateTrainer):
    """What both asynchronous modes share: tasks in flight, a buffer of groups, and the ledger of prompts."""

    buffer: ReplayBuffer
    sampler: GroupSampler
    _step_version: int
    """Version of the weights that a step begins with."""
    _consumed: list[str]
    _open: int
    """How many prompts may have been submitted by now, since this life of the run began."""

    # -- hooks of a mode -----------------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def num_warmup_batches(self) -> int:
        """Batches in flight beside the one that a step trains on."""

    def replicas(self) -> Replicas:
        """Return where prompts are sampled: by agent loops, or by the rollout's workers."""
        from rpcrl.trainer.group_sampler import FixedReplicas

        if self.groups.agents is not None:
            return self.groups.agents
        return FixedReplicas(self.groups.rollout)

    # -- the run -------------------------------------------------------------------------------------------------------

    def on_train_begin(self) -> None:
        """Submit what is to be in flight before the first step."""
        from rpcrl.trainer.group_sampler import GroupSampler
        from rpcrl.trainer.prompt_queue import PromptQueue
        from rpcrl.trainer.replay_buffer import ReplayBuffer

        trainer, sampling = self.config.trainer, self.config.trainer.v1.sampler
        self.buffer = ReplayBuffer(max_staleness=trainer.max_staleness, strategy=sampling.max_off_policy_strategy)
        self.sampler = GroupSampler(
            self.replicas(),
            PromptQueue(self.train, first=self.unfinished_prompts),
            self.buffer,
            self.sampling,
            task_timeout_s=sampling.task_timeout_s,
            most_failures=self.config.data.train_batch_size,
            group_filter=self.group_filter(),
            most_filtered=self._most_filtered(),
        )
        cut_metrics(self.run.ledger, after_step=self.start_step)
        self.sampler.fill(self._limit(self.start_step), version=self.weight_version)

    def _most_filtered(self) -> int | None:
        """Return how many groups a step may lose to the filter: its batch is one of ``max_num_gen_batches``."""
        batches = self.config.algorithm.filter_groups.max_num_gen_batches
        return (batches - 1) * self.config.data.train_batch_size if batches else None

    def on_train_end(self) -> None:
        """Give up what is still in flight."""
        self.sampler.close()

    def _limit(self, step: int) -> int:
        """Return how many prompts may have been submitted by ``step``, since this life of the run began."""
        batches = min(step + self.num_warmup_batches, self.total_steps) - self.start_step
        return batches * self.config.data.train_batch_size

    # -- a step --------------------------------------------------------------------------------------------------------

    def step(self, step: int, timer: PhaseTimer) -> dict[str, float]:
        """Do one step as the synchronous modes do, and write its prompts into the ledger."""
        metrics = super().step(step, timer)
        drops = self.buffer.news()
        line = {
            "step": step,
            "weight_version": self._step_version,
            "consumed": self._consumed,
            "dropped": [[drop.uid, drop.data_source, drop.reason] for drop in drops],
        }
        with self.run.ledger.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(line) + "\n")
        metrics["training/off_policy/evicted_samples"] = float(sum(drop.reason == "stale" for drop in drops))
        metrics["training/rollout_failure/evicted_samples"] = float(
            sum(drop.reason not in ("stale", "filtered") for drop in drops)
        )
        return metrics

    def prepare_step(self, step: int) -> None:
        """See to it that the step's own batch is submitted; what is sampled ahead follows while the workers train."""
        self._step_version = self.weight_version
        self._consumed = []
        self.sampler.begin_step()
        self._open = max(self._limit(step - 1), (step - self.start_step) * self.config.data.train_batch_size)
        self.sampler.fill(self._open, version=self.weight_version)

    def sample(self, step: int) -> DataProto:
        """Wait for the groups of the part."""
        prompts = self.config.data.train_batch_size // self.num_parts
        batch = self.sampler.take(
            prompts,
            version=self.weight_version,
            later=prompts * (self.num_parts - 1 - self.part),
            limit=self._open,
        )
        self._consumed += dict.fromkeys(str(uid) for uid in batch.non_tensor_batch["uid"])
        return batch

    def _described(self, batch: DataProto, step: int) -> dict[str, float]:
        # this is done while the workers train: each part submits its share of the batch that is sampled ahead
        ahead = max(0, self._limit(step) - self._open)
        self._open += ahead // (self.num_parts - self.part)
        self.sampler.fill(self._open, version=self.weight_version)
        return {**super()._described(batch, step), **staleness_metrics(batch, version=self._step_version)}

    def filter_metrics(self) -> dict[str, float]:
        """Return how many groups the filter has dropped in this step; there is no surplus."""
        if self.group_filter() is None:
            return {}
        from rpcrl.trainer.group_filter import filter_counts

        return filter_counts(self.sampler.num_filtered, 0)

    def in_flight(self) -> list[str]:
        """Return the prompts that were drawn and have had no end yet."""
        return self.sampler.unfinished()


class ColocateAsyncTrainer(AsyncTrainer):
    """One pool: generation runs while the trainer waits for a step's groups, and pauses while it works."""

    mode: ClassVar[str] = "colocate-async"

    @property
    def num_warmup_batches(self) -> int:
        """Batches in flight beside the one that a step trains on."""
        return self.config.trainer.v1.colocate_async.num_warmup_batches

    def after_sampling(self) -> None:
        """Take the devices back: requests leave the engines with what they have, and their memory is freed."""
        self.groups.rollout.pause_generation()
        super().after_sampling()

    def sync_weights(self) -> None:
        """Give the rollout the new weights, and the devices until the next step's groups are there."""
        super().sync_weights()
        self.sampler.restart_deadlines()
        self.groups.rollout.resume_generation()


class SeparateAsyncTrainer(AsyncTrainer):
    """Two pools: generation never stops but for the time that new weights take to arrive."""

    mode: ClassVar[str] = "separate-async"

    @property
    def num_warmup_batches(self) -> int:
        """Batches in flight beside the one that a step trains on."""
        return self.config.trainer.v1.separate_async.num_warmup_batches

    @property
    def num_parts(self) -> int:
        """Mini-batches between two weight syncs."""
        return self.config.trainer.v1.separate_async.parameter_sync_step

    def replicas(self) -> Replicas:
        """Return agent loops where there are any, else the replicas, which may be lost one by one."""
        if self.groups.agents is not None:
            return super().replicas()
        replicas: Replicas = self.groups.rollout
        return replicas

    def after_sampling(self) -> None:
        """Leave the rollout as it is: nobody else wants its devices."""

    def old_log_prob(self, batch: DataProto) -> DataProto:
        """Add the log-probs that the policy's ratio is taken to: under the weights that the step began with."""
        if not self.config.algorithm.recompute_old_log_prob:
            return super().old_log_prob(batch)
        with self._stable_weights():
            return super().old_log_prob(batch)

    @contextmanager
    def _stable_weights(self) -> Iterator[None]:
        """Have the actor compute with the weights of the step's beginning; each rank keeps its own shard of both."""
        actor, last = self.groups.actor, self.part == self.num_parts - 1
        if self.part == 0:
            if not last:
                actor.save_model_to_cpu(STABLE)
            yield
            return
        actor.save_model_to_cpu(MOVED)
        actor.restore_model_from_cpu(STABLE)
        try:
            yield
        finally:
            actor.restore_model_from_cpu(MOVED)
            actor.clear_cpu_model(MOVED)
            if last:
                actor.clear_cpu_model(STABLE)

    def sync_weights(self) -> None:
        """Send the new weights between two steps of the rollout; unfinished requests go on under them."""
        self.groups.rollout.pause_generation()
        super().sync_weights()
        self.groups.rollout.resume_generation()
