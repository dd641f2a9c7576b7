"""Does the longest sample fit into a pass that is cut by tokens?"""

from __future__ import annotations

from collections.abc import Iterator

from rpcrl.config.account import needs_critic, needs_reference
from rpcrl.config.rule import ACTOR, ROLLOUT, RuleList
from rpcrl.config.run import RunConfig
from rpcrl.errors import Violation

__all__ = ["TOKEN_RULES"]

TOKEN_RULES = RuleList()
_rule = TOKEN_RULES.rule

REF = "actor_rollout_ref.ref"
LONGEST = ("data.max_prompt_length", "data.max_response_length")


def _limits(config: RunConfig) -> Iterator[tuple[str, bool, int | None]]:
    """Yield key, whether passes are cut by it, and the limit, where one is set of its own."""
    actor, rollout, ref = (getattr(config.actor_rollout_ref, name) for name in ("actor", "rollout", "ref"))
    dynamic = actor.use_dynamic_bsz
    yield f"{ACTOR}.ppo_max_token_len_per_gpu", dynamic, actor.ppo_max_token_len_per_gpu

    def chosen(own: bool | None) -> bool:
        return dynamic if own is None else own

    recomputed = config.algorithm.recompute_old_log_prob and chosen(rollout.log_prob_use_dynamic_bsz)
    yield f"{ROLLOUT}.log_prob_max_token_len_per_gpu", recomputed, rollout.log_prob_max_token_len_per_gpu
    scored = needs_reference(config) and chosen(ref.log_prob_use_dynamic_bsz)
    yield f"{REF}.log_prob_max_token_len_per_gpu", scored, ref.log_prob_max_token_len_per_gpu
    valued = needs_critic(config) and chosen(config.critic.use_dynamic_bsz)
    yield "critic.ppo_max_token_len_per_gpu", valued, config.critic.ppo_max_token_len_per_gpu
    yield "critic.forward_max_token_len_per_gpu", valued, config.critic.forward_max_token_len_per_gpu


@_rule(f"{ACTOR}.use_dynamic_bsz", f"{ACTOR}.ppo_max_token_len_per_gpu", *LONGEST)
def _the_longest_sample_fits(config: RunConfig) -> Iterator[Violation]:
    prompt, response = config.data.max_prompt_length, config.data.max_response_length
    for key, cut, limit in _limits(config):
        if cut and limit is not None and limit < prompt + response:
            yield Violation(
                key,
                f"a pass may have {limit} tokens, and a sample may have max_prompt_length + max_response_length = "
                f"{prompt} + {response} = {prompt + response}",
                (f"set {key.removeprefix('actor_rollout_ref.')} to {prompt + response} or more",),
            )
