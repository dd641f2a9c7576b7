"""Workers whose devices are elsewhere: beside what they compute here they wait, without a CPU, as for an accelerator.

The waits are per token: of each step of the engine (one token of every running request), and of each token trained on.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from rpcrl.engines.torch_rollout import TorchRolloutEngine
from rpcrl.roles.actor import ActorWorker
from rpcrl.roles.rollout import RolloutWorker

if TYPE_CHECKING:
    from rpcrl.batch.data_proto import DataProto
    from rpcrl.engines.requests import SampleOutput

GENERATE_S = 0.05
"""For one more token of all running rows."""
UPDATE_S = 0.00028
"""For each response token that is trained on."""


class WaitingEngine(TorchRolloutEngine):
    """The engine, and a wait for each token."""

    def step(self) -> list[SampleOutput]:
        """Sample one token of each request, and wait."""
        ended = super().step()
        time.sleep(GENERATE_S)
        return ended

    def generate(self, prompts: DataProto) -> DataProto:
        """Sample whole responses, and wait for as many tokens as the longest has."""
        batch = super().generate(prompts)
        columns: Any = batch.batch
        time.sleep(GENERATE_S * int(columns["response_mask"].sum(-1).max()))
        return batch


class WaitingRollout(RolloutWorker):
    """A rollout worker over that engine."""

    def _open_engine(self, config: Any, *, model_path: str, device: str, threads: int) -> WaitingEngine:
        return WaitingEngine(model_path, dtype=config.model.dtype, device=device, threads=threads, load_weights=False)


class WaitingActor(ActorWorker):
    """An actor that waits for each token that it has trained on."""

    def _update(self, batch: DataProto) -> Any:
        figures = super()._update(batch)
        columns: Any = batch.batch
        time.sleep(UPDATE_S * int(columns["response_mask"].sum()))
        return figures
