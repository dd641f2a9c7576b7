"""Do the groups beside the actor's fit on the devices, and is there a role for each of them?"""

from __future__ import annotations

from collections.abc import Iterator

from rpcrl.config.account import needs_reference, own_groups
from rpcrl.config.rule import RuleList
from rpcrl.config.run import RunConfig
from rpcrl.errors import Violation

__all__ = ["GROUP_RULES"]

GROUP_RULES = RuleList()
_rule = GROUP_RULES.rule

OF_CRITIC = ("algorithm.adv_estimator", "critic.enable", "critic.own_group")
OF_REFERENCE = (
    "actor_rollout_ref.actor.use_kl_loss",
    "algorithm.use_kl_in_reward",
    "actor_rollout_ref.ref.own_group",
)
_KEYS = {"ref": "actor_rollout_ref.ref.own_group", "critic": "critic.own_group"}


@_rule(*OF_REFERENCE)
def _a_reference_with_a_group_is_there(config: RunConfig) -> Iterator[Violation]:
    if config.actor_rollout_ref.ref.own_group and not needs_reference(config):
        yield Violation(
            _KEYS["ref"],
            "true would change nothing: neither actor.use_kl_loss nor algorithm.use_kl_in_reward asks for a reference",
            ("set actor.use_kl_loss=true (or algorithm.use_kl_in_reward=true)", "or set ref.own_group=false"),
        )


@_rule(*OF_CRITIC, *OF_REFERENCE, "trainer.max_colocate_count")
def _all_groups_fit_on_the_devices(config: RunConfig) -> Iterator[Violation]:
    allowed, beside = config.trainer.max_colocate_count, own_groups(config)
    groups = 1 + len(beside)
    if groups > allowed:
        yield Violation(
            _KEYS[beside[-1]],
            f"{', '.join(('actor', *beside[:-1]))} and {beside[-1]} are {groups} groups on each device, "
            f"and trainer.max_colocate_count={allowed} allows {allowed}",
            (
                f"set trainer.max_colocate_count={groups}",
                f"or set {' '.join(f'{role}.own_group=false' for role in beside)}",
            ),
        )
