"""Do the settings of estimator, losses and KL fit one another? The rules over the algorithm."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping

from rpcrl.config.registry import ADVANTAGES, POLICY_LOSSES, Registry
from rpcrl.config.remedy_numbers import or_
from rpcrl.config.rule import ACTOR, BATCH, ROLLOUT, SAMPLES, RuleList
from rpcrl.config.run import FilterGroups, RunConfig
from rpcrl.errors import Violation

__all__ = ["ALGORITHM_RULES", "KL_TYPES", "LOSS_AGG_MODES", "READ_BY_ESTIMATORS"]

OF_VERL: Mapping[str, Mapping[str, str]] = {
    "algorithm.adv_estimator": {
        "gdpo": "grpo",
        "gpg": "grpo",
        "grpo_passk": "grpo",
        "grpo_vectorized": "grpo",
        "opo": "rloo",
        "optimal_token_baseline": "rloo",
        "remax": "rloo",
        "rloo_vectorized": "rloo",
        "tir_optimal_token_baseline": "rloo",
    },
    "actor_rollout_ref.actor.policy_loss.loss_mode": dict.fromkeys(
        ("bypass_mode", "cispo", "clip_cov", "dppo_kl", "dppo_tv", "dro", "geo_mean", "gpg", "gspo", "kl_cov", "sapo"),
        "vanilla",
    ),
}
"""Setting → verl's names that are not in this version, each with what is nearest to it here."""
LOSS_AGG_MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean")
KL_TYPES = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3")
"""Each also with a trailing ``+``: its value with the gradient of k2."""
READ_BY_ESTIMATORS: Mapping[str, frozenset[str]] = {
    "dr_grpo": frozenset(),
    "gae": frozenset({"gamma", "lam"}),
    "grpo": frozenset({"norm_adv_by_std_in_grpo"}),
    "reinforce_plus_plus": frozenset({"gamma"}),
    "reinforce_plus_plus_baseline": frozenset(),
    "rloo": frozenset(),
}
"""Built-in estimator → the settings of ``algorithm`` that it reads beside rewards and groups."""

ALGORITHM_RULES = RuleList()
_rule = ALGORITHM_RULES.rule


FILTER = "algorithm.filter_groups"


@_rule(f"{FILTER}.enable", SAMPLES)
def _groups_that_are_filtered_can_differ(config: RunConfig) -> Iterator[Violation]:
    if config.algorithm.filter_groups.enable and config.actor_rollout_ref.rollout.n == 1:
        yield Violation(
            f"{FILTER}.enable",
            "groups without a difference are replaced, and with rollout.n=1 a group has one sample, which differs from "
            "nothing: no group would be",
            ("set rollout.n=2 or more", f"or set {FILTER}.enable=false"),
        )


@_rule(f"{FILTER}.enable", f"{FILTER}.metric", f"{FILTER}.max_num_gen_batches")
def _filters_settings_are_read(config: RunConfig) -> Iterator[Violation]:
    settings, usual = config.algorithm.filter_groups, FilterGroups()
    if settings.enable:
        return
    for name in ("metric", "max_num_gen_batches"):
        value = getattr(settings, name)
        if value != getattr(usual, name):
            yield Violation(
                f"{FILTER}.{name}",
                f"{value} would change nothing: no group is filtered with {FILTER}.enable=false",
                (f"set {FILTER}.enable=true", "or leave it out"),
            )


@_rule(f"{ACTOR}.clip_ratio", f"{ACTOR}.clip_ratio_low", f"{ACTOR}.clip_ratio_c")
def _clip_ranges(config: RunConfig) -> Iterator[Violation]:
    actor = config.actor_rollout_ref.actor
    name = "clip_ratio" if actor.clip_ratio_low is None else "clip_ratio_low"
    low = actor.clip_ratio if actor.clip_ratio_low is None else actor.clip_ratio_low
    if low >= 1:
        yield Violation(
            f"{ACTOR}.{name}",
            f"the ratio is kept above 1 - {name} = 1 - {low:g} = {1 - low:g}, and a ratio is never below 0",
            (f"set actor.{name} below 1, e.g. actor.{name}=0.2",),
        )
    if actor.clip_ratio_c <= 1:
        yield Violation(
            f"{ACTOR}.clip_ratio_c",
            f"the dual clip bounds ratios from above 1, so clip_ratio_c must be > 1, not {actor.clip_ratio_c:g}",
            ("set actor.clip_ratio_c=3.0",),
        )


@_rule(f"{ACTOR}.loss_agg_mode", f"{ACTOR}.loss_scale_factor", f"{ACTOR}.kl_loss_type", "algorithm.kl_penalty")
def _losses_are_known(config: RunConfig) -> Iterator[Violation]:
    actor, algorithm = config.actor_rollout_ref.actor, config.algorithm
    if actor.loss_agg_mode not in LOSS_AGG_MODES:
        yield Violation(
            f"{ACTOR}.loss_agg_mode",
            f"{actor.loss_agg_mode!r} is not one of {or_(LOSS_AGG_MODES)}",
            ("set actor.loss_agg_mode=token-mean",),
        )
    elif actor.loss_scale_factor is not None and actor.loss_agg_mode != "seq-mean-token-sum-norm":
        yield Violation(
            f"{ACTOR}.loss_scale_factor",
            f"{actor.loss_scale_factor:g} would change nothing: it divides the loss of loss_agg_mode="
            f"seq-mean-token-sum-norm only, not of {actor.loss_agg_mode}",
            ("set actor.loss_agg_mode=seq-mean-token-sum-norm", "or set actor.loss_scale_factor=null"),
        )
    for key, kind in (
        (f"{ACTOR}.kl_loss_type", actor.kl_loss_type),
        ("algorithm.kl_penalty", algorithm.kl_penalty),
    ):
        if kind.removesuffix("+") not in KL_TYPES:
            yield Violation(
                key, f"{kind!r} is not one of {or_(KL_TYPES)}, each also with '+'", (f"set {key}=low_var_kl",)
            )


@_rule("algorithm.adv_estimator")
def _the_estimator_is_known(config: RunConfig) -> Iterator[Violation]:
    yield from _unknown_name(ADVANTAGES, config.algorithm.adv_estimator, "grpo")


@_rule(f"{ACTOR}.policy_loss.loss_mode")
def _the_policy_loss_is_known(config: RunConfig) -> Iterator[Violation]:
    yield from _unknown_name(POLICY_LOSSES, config.actor_rollout_ref.actor.policy_loss.loss_mode, "vanilla")


def _unknown_name(registry: Registry, name: str, usual: str) -> Iterator[Violation]:
    """Yield a violation for a name that is neither built in, nor registered, nor an import path."""
    if name in registry or ":" in name:
        return
    instead = OF_VERL[registry.key].get(name)
    near = difflib.get_close_matches(name, list(registry), n=1, cutoff=0.5)
    problem = "is not in this version" if instead else "is unknown"
    yield Violation(
        registry.key,
        f"{name!r} {problem} ({registry.known_and_nearest(name)})",
        (
            f"set {registry.key}={instead or (near or [usual])[0]}",
            f"or name one of yours: {registry.key}=my_file.py:fn",
        ),
    )


@_rule("algorithm.adv_estimator", *(f"algorithm.{name}" for name in ("gamma", "lam", "norm_adv_by_std_in_grpo")))
def _the_estimator_reads_what_is_set(config: RunConfig) -> Iterator[Violation]:
    algorithm = config.algorithm
    read = READ_BY_ESTIMATORS.get(algorithm.adv_estimator)
    if read is None:  # unknown, or a user's own, which may read all of them
        return
    discounts = f"{algorithm.adv_estimator} gives every token of a response the same advantage and discounts none"
    why = {
        "gamma": discounts,
        "lam": "only gae has a lambda",
        "norm_adv_by_std_in_grpo": f"{algorithm.adv_estimator} divides by no deviation of a group",
    }
    for name, reason in why.items():
        value, usual = getattr(algorithm, name), type(algorithm).model_fields[name].default
        if value != usual and name not in read:
            shown, default = (str(given).lower() for given in (value, usual))
            yield Violation(
                f"algorithm.{name}",
                f"{name}={shown} would change nothing: {reason}",
                (f"set algorithm.{name}={default}, or leave the key out",),
            )


@_rule("algorithm.use_kl_in_reward", "algorithm.kl_ctrl.type", "algorithm.kl_ctrl.horizon", BATCH, SAMPLES)
def _the_kl_weight_stays_above_zero(config: RunConfig) -> Iterator[Violation]:
    control, samples = config.algorithm.kl_ctrl, config.data.train_batch_size * config.actor_rollout_ref.rollout.n
    if not config.algorithm.use_kl_in_reward or control.type != "adaptive" or 0.2 * samples < control.horizon:
        return
    yield Violation(
        "algorithm.kl_ctrl.horizon",
        f"a step of B x n = {samples} samples may change the KL weight by 0.2 x {samples} / {control.horizon:g} of "
        "itself, which must stay below 1",
        (f"set algorithm.kl_ctrl.horizon above {0.2 * samples:g}, e.g. 10000",),
    )


@_rule(f"{ROLLOUT}.calculate_log_probs", "algorithm.recompute_old_log_prob")
def _old_log_probs_come_from_somewhere(config: RunConfig) -> Iterator[Violation]:
    if not config.actor_rollout_ref.rollout.calculate_log_probs and not config.algorithm.recompute_old_log_prob:
        yield Violation(
            f"{ROLLOUT}.calculate_log_probs",
            "the old log-probs are the sampler's (algorithm.recompute_old_log_prob=false), and with "
            "calculate_log_probs=false the sampler returns none",
            ("set rollout.calculate_log_probs=true", "or set algorithm.recompute_old_log_prob=true"),
        )
