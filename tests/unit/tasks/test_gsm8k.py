"""GSM8K: rows from its own records, answer lines, rewards."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from rpcrl.errors import BatchError
from rpcrl.tasks import gsm8k

ANSWER = "She sold 48/2 = <<48/2=24>>24 clips in May.\nShe sold 48+24 = <<48+24=72>>72.\n#### 72"


def real_file(name: str) -> Path:
    folder = Path(os.environ.get("RPCRL_GSM8K") or Path(__file__).parents[3] / "../shared/data/gsm8k")
    path = folder / name
    if not path.is_file():
        pytest.skip(f"GSM8K is not here ({path}); set RPCRL_GSM8K to its folder")
    return path


def test_a_record_becomes_a_row() -> None:
    row = gsm8k.row_from_record({"question": "How many?", "answer": ANSWER}, index=7, split="train")
    assert row["data_source"] == "openai/gsm8k"
    assert row["reward_model"] == {"style": "rule", "ground_truth": "72"}
    assert row["prompt"] == [{"role": "user", "content": f"How many?\n{gsm8k.INSTRUCTION}"}]
    assert row["extra_info"] == {"index": 7, "split": "train", "question": "How many?", "answer": ANSWER}


@pytest.mark.parametrize(
    ("record", "problem"),
    [
        ({"question": "How many?"}, r"record 3 .*'question' and 'answer' must be strings, found keys \['question'\]"),
        ({"question": "How many?", "answer": 72}, "must be strings"),
        ({"question": "How many?", "answer": "72"}, r"record 3 of GSM8K has no line '#### NUMBER'.*'72'"),
    ],
)
def test_a_record_of_another_form_is_refused(record: dict[str, object], problem: str) -> None:
    with pytest.raises(BatchError, match=problem):
        gsm8k.row_from_record(record, index=3, split="train")


@pytest.mark.parametrize(
    ("text", "strict", "loose"),
    [
        ("so\n#### 72", "72", "72"),
        ("#### 72\nand then\n#### 73", "73", "73"),
        ("#### $1,234.50", "1234.50", "1234.50"),
        ("#### -5", "-5", "-5"),
        ("####8.", "8", "8"),
        ("the answer is #### 72", None, "72"),
        ("#### 72 clips", None, "72"),
        ("#### seventy-two", None, None),
        ("it is 7 or 12.", None, "12"),
        ("", None, None),
    ],
)
def test_numbers_are_found(text: str, strict: str | None, loose: str | None) -> None:
    assert gsm8k.strict_answer(text) == strict
    assert gsm8k.has_answer_line(text) is (strict is not None)
    assert gsm8k.last_number(text) == loose


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("so\n#### 72", {"score": 1.1, "acc": 1.0, "format": 1.0, "flexible": 1.0}),
        ("so\n#### 72.0", {"score": 1.1, "acc": 1.0, "format": 1.0, "flexible": 1.0}),
        ("so\n#### 7", {"score": 0.1, "acc": 0.0, "format": 1.0, "flexible": 0.0}),
        ("it is 72", {"score": 0.0, "acc": 0.0, "format": 0.0, "flexible": 1.0}),
        ("no idea", {"score": 0.0, "acc": 0.0, "format": 0.0, "flexible": 0.0}),
    ],
)
def test_score_pays_for_the_number_and_a_little_for_the_form(text: str, expected: dict[str, float]) -> None:
    assert gsm8k.score("openai/gsm8k", text, "72", {}) == expected
    assert gsm8k.format_only("openai/gsm8k", text, "72")["score"] == expected["format"]
    assert gsm8k.correctness_only("openai/gsm8k", text, "72")["score"] == expected["acc"]


def test_the_weight_of_the_form_is_a_setting() -> None:
    assert gsm8k.score("openai/gsm8k", "#### 7", "72", {}, format_weight=0.5)["score"] == 0.5


@pytest.mark.parametrize(("name", "split", "count"), [("train.jsonl", "train", 7473), ("test.jsonl", "test", 1319)])
def test_every_real_record_is_read_and_its_own_solution_is_right(name: str, split: str, count: int) -> None:
    lines = real_file(name).read_text(encoding="utf-8").splitlines()
    assert len(lines) == count
    for index, line in enumerate(lines):
        record = json.loads(line)
        truth = gsm8k.row_from_record(record, index=index, split=split)["reward_model"]["ground_truth"]  # type: ignore[index]
        assert gsm8k.score("openai/gsm8k", record["answer"], truth)["acc"] == 1.0, line
