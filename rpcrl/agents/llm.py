"""How does a loop reach the model? By the replicas' own calls: the driver is not in the path.

``LlmClient`` is a worker's one way to all replicas; ``Llm`` is what one sample sees of it.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

from rpcrl.agents.balancer import Balancer, Placement
from rpcrl.engines.requests import SampleOutput, SampleRequest
from rpcrl.engines.sampling_settings import SamplingSettings
from rpcrl.errors import AgentLostError, ClosedError, PeerUnreachableError, UsageError, WorkerLostError
from rpcrl.logs import get_logger

__all__ = ["HandleReplica", "Llm", "LlmClient", "Replica"]

log = get_logger(__name__)

LOST = (WorkerLostError, AgentLostError, PeerUnreachableError, ClosedError)
"""What a call raises whose worker is gone. Whether it had begun does not matter: sampling changes nothing."""


class Replica(Protocol):
    """One copy of the policy that samples."""

    async def generate_one(self, request: SampleRequest) -> SampleOutput:
        """Sample one response; cancelled, it leaves the engine. Raises one of ``LOST`` when the replica is gone."""
        ...


class HandleReplica:
    """A replica behind a worker handle (``RolloutWorker``)."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    async def generate_one(self, request: SampleRequest) -> SampleOutput:
        """Call the worker directly; whoever gives up here gives the request up there."""
        future = self._handle.generate_one.submit(request)
        try:
            output: SampleOutput = await future
        except asyncio.CancelledError:
            future.cancel()
            raise
        return output


class LlmClient:
    """Replicas, and requests that outlive aborts and lost replicas. For one event loop.

    ``name`` begins the ids of its requests, so it must be this process's own. ``wait_for_replica_s`` is how long a
    request waits for a replica to be added while there is none; 0 fails at once, with the loss of the last one.
    """

    def __init__(self, balancer: Balancer, *, name: str, wait_for_replica_s: float = 0.0) -> None:
        self.balancer = balancer
        self._name = name
        self._wait_s = wait_for_replica_s
        self._replicas: dict[str, Replica] = {}
        self._numbers = itertools.count()
        self._changed = asyncio.Condition()
        self._loss: BaseException | None = None
        self.num_resumed = 0
        """Aborted requests that went on."""
        self.num_reissued = 0
        """Requests of lost replicas that were asked for again elsewhere."""

    async def add_replica(self, name: str, replica: Replica) -> None:
        """Take a replica in; one of the same name is replaced."""
        self.balancer.remove(name)
        self._replicas[name] = replica
        self.balancer.add(name)
        async with self._changed:
            self._changed.notify_all()

    async def remove_replica(self, name: str) -> None:
        """Send no further request to a replica; those that it has go on until they end or it is gone."""
        self.balancer.remove(name)
        self._replicas.pop(name, None)

    async def generate(self, request: SampleRequest, *, conversation: str | None = None) -> SampleOutput:
        """Sample one response, whatever number of goes it takes; ``request_id`` is made anew for each.

        An aborted request goes on with the tokens that it has, under the weights of that time. Raises the loss of a
        replica when none is left, and what the engine raised.
        """
        while True:
            placement = await self._place(conversation)
            request = replace(request, request_id=f"{self._name}-{next(self._numbers)}")
            try:
                output = await self._replicas[placement.replica].generate_one(request)
            except LOST as error:
                self._lose(placement, error)
                self.num_reissued += 1
                continue
            finally:
                self.balancer.release(placement)
            if output.finish_reason != "abort":
                return output
            request = request.resumed(output)
            self.num_resumed += 1

    def forget(self, conversation: str) -> None:
        """Let a conversation that has ended go."""
        self.balancer.forget(conversation)

    async def _place(self, conversation: str | None) -> Placement:
        placement = self.balancer.acquire(conversation)
        if placement is not None:
            return placement
        try:
            async with asyncio.timeout(self._wait_s), self._changed:
                while (placement := self.balancer.acquire(conversation)) is None:
                    await self._changed.wait()
                return placement
        except TimeoutError:
            if self._loss is not None:
                raise self._loss from None
            raise UsageError(f"no replica takes requests, and none was added within {self._wait_s} s") from None

    def _lose(self, placement: Placement, error: BaseException) -> None:
        self._loss = error
        if self.balancer.remove(placement.replica, placement.registration):
            del self._replicas[placement.replica]
            left = len(self.balancer.replicas)
            log.warning("replica %s is gone, %d are left: %s", placement.replica, left, error)


class Llm:
    """The model, as one sample sees it: one conversation with one replica, and noise of the sample's own.

    The first call of a sample draws the tokens that it would draw without an agent loop; each further call has noise of
    its own. All depends on (seed, step, uid, sample index, number of the call) alone.
    """

    def __init__(
        self,
        client: LlmClient,
        *,
        uid: str,
        sample_index: int,
        seed: int,
        step: int,
        sampling: SamplingSettings,
        max_response_length: int,
    ) -> None:
        self._client = client
        self._uid = uid
        self._sample_index = sample_index
        self._seed = seed
        self._step = step
        self.sampling = sampling
        """Of this row, where a call does not say otherwise."""
        self.max_response_length = max_response_length
        self.conversation = f"{uid}/{sample_index}"
        self.num_calls = 0

    async def generate(
        self,
        prompt_ids: Sequence[int],
        *,
        max_new_tokens: int | None = None,
        sampling: SamplingSettings | None = None,
        stop_ids: Sequence[int] = (),
        conversation: str | None = None,
    ) -> SampleOutput:
        """Continue ``prompt_ids`` by up to ``max_new_tokens`` (None: the response length) tokens.

        ``stop_ids`` end it beside the model's own. ``conversation`` names another talk than the sample's, for loops
        that hold several. Tokens that are trained should be drawn as ``sampling`` of the row says: the trainer computes
        their probabilities under the temperature of the whole batch.
        """
        room = self.max_response_length if max_new_tokens is None else max_new_tokens
        if not prompt_ids or room < 1:
            raise UsageError(f"llm.generate needs a prompt and room for a token, got {len(prompt_ids)} and {room}")
        number, self.num_calls = self.num_calls, self.num_calls + 1
        request = SampleRequest(
            request_id="",
            prompt_ids=list(prompt_ids),
            max_new_tokens=room,
            sampling=self.sampling if sampling is None else sampling,
            stop_ids=list(stop_ids),
            seed=self._seed,
            step=self._step,
            uid=self._uid if number == 0 else f"{self._uid}#{number}",
            sample_index=self._sample_index,
        )
        return await self._client.generate(request, conversation=conversation or self.conversation)

    def close(self) -> None:
        """Let the conversation go: the sample is made."""
        self._client.forget(self.conversation)
