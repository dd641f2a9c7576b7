"""How much does one pass through a model take, and how is the model spread? From settings to an engine's arguments."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypedDict

if TYPE_CHECKING:
    from rpcrl.config.run import Actor, ActorRolloutRef, Critic, Ref, Rollout

__all__ = [
    "EngineOptions",
    "Pass",
    "actor_pass",
    "computes_exactly",
    "critic_passes",
    "engine_options",
    "log_prob_pass",
    "ref_pass",
]

_DTYPES = {"fp32": "float32", "bf16": "bfloat16"}


class Pass(TypedDict):
    """Rows or tokens of one forward pass; both None: all rows at once."""

    micro_batch_size: int | None
    max_tokens: int | None


class EngineOptions(TypedDict):
    """What actor and critic share of a training engine's arguments."""

    dtype: str
    strategy: str
    reduce_dtype: str


def _pass(rows: int | None, tokens: int, by_tokens: bool) -> Pass:
    return {"micro_batch_size": None if by_tokens else rows, "max_tokens": tokens if by_tokens else None}


def actor_pass(actor: Actor) -> Pass:
    """Return what one pass of the policy's training takes."""
    return _pass(actor.ppo_micro_batch_size_per_gpu, actor.ppo_max_token_len_per_gpu, actor.use_dynamic_bsz)


def log_prob_pass(rollout: Rollout, actor: Actor) -> Pass:
    """Return what one pass takes that recomputes the old log-probs."""
    by_tokens = rollout.log_prob_use_dynamic_bsz
    return _pass(
        rollout.log_prob_micro_batch_size_per_gpu,
        rollout.log_prob_max_token_len_per_gpu or actor.ppo_max_token_len_per_gpu,
        actor.use_dynamic_bsz if by_tokens is None else by_tokens,
    )


def ref_pass(ref: Ref, actor: Actor) -> Pass:
    """Return what one pass of the reference policy takes."""
    by_tokens = ref.log_prob_use_dynamic_bsz
    return _pass(
        ref.log_prob_micro_batch_size_per_gpu,
        ref.log_prob_max_token_len_per_gpu or actor.ppo_max_token_len_per_gpu,
        actor.use_dynamic_bsz if by_tokens is None else by_tokens,
    )


def critic_passes(critic: Critic, actor: Actor) -> tuple[Pass, Pass]:
    """Return what one pass of the critic takes: in training, and when values are computed."""
    by_tokens = actor.use_dynamic_bsz if critic.use_dynamic_bsz is None else critic.use_dynamic_bsz
    tokens = critic.ppo_max_token_len_per_gpu or actor.ppo_max_token_len_per_gpu
    return (
        _pass(critic.ppo_micro_batch_size_per_gpu, tokens, by_tokens),
        _pass(critic.forward_micro_batch_size_per_gpu, critic.forward_max_token_len_per_gpu or tokens, by_tokens),
    )


def engine_options(config: ActorRolloutRef) -> EngineOptions:
    """Return what the trained models are computed in and how they are spread."""
    mixed_precision = config.actor.fsdp_config.mixed_precision
    param_dtype = mixed_precision.param_dtype
    return {
        "dtype": config.model.dtype if param_dtype is None else _DTYPES[param_dtype],
        "strategy": config.actor.strategy,
        "reduce_dtype": _DTYPES[mixed_precision.reduce_dtype],
    }


def computes_exactly(config: ActorRolloutRef) -> bool:
    """Say whether trainer and rollout both compute in 32 bits or more: their log-probs differ in the last bits only."""
    wide = ("float32", "float64")
    rollout = config.rollout.dtype or config.model.dtype
    return engine_options(config)["dtype"] in wide and rollout in wide
