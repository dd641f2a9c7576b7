"""Is there a critic where one is needed, and is nothing set for one that is not there?"""

from __future__ import annotations

from collections.abc import Iterator

from rpcrl.config.account import needs_critic
from rpcrl.config.algorithm_rules import LOSS_AGG_MODES
from rpcrl.config.keys import settings
from rpcrl.config.remedy_numbers import or_
from rpcrl.config.rule import RuleList
from rpcrl.config.run import RunConfig
from rpcrl.errors import Violation

__all__ = ["CRITIC_RULES"]

CRITIC_RULES = RuleList()
_rule = CRITIC_RULES.rule

ESTIMATOR = "algorithm.adv_estimator"
WARM_UP = "trainer.critic_warmup"


@_rule(ESTIMATOR, "critic.enable")
def _gae_has_its_critic(config: RunConfig) -> Iterator[Violation]:
    if config.algorithm.adv_estimator == "gae" and not needs_critic(config):
        yield Violation(
            "critic.enable",
            "gae needs the values of a critic, and critic.enable=false trains none",
            ("set critic.enable=null", "or set algorithm.adv_estimator=grpo"),
        )


@_rule(ESTIMATOR, "critic.enable")
def _nothing_is_set_for_a_critic_that_is_not_there(config: RunConfig) -> Iterator[Violation]:
    if needs_critic(config):
        return
    estimator = config.algorithm.adv_estimator
    for key, setting in settings().items():
        if not key.startswith("critic.") and key != WARM_UP:
            continue
        value: object = config
        for part in key.split("."):
            value = getattr(value, part)
        if value != setting.default and key != "critic.enable":
            usual = "null" if setting.default is None else str(setting.default).lower()
            yield Violation(
                key,
                f"{value} would change nothing: the run has no critic, algorithm.adv_estimator={estimator} needs none",
                (f"set {ESTIMATOR}=gae (or critic.enable=true)", f"or leave it out, or set {key}={usual}"),
            )


@_rule("critic.loss_agg_mode")
def _the_loss_is_known(config: RunConfig) -> Iterator[Violation]:
    mode = config.critic.loss_agg_mode
    if mode is not None and mode not in LOSS_AGG_MODES:
        yield Violation(
            "critic.loss_agg_mode",
            f"{mode!r} is not one of {or_(LOSS_AGG_MODES)}",
            ("set critic.loss_agg_mode=token-mean, or null for the actor's",),
        )


@_rule(WARM_UP, "trainer.total_training_steps", ESTIMATOR, "critic.enable")
def _the_actor_is_trained_too(config: RunConfig) -> Iterator[Violation]:
    first, last = config.trainer.critic_warmup, config.trainer.total_training_steps
    if needs_critic(config) and last is not None and first > last:
        yield Violation(
            WARM_UP,
            f"the actor is trained from step {first} on, and the run ends with step {last}",
            (f"set {WARM_UP} to {last} or less", f"or set trainer.total_training_steps above {first}"),
        )
