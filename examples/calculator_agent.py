"""An agent loop with a tool: the model may have a calculator work out its sums, several times in one answer.

The model is shown how to write ``calc(EXPRESSION)`` and end its message. Whatever it writes so is worked out, the
result is handed to it as the next message, and it goes on, until it writes no further sum, the calls are used up, or
the response is full. Training sees the whole conversation; the calculator's tokens are read and not trained.

    rpcrl launch --mode colocate --config examples/calculator_agent.yaml
"""

from __future__ import annotations

import ast
import operator
import re
from fractions import Fraction

from rpcrl import AgentLoop, AgentLoopOutput

BEGINNING = [
    {
        "role": "system",
        "content": "You answer questions about numbers with a calculator. Write calc(EXPRESSION), and you are told the "
        "result. When you know the answer, write #### and the number.",
    },
    # Very small models follow an example, hardly an instruction.
    {
        "role": "user",
        "content": "Ann sold 48 clips in April and half as many in May. How many did she sell altogether?",
    },
    {"role": "assistant", "content": "calc(48 / 2)"},
    {"role": "user", "content": "calc(48 / 2) = 24"},
    {"role": "assistant", "content": "calc(48 + 24)"},
    {"role": "user", "content": "calc(48 + 24) = 72"},
    {"role": "assistant", "content": "#### 72"},
]
"""What each question is preceded by."""
CALL = re.compile(r"calc\(((?:[^()\n]|\([^()\n]*\)){1,100})\)")
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
LARGEST = 10**12


def calculate(expression: str) -> str:
    """Return the value of a sum as text, or what is wrong with it; nothing but numbers and + - * / is worked out."""
    try:
        value = _value(ast.parse(expression.replace(",", "").replace("$", ""), mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError) as error:
        return f"error: {error if isinstance(error, ValueError) else type(error).__name__}"
    return str(value.numerator) if value.denominator == 1 else f"{float(value):.4f}"


def _value(node: ast.expr) -> Fraction:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        value = Fraction(str(node.value))
    elif isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        value = Fraction(OPERATORS[type(node.op)](_value(node.left), _value(node.right)))
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        value = -_value(node.operand)
    else:
        raise ValueError("only numbers, + - * / and brackets")
    if abs(value.numerator) > LARGEST or value.denominator > LARGEST:
        raise ValueError("too large")
    return value


class CalculatorAgent(AgentLoop):
    """Answers a question with the help of a calculator, which is asked up to ``max_calls`` times."""

    def start(self, *, max_calls: int = 3) -> None:
        """Take the settings of ``rollout.agent.agent_loop_kwargs``."""
        self.max_calls = max_calls

    async def run(self, prompt, llm) -> AgentLoopOutput:
        """Make one sample: turns of the model, and the calculator's results between them."""
        question = prompt.columns["extra_info"]["question"]
        messages = [*BEGINNING, {"role": "user", "content": question}]
        transcript = self.transcript(prompt)
        instructed = self.tokenizer.encode(self.tokenizer.chat(messages))
        if len(instructed) <= self.max_prompt_length:  # a longer question is asked as the data has it
            transcript.prompt_ids = instructed
        num_calls = 0
        while True:
            turn = await llm.generate(transcript.context, max_new_tokens=transcript.room)
            transcript.sampled(turn)
            call = CALL.search(self.tokenizer.decode(turn.token_ids))
            # a turn that ran out of room has no end to go on behind
            if call is None or turn.finish_reason != "stop" or num_calls == self.max_calls:
                break
            result = {"role": "user", "content": f"calc({call[1]}) = {calculate(call[1])}"}
            if not transcript.given(self.tokenizer.encode(self.tokenizer.next_turn([result]))):
                break
            num_calls += 1
        return transcript.output(num_tool_calls=num_calls)
