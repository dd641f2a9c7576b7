"""Which settings say who scores a response? A function, a reward model, or both."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from rpcrl.config.section import Count, CountOrZero, NotNegative, Section, Text
from rpcrl.config.section import setting as _setting

__all__ = ["Reward", "RewardModel"]


class RewardModel(Section):
    """A model that scores responses; off in the default job."""

    enable: bool = _setting(False, "Score with a reward model")
    enable_resource_pool: bool = _setting(False, "Give the reward model a pool of its own")
    nnodes: CountOrZero = _setting(0, "Nodes of that pool")
    n_gpus_per_node: CountOrZero = _setting(0, "Devices per node of that pool")
    model_path: Text | None = _setting(
        None, "Folder of a Hugging Face sequence classifier with 1 label, and its tokenizer"
    )
    micro_batch_size_per_gpu: Count | None = _setting(
        None, "Responses per forward pass of one rank; null takes all of the rank's"
    )
    weight: NotNegative = _setting(
        1.0, "Weight of the model's number beside reward.fn's; without reward.fn the number alone is the score"
    )


class Reward(Section):
    """Who scores a response."""

    fn: Text | None = _setting(
        None,
        "Reward function as 'file.py:name' or 'package.module:name'; null takes the task's own, or none beside a "
        "reward model",
    )
    num_workers: Count = _setting(1, "CPU processes that run the reward function")
    reward_kwargs: dict[str, Any] = Field(
        default_factory=dict,
        description="Keyword arguments of every call of the reward function (default: {})",
    )
    reward_model: RewardModel = RewardModel()
