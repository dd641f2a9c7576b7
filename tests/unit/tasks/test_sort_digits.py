"""Default job: prompts, split, balance, rewards and the shipped base."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rpcrl.errors import CheckpointError
from rpcrl.tasks import sort_digits
from rpcrl.tasks.built_in import BUILT_IN_TASKS
from rpcrl.tasks.sort_digits import checkpoint
from rpcrl.tasks.sort_digits.prompts import MAX_DIGITS, MIN_DIGITS, Prompt

FIRST_PROMPTS = ["descending 3 0 2 7 =", "descending 4 6 6 =", "ascending 7 1 7 1 5 =", "descending 9 0 1 6 3 ="]


def test_prompt_and_answer_read_as_documented() -> None:
    up, down = Prompt("ascending", (5, 2, 9, 1)), Prompt("descending", (5, 2, 9, 1))
    assert (up.text, up.answer) == ("ascending 5 2 9 1 =", "1 2 5 9")
    assert (down.text, down.answer) == ("descending 5 2 9 1 =", "9 5 2 1")


def test_training_prompts_are_a_function_of_seed_and_index() -> None:
    # Written out, so that a change of the stream (a resumed run would read other prompts) is seen.
    assert [sort_digits.train_prompt(0, index).text for index in range(4)] == FIRST_PROMPTS
    assert sort_digits.train_prompt(0, 10**12) == sort_digits.train_prompt(0, 10**12)
    streams = [[sort_digits.train_prompt(seed, index) for index in range(50)] for seed in (0, 1, -1)]
    assert all(one != other for one, other in itertools.combinations(streams, 2))


def test_training_prompts_cover_words_lengths_and_digits_evenly() -> None:
    prompts = [sort_digits.train_prompt(3, index) for index in range(4000)]
    assert 0.46 < sum(prompt.word == "ascending" for prompt in prompts) / 4000 < 0.54
    lengths = [len(prompt.digits) for prompt in prompts]
    assert {*lengths} == {*range(MIN_DIGITS, MAX_DIGITS + 1)}
    assert all(lengths.count(length) > 800 for length in range(MIN_DIGITS, MAX_DIGITS + 1))
    assert {digit for prompt in prompts for digit in prompt.digits} == {*range(10)}
    assert all(len(set(prompt.digits)) > 1 for prompt in prompts), "equal digits read the same both ways"


def test_no_heldout_digit_set_is_ever_trained_on() -> None:
    heldout = {tuple(sorted(prompt.digits)) for prompt in sort_digits.heldout_prompts()}
    trained = {tuple(sorted(sort_digits.train_prompt(0, index).digits)) for index in range(20_000)}
    assert not heldout & trained
    assert all(sort_digits.is_heldout(digits) for digits in heldout)
    assert sort_digits.is_heldout((1, 2, 3)) == sort_digits.is_heldout((3, 1, 2)), "the order must not matter"


def test_the_best_policy_that_ignores_the_word_scores_exactly_one_half() -> None:
    prompts = sort_digits.heldout_prompts()
    assert len(prompts) == len(set(prompts)) == sort_digits.NUM_HELDOUT == 256
    for descending in (False, True):
        scores = [
            sort_digits.score("sort_digits", prompt.sorted_digits(descending=descending), prompt.answer)
            for prompt in prompts
        ]
        assert sum(scores) / len(scores) == 0.5
    # Stronger: let the policy choose its direction for each digit string after seeing the answers.
    by_digits: dict[tuple[int, ...], list[str]] = {}
    for prompt in prompts:
        by_digits.setdefault(prompt.digits, []).append(prompt.answer)
    best = sum(max(answers.count(answer) for answer in answers) for answers in by_digits.values())
    assert best / len(prompts) == 0.5
    # Any even number of prompts from the front is balanced too (val_max_samples).
    assert sum(prompt.word == "ascending" for prompt in prompts[:64]) == 32


def test_rows_have_the_format_of_a_data_set() -> None:
    assert sort_digits.train_row(0, 1) == {
        "data_source": "sort_digits",
        "prompt": [{"role": "user", "content": FIRST_PROMPTS[1]}],
        "reward_model": {"style": "rule", "ground_truth": sort_digits.train_prompt(0, 1).answer},
        "extra_info": {"index": 1, "split": "train", "word": FIRST_PROMPTS[1].split()[0]},
    }
    rows = sort_digits.heldout_rows()
    assert [row["extra_info"]["index"] for row in rows] == list(range(256))  # type: ignore[index]
    json.dumps(rows)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("1 2 5 9", 1.0),
        ("1 2 5 9 <eos>", 1.0),
        ("9 5 2 1", 0.0),
        ("1 2 5", 0.0),
        ("1 2 5 9 9", 0.0),
        ("1259", 0.0),
        ("", 0.0),
        ("1 2 5 9 <eos> 3", 0.0),
    ],
)
def test_score_is_exact(answer: str, expected: float) -> None:
    assert sort_digits.score("sort_digits", answer, "1 2 5 9", {}) == expected


def test_an_answer_that_was_cut_is_wrong() -> None:
    assert sort_digits.score("sort_digits", "1 2 5 9", "1 2 5 9", {"finish_reason": "length"}) == 0.0
    assert sort_digits.score("sort_digits", "1 2 5 9", "1 2 5 9", {"finish_reason": "stop"}) == 1.0


def test_the_swapped_reward_pays_for_the_opposite_and_only_for_it() -> None:
    for prompt in sort_digits.heldout_prompts()[:20]:
        other = Prompt("descending" if prompt.word == "ascending" else "ascending", prompt.digits).answer
        assert sort_digits.score_swapped("sort_digits", other, prompt.answer) == 1.0
        assert sort_digits.score_swapped("sort_digits", prompt.answer, prompt.answer) == 0.0


def test_the_claim_says_what_is_and_what_is_not_shown() -> None:
    claim = BUILT_IN_TASKS["sort_digits"].claim
    for words in ("already sorts", "0.50", "25 steps", "toy", "chosen after looking"):
        assert words in claim


def test_the_shipped_base_has_the_pinned_bytes() -> None:
    assert sort_digits.base_checkpoint() == sort_digits.BASE_DIR
    assert {path.name for path in sort_digits.BASE_DIR.iterdir()} == {*checkpoint.BASE_SHA256}
    for name, expected in checkpoint.BASE_SHA256.items():
        assert hashlib.sha256((sort_digits.BASE_DIR / name).read_bytes()).hexdigest() == expected


def test_another_base_is_refused(tmp_path: Path) -> None:
    copy = tmp_path / "base"
    shutil.copytree(sort_digits.BASE_DIR, copy)
    checkpoint.verify_checkpoint(copy)
    weights = copy / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"model\.safetensors is not the pinned base checkpoint"):
        checkpoint.verify_checkpoint(copy)
    weights.unlink()
    with pytest.raises(CheckpointError, match=r"lacks model\.safetensors.*remake_base"):
        checkpoint.verify_checkpoint(copy)


def test_the_task_loads_without_heavy_libraries() -> None:
    code = (
        "import sys, rpcrl.tasks.built_in as b; t = b.BUILT_IN_TASKS['sort_digits']; t.train_row(0, 0);"
        "t.heldout_rows(); print([m for m in ('torch', 'numpy', 'transformers') if m in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={**os.environ}
    )
    assert result.stdout.strip() == "[]"


def test_the_base_sorts_but_does_not_know_the_words() -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from rpcrl.tasks.sort_digits.remake_base import skill_and_accuracy

    tokenizer = AutoTokenizer.from_pretrained(sort_digits.BASE_DIR)
    model = AutoModelForCausalLM.from_pretrained(sort_digits.BASE_DIR, dtype=torch.float32)
    assert sum(parameter.numel() for parameter in model.parameters()) == 108_352
    figures = skill_and_accuracy(model, tokenizer)
    assert figures["skill"] >= 0.95
    assert figures["accuracy"] == pytest.approx(0.5, abs=0.06)
    text = "descending 4 0 7 ="
    templated = tokenizer.apply_chat_template([{"role": "user", "content": text}], tokenize=False)
    assert templated == text
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode(text)) == text.split()
    assert tokenizer.decode(tokenizer.encode("7 4 0 <eos>"), skip_special_tokens=True) == "7 4 0"
    assert (len(tokenizer), tokenizer.pad_token_id, tokenizer.eos_token_id) == (16, 0, 1)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_remade_base_sorts_too(tmp_path: Path) -> None:
    from rpcrl.tasks.sort_digits.remake_base import remake_base

    figures = remake_base(tmp_path)
    assert figures["skill"] > 0.9
    assert figures["accuracy"] == pytest.approx(0.5, abs=0.1)
    assert {path.name for path in tmp_path.iterdir()} == {*checkpoint.BASE_SHA256}
