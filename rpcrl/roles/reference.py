"""What does the reference role do? It scores responses under the policy that training started from."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rpcrl.dispatch.mode import Dispatch
from rpcrl.dispatch.register import register
from rpcrl.roles.passes import engine_options, ref_pass
from rpcrl.runtime.worker import Worker

if TYPE_CHECKING:
    from rpcrl.batch.data_proto import DataProto
    from rpcrl.config.run import ActorRolloutRef

__all__ = ["ReferenceWorker"]


class ReferenceWorker(Worker):
    """One dp rank of the frozen reference policy."""

    def __init__(self, config: ActorRolloutRef, *, model_path: str, device: str, threads: int) -> None:
        super().__init__()
        from rpcrl.engines.fsdp import FsdpEngine

        self._pass = ref_pass(config.ref, config.actor)
        if self.world_size > 1:
            self.init_process_group()
        self._engine = FsdpEngine(
            model_path,
            device=device,
            trainable=False,
            packed=config.model.use_remove_padding,
            threads=threads,
            **engine_options(config),
        )

    @register(Dispatch.DP_COMPUTE_PROTO)
    def compute_ref_log_prob(self, batch: DataProto) -> DataProto:
        """Return ``ref_log_prob`` [N, R] float32 for the responses of ``batch``."""
        from rpcrl.batch.data_proto import DataProto

        log_prob, _ = self._engine.compute_log_prob(batch, **self._pass)
        return DataProto.from_dict(tensors={"ref_log_prob": log_prob})
