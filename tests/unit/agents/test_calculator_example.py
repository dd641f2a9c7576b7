"""The calculator example: what it works out, and the conversation it makes (the model is one that a test writes)."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from rpcrl.agents.balancer import Balancer
from rpcrl.agents.llm import Llm, LlmClient
from rpcrl.agents.loop import AgentLoopOutput, AgentPrompt
from rpcrl.agents.worker import load_loop
from rpcrl.engines.requests import SampleRequest
from rpcrl.engines.sampling_settings import SamplingSettings
from tests.unit.agents.byte_llm import FakeReplica

FILE = Path(__file__).parents[3] / "examples" / "calculator_agent.py"
CALCULATOR = load_loop(f"{FILE}:CalculatorAgent")


@pytest.mark.parametrize(
    ("expression", "result"),
    [
        ("48 / 2", "24"),
        ("1,200 * $3", "3600"),
        ("-(2 + 3) * 0.5", "-2.5000"),
        ("1 / 3", "0.3333"),
        ("0.1 + 0.2", "0.3000"),
        ("1 / 0", "error: ZeroDivisionError"),
        ("2 +", "error: SyntaxError"),
        ("2 ** 9", "error: only numbers, + - * / and brackets"),
        ("__import__('os')", "error: only numbers, + - * / and brackets"),
        ("999999999999 * 999999999999", "error: too large"),
    ],
)
def test_sums_are_worked_out_and_nothing_else(expression: str, result: str):
    import sys

    assert sys.modules[CALCULATOR.__module__].calculate(expression) == result


class Bytes:
    """A tokenizer with a token for each byte, and 0 for the end of a message."""

    def encode(self, text: str) -> list[int]:
        return [byte or 256 for byte in text.encode()]

    def decode(self, token_ids: Any) -> str:
        return bytes(token for token in token_ids if token < 256 and token).decode()

    def chat(self, messages: Any) -> str:
        return "".join(f"<{message['role']}>{message['content'][:9]}" for message in messages) + "<assistant>"

    def next_turn(self, messages: Any) -> str:
        return "".join(f"<{message['role']}>{message['content']}" for message in messages) + "<assistant>"


def converse(*turns: str, room: int = 200, prompt_room: int = 200, **settings: Any) -> AgentLoopOutput:
    tokenizer = Bytes()
    answers = iter(turns)

    def answer(request: SampleRequest) -> list[int]:
        return [*tokenizer.encode(next(answers)), 0][: request.max_new_tokens]

    async def work() -> AgentLoopOutput:
        client = LlmClient(Balancer(), name="test")
        await client.add_replica("a", FakeReplica(answer))
        loop = CALCULATOR()
        loop.tokenizer = tokenizer  # type: ignore[assignment]
        loop.max_prompt_length, loop.max_response_length = prompt_room, room
        loop.start(**settings)
        columns = {"extra_info": {"question": "How many?"}}
        prompt = AgentPrompt("p", 0, tokenizer.encode("<user>How many?"), "as the data has it", 1, columns=columns)
        llm = Llm(
            client, uid="p", sample_index=0, seed=0, step=1, sampling=SamplingSettings(), max_response_length=room
        )
        made = await asyncio.wait_for(loop.run(prompt, llm), 30)
        assert isinstance(made, AgentLoopOutput)
        made.check(max_prompt_length=prompt_room, max_response_length=room)
        return made

    return asyncio.run(work())


def sampled_text(output: AgentLoopOutput) -> str:
    kept = [token for token, own in zip(output.response_ids, output.response_mask, strict=True) if own]
    return Bytes().decode(kept)


def test_the_calculators_result_stands_in_the_conversation_and_not_in_the_mask():
    output = converse("Half: calc(48 / 2)", "calc(48+24)", "#### 72")
    assert "calc((1 + 2) * 3) = 9" in Bytes().decode(converse("calc((1 + 2) * 3) (or so)", "9").response_ids)
    text = Bytes().decode(output.response_ids)
    assert "<user>calc(48 / 2) = 24<assistant>calc(48+24)<user>calc(48+24) = 72<assistant>#### 72" in text
    assert sampled_text(output) == "Half: calc(48 / 2)calc(48+24)#### 72"
    assert (output.num_turns, output.extra_fields, output.finish_reason) == (3, {"num_tool_calls": 2}, "stop")
    assert Bytes().decode(output.prompt_ids).startswith("<system>You answe<user>Ann sold <assistant>calc(48 /")


def test_calls_and_room_are_bounded():
    assert converse("calc(1)", "calc(2)", max_calls=1).num_turns == 2
    short = converse("calc(1 + 1)", room=20)
    assert (short.num_turns, short.finish_reason) == (1, "length"), "the result would leave no room for an answer"
    cut = converse("calc(1 + 1) and more", room=12)
    assert (cut.num_turns, cut.finish_reason) == (1, "length")
    plain = converse("#### 3", prompt_room=20)
    assert Bytes().decode(plain.prompt_ids) == "<user>How many?"
