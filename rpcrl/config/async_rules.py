"""Which settings of the asynchronous modes do not fit each other?"""

from __future__ import annotations

from collections.abc import Iterator

from rpcrl.config.account import learners
from rpcrl.config.remedy_numbers import divisors_beside, or_
from rpcrl.config.rollout_threshold import bounds_of
from rpcrl.config.rule import CRITIC_MINI_BATCH, MINI_BATCH, MODE, RuleList
from rpcrl.config.run import RolloutCorrection, RunConfig
from rpcrl.errors import UsageError, Violation

__all__ = ["ASYNC_RULES"]

STALENESS = "trainer.max_staleness"
CORRECTION = "algorithm.rollout_correction"
_WARMUP = {
    "colocate-async": "trainer.v1.colocate_async.num_warmup_batches",
    "separate-async": "trainer.v1.separate_async.num_warmup_batches",
}

ASYNC_RULES = RuleList()
_rule = ASYNC_RULES.rule


@_rule(MODE, STALENESS, *_WARMUP.values())
def _what_is_in_flight_is_not_too_old(config: RunConfig) -> Iterator[Violation]:
    key = _WARMUP.get(config.trainer.mode)
    if key is None:
        return
    settings, bound = config.trainer.v1, config.trainer.max_staleness
    warmup = (
        settings.colocate_async.num_warmup_batches
        if config.trainer.mode == "colocate-async"
        else settings.separate_async.num_warmup_batches
    )
    if warmup > bound:
        yield Violation(
            key,
            f"{warmup} batches in flight beside the one that is trained on: the last of them is begun {warmup} weight "
            f"versions before its step, and {STALENESS} allows {bound}",
            (f"set {STALENESS}={warmup}", f"or set {key}={bound}"),
        )


@_rule(MODE, MINI_BATCH, CRITIC_MINI_BATCH)
def _a_part_is_whole_for_the_critic(config: RunConfig) -> Iterator[Violation]:
    if config.trainer.mode != "separate-async" or config.critic.ppo_mini_batch_size is None:
        return
    mini = config.actor_rollout_ref.actor.ppo_mini_batch_size
    for learner in learners(config)[1:]:
        if mini % learner.mini_batch:
            yield Violation(
                CRITIC_MINI_BATCH,
                f"mode separate-async trains on M = {mini} prompts at a time, and {mini} % {learner.mini_batch} = "
                f"{mini % learner.mini_batch}; the rest must be 0",
                (f"set {CRITIC_MINI_BATCH} to {or_(divisors_beside(mini, learner.mini_batch))}", "or leave it null"),
            )


@_rule(f"{CORRECTION}.rollout_is", "algorithm.recompute_old_log_prob")
def _weights_need_two_policies(config: RunConfig) -> Iterator[Violation]:
    level = config.algorithm.rollout_correction.rollout_is
    if level is not None and not config.algorithm.recompute_old_log_prob:
        yield Violation(
            f"{CORRECTION}.rollout_is",
            f"rollout_is={level} weighs by recomputed over sampler's probability, and with "
            "algorithm.recompute_old_log_prob=false both are the sampler's: every weight would be 1",
            ("set algorithm.recompute_old_log_prob=true", f"or set {CORRECTION}.rollout_is=null"),
        )


@_rule(*(f"{CORRECTION}.{name}" for name in ("rollout_is", "rollout_is_threshold", "rollout_is_batch_normalize")))
def _weights_are_wanted(config: RunConfig) -> Iterator[Violation]:
    settings, usual = config.algorithm.rollout_correction, RolloutCorrection()
    if settings.rollout_is is not None:
        return
    for name in ("rollout_is_threshold", "rollout_is_batch_normalize"):
        value = getattr(settings, name)
        if value != getattr(usual, name):
            yield Violation(
                f"{CORRECTION}.{name}",
                f"{value} would change nothing: it is about importance weights, and rollout_is=null has none",
                (f"set {CORRECTION}.rollout_is=token", "or leave it out"),
            )


@_rule(f"{CORRECTION}.rollout_is_threshold")
def _thresholds_are_bounds(config: RunConfig) -> Iterator[Violation]:
    try:
        bounds_of(config.algorithm.rollout_correction.rollout_is_threshold)
    except UsageError as error:
        yield Violation(
            f"{CORRECTION}.rollout_is_threshold", str(error), (f"set {CORRECTION}.rollout_is_threshold=2.0",)
        )
