"""How does a loop hear what a response is worth before the trainer asks? From the reward workers, directly."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rpcrl.batch.data_proto import DataProto
from rpcrl.errors import UsageError

if TYPE_CHECKING:
    from rpcrl.agents.loop import AgentPrompt

__all__ = ["RewardClient"]


class RewardClient:
    """The run's reward function, on the reward workers in turn."""

    def __init__(self, group: Any | None, *, first: int = 0) -> None:
        self._workers = [] if group is None else list(group.workers)
        self._turn = itertools.count(first)

    async def score(self, prompt: AgentPrompt, response_text: str) -> Mapping[str, Any]:
        """Return ``score`` and the function's further fields for one response.

        Raises UsageError in a run without a reward function, and what the function raises.
        """
        if not self._workers:
            raise UsageError("this run has no reward function (reward.fn) that a loop could ask")
        worker = self._workers[next(self._turn) % len(self._workers)]
        columns = {name: [value] for name, value in prompt.columns.items()}
        request = DataProto.from_dict(non_tensors={**columns, "response_text": [response_text]})
        scored: DataProto = await worker.compute_reward.submit(request)
        return {name: values[0] for name, values in scored.non_tensor_batch.items()}
