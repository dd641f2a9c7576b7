"""How does a configuration want its samples drawn, in training and on held-out prompts?"""

from __future__ import annotations

from rpcrl.config.run import RunConfig
from rpcrl.trainer.steps import Sampling

__all__ = ["training_sampling", "validation_sampling"]


def training_sampling(config: RunConfig) -> Sampling:
    """Return how training samples are drawn."""
    rollout = config.actor_rollout_ref.rollout
    return Sampling(
        n=rollout.n,
        do_sample=True,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        response_length=config.data.max_response_length,
        seed=config.trainer.seed,
    )


def validation_sampling(config: RunConfig) -> Sampling:
    """Return how held-out prompts are answered."""
    settings = config.actor_rollout_ref.rollout.val_kwargs
    return Sampling(
        n=settings.n,
        do_sample=settings.do_sample,
        temperature=settings.temperature if settings.do_sample else 1.0,
        top_p=settings.top_p,
        top_k=settings.top_k,
        response_length=config.data.max_response_length,
        seed=config.trainer.seed,
    )
