"""What does the rollout role do? It samples, and takes the trainer's weights between the batches."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rpcrl.dispatch.mode import Dispatch
from rpcrl.dispatch.register import register
from rpcrl.errors import UsageError
from rpcrl.roles.weight_sync import WeightReceiver

if TYPE_CHECKING:
    from rpcrl.batch.data_proto import DataProto
    from rpcrl.config.run import ActorRolloutRef
    from rpcrl.engines.base import RolloutEngine

__all__ = ["RolloutWorker"]


class RolloutWorker(WeightReceiver):
    """One replica of the policy that samples; in the actor's process in the colocate modes, else in its own."""

    def __init__(self, config: ActorRolloutRef, *, model_path: str, device: str, threads: int) -> None:
        super().__init__()
        self.sync_backend = config.rollout.checkpoint_engine.backend
        self.sync_timeout_s = config.rollout.checkpoint_engine.update_weights_timeout_s
        self.sync_bucket_bytes = config.rollout.checkpoint_engine.update_weights_bucket_megabytes * 2**20
        self._engine = self._open_engine(config, model_path=model_path, device=device, threads=threads)

    def _open_engine(self, config: ActorRolloutRef, *, model_path: str, device: str, threads: int) -> RolloutEngine:
        if config.rollout.name != "torch":
            raise UsageError(f"rollout.name={config.rollout.name!r}: this version has the engine 'torch' only")
        from rpcrl.engines.torch_rollout import TorchRolloutEngine

        # the weights come from the actor before the first sample: a rollout that misses them refuses to sample
        return TorchRolloutEngine(
            model_path, dtype=config.model.dtype, device=device, threads=threads, load_weights=False
        )

    @register(Dispatch.DP_COMPUTE_PROTO)
    def generate_sequences(self, prompts: DataProto) -> DataProto:
        """Sample one response per row; see ``RolloutEngine.generate``."""
        return self._engine.generate(prompts)

    @register(Dispatch.ONE_TO_ALL)
    def sleep(self) -> int:
        """Free the weights and the cache; returns the freed bytes. Sleeping twice frees nothing the second time."""
        return self._engine.sleep() if self._engine.awake else 0
