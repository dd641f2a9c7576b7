"""Agent loops for tests: turns, tools, failures."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from typing import Any

from rpcrl.agents.llm import Llm
from rpcrl.agents.loop import AgentLoop, AgentLoopOutput, AgentPrompt

RUNS: Counter[str] = Counter()
"""How often a sample was begun in this process."""


class TwoTurns(AgentLoop):
    """The model answers, a tool says 900 901, and the model answers again."""

    def start(self, *, turn_tokens: int = 2) -> None:
        self.turn_tokens = turn_tokens

    async def run(self, prompt: AgentPrompt, llm: Llm) -> AgentLoopOutput:
        transcript = self.transcript(prompt)
        transcript.sampled(await llm.generate(transcript.context, max_new_tokens=self.turn_tokens))
        if transcript.given([900, 901]):
            transcript.sampled(await llm.generate(transcript.context, max_new_tokens=min(2, transcript.room)))
        return transcript.output(seed=prompt.columns["extra_info"]["seed"])


class Several(AgentLoop):
    """As many outputs as the prompt's last token says, scored by their place."""

    async def run(self, prompt: AgentPrompt, llm: Llm) -> list[AgentLoopOutput]:
        outputs = []
        for number in range(prompt.token_ids[-1]):
            transcript = self.transcript(prompt)
            transcript.sampled(await llm.generate(transcript.context, max_new_tokens=1))
            outputs.append(transcript.output(reward_score=float(number)))
        return outputs


class Failing(AgentLoop):
    """Fails as its ``extra_info`` says: always, the first time, by waiting for ever, or by a wrong result."""

    async def run(self, prompt: AgentPrompt, llm: Llm) -> Any:
        RUNS[prompt.uid] += 1
        how = prompt.columns["extra_info"]["how"]
        if how == "always" or (how == "once" and RUNS[prompt.uid] == 1):
            raise KeyError(f"no such tool, run {RUNS[prompt.uid]}")
        if how == "hangs":
            await asyncio.Event().wait()
        if how == "blocks":
            time.sleep(3_600.0)  # noqa: ASYNC251
        if how == "nothing":
            return None
        transcript = self.transcript(prompt)
        transcript.sampled(await llm.generate(transcript.context))
        if how == "torn":
            transcript.response_ids.pop()
        return transcript.output()


class NoRun(AgentLoop):
    """Says nothing of how a sample is made."""


class PlainRun(AgentLoop):
    """Its run is no coroutine."""

    def run(self, prompt: AgentPrompt, llm: Llm) -> Any:
        return None


def no_loop() -> None:
    """Is no class."""
