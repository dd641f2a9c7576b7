"""Replicas that are no language models: what they answer, and when, is up to a test."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from rpcrl.engines.requests import SampleOutput, SampleRequest

TOKENS = Callable[[SampleRequest], Sequence[int]]


def counting(request: SampleRequest) -> Sequence[int]:
    """Answer with the numbers that follow the last token of the prompt, up to the length."""
    last = request.prompt_ids[-1]
    return [last + number + 1 for number in range(request.max_new_tokens)]


class FakeReplica:
    """Answers with ``tokens(request)``; every ``abort_after`` tokens (of one go) the request is aborted."""

    def __init__(self, tokens: TOKENS = counting, *, abort_after: int | None = None, version: int = 0) -> None:
        self.tokens = tokens
        self.abort_after = abort_after
        self.version = version
        self.requests: list[SampleRequest] = []
        self.loss: Exception | None = None
        self.hold: asyncio.Event | None = None
        """Requests wait for it, where it is set."""
        self.cancelled = 0
        self.arrived = asyncio.Event()

    async def generate_one(self, request: SampleRequest) -> SampleOutput:
        self.requests.append(request)
        self.arrived.set()
        try:
            await (self.hold.wait() if self.hold is not None else asyncio.sleep(0))
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if self.loss is not None:
            raise self.loss
        whole = list(self.tokens(request))
        have = len(request.prior_ids)
        end = len(whole) if self.abort_after is None else min(have + self.abort_after, len(whole))
        ids = [*request.prior_ids, *whole[have:end]]
        log_probs = [*request.prior_log_probs, *[-0.5] * (end - have)]
        versions = [*request.prior_versions, *[self.version] * (end - have)]
        done = end == len(whole)
        reason = "abort" if not done else "length" if len(whole) == request.max_new_tokens else "stop"
        if not done:
            self.version += 1
        return SampleOutput(request.request_id, ids, log_probs, versions, reason)  # type: ignore[arg-type]
