"""How is GSM8K asked and marked? Rows from its own files, a reward for the answer line's form and one for its number.

A GSM8K file is JSON lines with ``question`` and ``answer``; the last line of the answer is ``#### NUMBER``. The
configuration names it as ``gsm8k:PATH`` (or ``data.format=gsm8k``), the rewards as ``rpcrl.tasks.gsm8k:score``,
``:format_only`` or ``:correctness_only``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from rpcrl.errors import BatchError

__all__ = [
    "DATA_SOURCE",
    "correctness_only",
    "format_only",
    "has_answer_line",
    "last_number",
    "row_from_record",
    "score",
    "strict_answer",
]

DATA_SOURCE = "openai/gsm8k"
INSTRUCTION = "Think step by step, then end with one line that holds the result as `#### <number>`."

_NUMBER = r"[-+]?\$?\d[\d,]*(?:\.\d+)?"
_ANSWER_LINE = re.compile(rf"^[ \t]*####[ \t]*({_NUMBER})[ \t]*\.?[ \t]*$", re.MULTILINE)
_ANY_NUMBER = re.compile(_NUMBER)


def row_from_record(record: Mapping[str, object], *, index: int, split: str) -> dict[str, object]:
    """Return one record of GSM8K's own files as a row in verl's format.

    Raises BatchError when ``question`` or ``answer`` is missing or the answer has no ``#### NUMBER`` line.
    """
    question, answer = record.get("question"), record.get("answer")
    if not isinstance(question, str) or not isinstance(answer, str):
        raise BatchError(
            f"record {index} is not a GSM8K record: 'question' and 'answer' must be strings, found keys "
            f"{sorted(map(str, record))}"
        )
    number = strict_answer(answer)
    if number is None:
        raise BatchError(f"record {index} of GSM8K has no line '#### NUMBER' in its answer: {answer[-60:]!r}")
    return {
        "data_source": DATA_SOURCE,
        "prompt": [{"role": "user", "content": f"{question}\n{INSTRUCTION}"}],
        "reward_model": {"style": "rule", "ground_truth": number},
        "extra_info": {"index": index, "split": split, "question": question, "answer": answer},
    }


def strict_answer(text: str) -> str | None:
    """Return the number of the last ``#### NUMBER`` line without commas and currency, or None."""
    found = _ANSWER_LINE.findall(text)
    return _plain(found[-1]) if found else None


def last_number(text: str) -> str | None:
    """Return the last number anywhere in ``text`` without commas and currency, or None."""
    found = _ANY_NUMBER.findall(text)
    return _plain(found[-1]) if found else None


def has_answer_line(text: str) -> bool:
    """Tell whether ``text`` has a line ``#### NUMBER``, right or wrong."""
    return strict_answer(text) is not None


def score(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: Mapping[str, object] | None = None,
    *,
    format_weight: float = 0.1,
) -> dict[str, float]:
    """Return ``score`` = acc + ``format_weight`` × format, and the parts.

    ``acc`` is 1 when the answer line holds the right number (correctness; the accuracy of an evaluation), ``format``
    is 1 when there is an answer line at all. ``flexible`` (1 when the last number anywhere is right) is a metric only
    and is not in the score.
    """
    answered = strict_answer(solution_str)
    form = float(answered is not None)
    right = float(answered is not None and _same_number(answered, ground_truth))
    loose = last_number(solution_str)
    return {
        "score": right + format_weight * form,
        "acc": right,
        "format": form,
        "flexible": float(loose is not None and _same_number(loose, ground_truth)),
    }


def format_only(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Mapping[str, object] | None = None
) -> dict[str, float]:
    """Pay 1 for a line ``#### NUMBER``, whatever the number: what a very small model can learn in minutes."""
    parts = score(data_source, solution_str, ground_truth, extra_info)
    return {**parts, "score": parts["format"]}


def correctness_only(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Mapping[str, object] | None = None
) -> dict[str, float]:
    """Pay 1 for the right number on an answer line, and nothing else."""
    parts = score(data_source, solution_str, ground_truth, extra_info)
    return {**parts, "score": parts["acc"]}


def _plain(number: str) -> str:
    return number.replace(",", "").replace("$", "").removeprefix("+")


def _same_number(one: str, other: str) -> bool:
    try:
        return float(one) == float(_plain(other))
    except ValueError:
        return one == other
