"""What is a rule over a configuration, and which settings do several rules speak of?"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from rpcrl.config.run import RunConfig
from rpcrl.errors import Violation

__all__ = ["Rule", "RuleList"]

ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
MODE = "trainer.mode"
WORLD = ("trainer.nnodes", "trainer.n_gpus_per_node")
BATCH = "data.train_batch_size"
MINI_BATCH = f"{ACTOR}.ppo_mini_batch_size"
MICRO_BATCH = f"{ACTOR}.ppo_micro_batch_size_per_gpu"
CRITIC_MINI_BATCH = "critic.ppo_mini_batch_size"
SAMPLES = f"{ROLLOUT}.n"
TP = f"{ROLLOUT}.tensor_model_parallel_size"
SYNC_STEP = "trainer.v1.separate_async.parameter_sync_step"
BACKEND = f"{ROLLOUT}.checkpoint_engine.backend"

Rule = Callable[[RunConfig], Iterator[Violation]]


class RuleList:
    """Rules in the order in which they are told, each with the settings that it reads."""

    def __init__(self) -> None:
        self._rules: list[tuple[tuple[str, ...], Rule]] = []

    def rule(self, *reads: str) -> Callable[[Rule], Rule]:
        """Return a decorator that adds a rule which reads the settings ``reads``."""

        def keep(function: Rule) -> Rule:
            self._rules.append((reads, function))
            return function

        return keep

    def __iter__(self) -> Iterator[tuple[tuple[str, ...], Rule]]:
        return iter(self._rules)
