"""What does the rollout role do? It samples, and takes the trainer's weights in between."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeVar

from rpcrl.dispatch.mode import Dispatch, Execute
from rpcrl.dispatch.register import register
from rpcrl.roles.passes import computes_exactly
from rpcrl.roles.weight_sync import WeightReceiver

if TYPE_CHECKING:
    from rpcrl.batch.data_proto import DataProto
    from rpcrl.config.run import ActorRolloutRef
    from rpcrl.engines.base import RolloutEngine
    from rpcrl.engines.requests import SampleOutput, SampleRequest
    from rpcrl.engines.serving import EngineServer

__all__ = ["RolloutWorker"]

T = TypeVar("T")


class RolloutWorker(WeightReceiver):
    """One replica of the policy that samples; in the actor's process in the colocate modes, else in its own.

    Whole batches are sampled in the calling thread. From the first single request on, the engine belongs to a thread
    of its own (``EngineServer``), which does everything else between two steps.
    """

    def __init__(self, config: ActorRolloutRef, *, model_path: str, device: str, threads: int) -> None:
        super().__init__()
        self.sync_backend = config.rollout.checkpoint_engine.backend
        self.sync_timeout_s = config.rollout.checkpoint_engine.update_weights_timeout_s
        self.sync_bucket_bytes = config.rollout.checkpoint_engine.update_weights_bucket_megabytes * 2**20
        self.sync_canary = config.rollout.canary
        self.sync_exact = computes_exactly(config)
        self._model_path = model_path
        self._engine = self._open_engine(config, model_path=model_path, device=device, threads=threads)
        self._opening = threading.Lock()
        self._opened: EngineServer | None = None
        self._numbers = itertools.count()
        self._pad_token_id: int | None = None

    def _open_engine(self, config: ActorRolloutRef, *, model_path: str, device: str, threads: int) -> RolloutEngine:
        from rpcrl.roles.rollout_engine import open_rollout_engine

        return open_rollout_engine(config, model_path=model_path, device=device, threads=threads)

    @register(Dispatch.DP_COMPUTE_PROTO)
    def generate_sequences(self, prompts: DataProto) -> DataProto:
        """Sample one response per row; see ``RolloutEngine.generate``. Requests in flight wait meanwhile."""
        return self._on_engine(lambda: self._engine.generate(prompts))

    @register(Dispatch.ONE_TO_ALL)
    def sleep(self) -> int:
        """Free the weights and the cache; returns the freed bytes. Sleeping twice frees nothing the second time.

        Requests in flight have to be paused before.
        """
        return self._on_engine(lambda: self._engine.sleep() if self._engine.awake else 0)

    @register(execute_mode=Execute.RANK_ZERO)
    def engine_account(self) -> dict[str, object]:
        """Return what samples on rank 0, with the seconds of its start and the bytes that it holds."""
        return self._engine.account()  # nothing of it changes, so any thread may read it

    # -- single requests ---------------------------------------------------------------------------------------------

    @register(concurrent=True)
    async def generate_one(self, request: SampleRequest) -> SampleOutput:
        """Sample one response; see ``EngineServer.generate``. Its id must be unique among this replica's requests."""
        return await self._server().generate(request)

    @register(concurrent=True)
    async def sample(self, prompts: DataProto) -> DataProto:
        """Sample one response per row, each as a request of its own; returns them when all have ended.

        Takes what ``generate_sequences`` takes; of the result see ``rpcrl.engines.request_batches.batch_of``.
        """
        from rpcrl.engines.request_batches import batch_of, requests_of

        server = self._server()
        requests = requests_of(prompts, self._names())
        outputs = await asyncio.gather(*(server.generate(request) for request in requests))
        return batch_of(prompts, outputs, pad_token_id=self._padding())

    @register(concurrent=True)
    async def abort_requests(self, request_ids: Sequence[str] | None = None) -> int:
        """End requests (None: all) with what they have, ``finish_reason`` "abort"; returns how many."""
        return await self._server().abort(request_ids)

    @register(concurrent=True)
    async def pause_generation(self) -> int:
        """Take all requests out of the engine, with what they have; returns how many wait."""
        return await self._server().pause()

    @register(concurrent=True)
    async def resume_generation(self) -> int:
        """Go on with the requests that wait; returns how many."""
        return await self._server().resume()

    def _server(self) -> EngineServer:
        with self._opening:
            if self._opened is None:
                from rpcrl.engines.serving import EngineServer

                self._opened = EngineServer(self._engine)
            return self._opened

    def _on_engine(self, function: Callable[[], T]) -> T:
        with self._opening:
            server = self._opened
        return function() if server is None else server.run(function, alone=True)

    def _names(self) -> Iterator[str]:
        return (f"sample-{number}" for number in self._numbers)

    def _padding(self) -> int:
        if self._pad_token_id is None:
            from rpcrl.engines.hf_model import model_folder, pad_token_id

            self._pad_token_id = pad_token_id(model_folder(self._model_path), None)
        return self._pad_token_id
