"""Replicas that are no language models, and a loop that ends its own process."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path
from typing import Any

from rpcrl import AgentLoop, Worker, register
from rpcrl.engines.requests import SampleOutput, SampleRequest


class CountingReplica(Worker):
    """Answers with the numbers that follow the prompt's last, once it is told to."""

    def __init__(self, version: int) -> None:
        self.version = version
        self.go = asyncio.Event()
        self.requests: list[SampleRequest] = []

    @register(concurrent=True)
    async def generate_one(self, request: SampleRequest) -> SampleOutput:
        self.requests.append(request)
        await self.go.wait()
        ids = [request.prompt_ids[-1] + number + 1 for number in range(request.max_new_tokens)]
        count = len(ids)
        return SampleOutput(request.request_id, ids, [-1.0] * count, [self.version] * count, "length")

    @register(concurrent=True)
    async def release(self) -> int:
        self.go.set()
        return len(self.requests)

    @register(concurrent=True)
    async def num_requests(self) -> int:
        return len(self.requests)

    @register(concurrent=True)
    async def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class EndsItself(AgentLoop):
    """The first run of prompt 0-1 kills its process; a file tells the others that it was."""

    def start(self, *, marker: str) -> None:
        self.marker = Path(marker)

    async def run(self, prompt: Any, llm: Any) -> Any:
        if prompt.uid == "0-1" and not self.marker.exists():
            self.marker.write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGKILL)
        transcript = self.transcript(prompt)
        transcript.sampled(await llm.generate(transcript.context))
        return transcript.output()


class Blocks(AgentLoop):
    """Waits without await: its process answers nobody any more."""

    async def run(self, prompt: Any, llm: Any) -> Any:
        time.sleep(3_600.0)  # noqa: ASYNC251
