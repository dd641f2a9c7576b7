"""How does one pool do everything, one thing after another? The synchronous colocate mode.

Actor, rollout, reference and critic share each process of the pool; the critic may have a group of its own beside them.
A step generates, puts the rollout to sleep (its memory is the trainer's meanwhile), scores, trains, and wakes the
rollout with the new weights: samples are never older than the weights that they train.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar

from rpcrl.config.account import all_devices, learners
from rpcrl.trainer.base import Trainer
from rpcrl.trainer.metrics import (
    PhaseTimer,
    data_metrics,
    joined_figures,
    log_prob_difference,
    reward_metrics,
    tensors_of,
    timing_metrics,
)

if TYPE_CHECKING:
    from rpcrl.batch.data_proto import DataProto
    from rpcrl.config.run import Optim
    from rpcrl.runtime.future import Future
    from rpcrl.trainer.group_filter import GroupFilter

__all__ = ["ColocateTrainer"]


class ColocateTrainer(Trainer):
    """One pool without overlap, every estimator: each step samples with the weights that the step before it made."""

    mode: ClassVar[str] = "colocate"
    part: int = 0
    """Number of the part of the step that is being done."""
    _sleeping: Future[Any] | None = None
    _filter: GroupFilter | None = None

    @property
    def num_parts(self) -> int:
        """Parts of a step, of as many prompts each, that are sampled and trained on one after the other."""
        return 1

    def step(self, step: int, timer: PhaseTimer) -> dict[str, float]:
        """Do one step: B × n samples, B / M × epochs optimizer steps, one weight sync.

        Before step ``trainer.critic_warmup`` only the critic learns; the rollout wakes with the weights that it had.
        """
        began_s = time.perf_counter()
        self.prepare_step(step)
        batches, figures = [], []
        for part in range(self.num_parts):
            batch, metrics = self._one_part(step, part, timer)
            batches.append(batch)
            figures.append(metrics)
        with timer("update_weights"):
            self.sync_weights()
        metrics = {**joined_figures(figures), **self.filter_metrics()}
        metrics.update(self._timing(batches, timer, time.perf_counter() - began_s))
        return metrics

    def _one_part(self, step: int, part: int, timer: PhaseTimer) -> tuple[DataProto, dict[str, float]]:
        """Sample, score and train on one part of a step."""
        self.part = part
        with timer("gen"):
            batch = self.sample(step)
        self.after_sampling()
        batch, metrics = self.score(batch, timer)
        if self.groups.critic is not None:
            with timer("update_critic"):
                metrics.update(self.update_critic(batch, step))
        described = cache(lambda: self._described(batch, step))
        if step >= self.config.trainer.critic_warmup:
            with timer("update_actor"):
                metrics.update(self.update_actor(batch, step, meanwhile=described))
        metrics.update(described())
        return batch, metrics

    def prepare_step(self, step: int) -> None:
        """Do what has to be done before a step's first sample: nothing here."""

    def sample(self, step: int) -> DataProto:
        """Return the samples of the part."""
        from rpcrl.trainer import steps

        def sampled() -> DataProto:
            return steps.generate(self.groups.sampler, self.next_prompts(), self.sampling, step=step)

        groups = self.group_filter()
        return sampled() if groups is None else groups.fill(sampled, self.config.data.train_batch_size)

    def group_filter(self) -> GroupFilter | None:
        """Return what replaces groups that teach nothing; None where ``algorithm.filter_groups`` is off."""
        settings = self.config.algorithm.filter_groups
        if settings.enable and self._filter is None:
            from rpcrl.trainer.group_filter import GroupFilter

            self._filter = GroupFilter(settings, self.reward)
        return self._filter

    def filter_metrics(self) -> dict[str, float]:
        """Return what the filter has done in this step."""
        return {} if self._filter is None else self._filter.counts

    def after_sampling(self) -> None:
        """Free the rollout's memory for the trainer (``free_cache_engine``); the driver need not wait for it.

        The processes do it before they compute anything else; ``score`` hears whether it failed.
        """
        if self.config.actor_rollout_ref.rollout.free_cache_engine:
            self._sleeping = self.groups.rollout.sleep.submit()

    def score(self, batch: DataProto, timer: PhaseTimer) -> tuple[DataProto, dict[str, float]]:
        """Add rewards, log-probs, values where there is a critic, and advantages."""
        from rpcrl.trainer import steps

        algorithm, balance = self.config.algorithm, self.config.trainer.balance_batch
        metrics: dict[str, float] = {}
        with timer("reward"):
            if self._filter is None:
                before = set(batch.non_tensor_batch)
                batch = self.reward(batch)
                added = set(batch.non_tensor_batch) - before
            else:  # the rewards have decided what is here
                added = self._filter.columns
            metrics.update(reward_metrics(batch, added))
            if self._sleeping is not None:
                self._sleeping.result()
                self._sleeping = None
        with timer("old_log_prob"):
            batch = self.old_log_prob(batch)
        if algorithm.recompute_old_log_prob:
            metrics.update(log_prob_difference(batch))
            batch, more = steps.rollout_correction(batch, algorithm.rollout_correction)
            metrics.update(more)
        if self.groups.reference is not None:
            with timer("ref"):
                batch = steps.ref_log_prob(self.groups.reference, batch, balance=balance)
        if self.groups.critic is not None:
            with timer("values"):
                batch = steps.values(self.groups.critic, batch, balance=balance)
        with timer("adv"):
            batch, more = steps.advantage(batch, algorithm, kl=self.kl)
        return batch, {**metrics, **more}

    def old_log_prob(self, batch: DataProto) -> DataProto:
        """Add the log-probs that the policy's ratio is taken to."""
        from rpcrl.trainer import steps

        return steps.old_log_prob(
            self.groups.actor,
            batch,
            recompute=self.config.algorithm.recompute_old_log_prob,
            balance=self.config.trainer.balance_batch,
        )

    def update_critic(self, batch: DataProto, step: int) -> dict[str, float]:
        """Make the critic's optimizer steps."""
        from rpcrl.trainer import steps

        critic = next(learner for learner in learners(self.config) if learner.name == "critic")
        return steps.update_critic(
            self.groups.critic,
            batch,
            mini_batch_rows=critic.mini_batch * self.config.actor_rollout_ref.rollout.n,
            epochs=critic.epochs,
            lr=self._rate(self.config.critic.optim, step),
            balance=self.config.trainer.balance_batch,
        )

    def update_actor(
        self, batch: DataProto, step: int, *, meanwhile: Callable[[], object] | None = None
    ) -> dict[str, float]:
        """Make the step's optimizer steps; ``meanwhile`` is called while the workers train."""
        from rpcrl.trainer import steps

        actor, rollout = self.config.actor_rollout_ref.actor, self.config.actor_rollout_ref.rollout
        return steps.update_actor(
            self.groups.actor,
            batch,
            mini_batch_rows=actor.ppo_mini_batch_size * rollout.n,
            epochs=actor.ppo_epochs,
            lr=self._rate(actor.optim, step),
            temperature=rollout.temperature,
            extra_columns=self._extra_columns(),
            balance=self.config.trainer.balance_batch,
            meanwhile=meanwhile,
        )

    def _extra_columns(self) -> tuple[str, ...]:
        algorithm = self.config.algorithm
        columns = ("ref_log_prob",) if self.config.actor_rollout_ref.actor.use_kl_loss else ()
        weighted = algorithm.recompute_old_log_prob and algorithm.rollout_correction.rollout_is is not None
        return (*columns, "rollout_is_weights") if weighted else columns

    def _rate(self, optim: Optim, step: int) -> float:
        """Return the learning rate of a step."""
        from rpcrl.engines.schedule import learning_rate

        return learning_rate(
            step - 1,
            lr=optim.lr,
            total_steps=self.total_steps,
            warmup_steps=optim.lr_warmup_steps,
            kind=optim.lr_scheduler_type,
        )

    def _described(self, batch: DataProto, step: int) -> dict[str, float]:
        """Return the figures of the samples, write some of them down, and encode the prompts of the next step."""
        data = self.config.data
        metrics = data_metrics(
            batch, max_prompt_length=data.max_prompt_length, max_response_length=data.max_response_length
        )
        if self.part == 0:
            self._write_step_samples(batch, step)
        if step < self.total_steps:
            self.train.prepare()
        return metrics

    def _timing(self, batches: Sequence[DataProto], timer: PhaseTimer, step_s: float) -> dict[str, float]:
        return timing_metrics(
            timer.seconds,
            step_s=step_s,
            total_tokens=sum(int(tensors_of(batch)["attention_mask"].sum()) for batch in batches),
            response_tokens=sum(int(tensors_of(batch)["response_mask"].sum()) for batch in batches),
            num_devices=all_devices(self.config),
        )

    def _write_step_samples(self, batch: DataProto, step: int) -> None:
        from rpcrl.trainer.validation import sample_rows

        count = self.config.trainer.log_train_generations
        if count:
            self.run.write_samples(f"step_{step}", sample_rows(batch, count))
