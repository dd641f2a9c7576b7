"""Prompt files, encoding, and the loader's order and position."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from rpcrl.errors import BatchError, CheckpointError, UsageError
from rpcrl.tasks.sort_digits import BASE_DIR, heldout_rows, train_row
from rpcrl.trainer.data import PromptEncoder, PromptLoader, heldout_batch, permutation
from rpcrl.trainer.prompt_files import heldout_source, read_rows, task_reward, train_source

Write = Callable[..., str]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(BASE_DIR)


@pytest.fixture
def encoder(tokenizer: Any) -> PromptEncoder:
    return PromptEncoder(tokenizer, 8)


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def _write(rows: list[Any], name: str = "rows.jsonl") -> str:
        path = tmp_path / name
        text = json.dumps(rows) if name.endswith(".json") else "".join(json.dumps(row) + "\n" for row in rows)
        path.write_text(text)
        return str(path)

    return _write


def row(number: int, **changes: Any) -> dict[str, Any]:
    full = {
        "prompt": f"ascending {number % 10} 1 2 =",
        "data_source": "mine",
        "reward_model": {"style": "rule", "ground_truth": str(number)},
    }
    return {**full, **changes}


def rows(count: int) -> list[dict[str, Any]]:
    return [row(number) for number in range(count)]


def truths(loader: PromptLoader, batches: int) -> list[str]:
    return [truth for _ in range(batches) for truth in loader.next_batch().non_tensor_batch["ground_truth"]]


# ── Files ───────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json"])
def test_rows_of_a_file_are_completed(write: Write, name: str) -> None:
    chat = [{"role": "user", "content": "ascending 3 2 1 ="}]
    path = write([row(0), row(1, prompt=chat, extra_info={"index": 70, "level": "hard"}, ignored=1)], name)
    first, second = read_rows(path, "train")
    assert first == {**row(0), "extra_info": {"index": 0, "split": "train"}}
    assert second["prompt"] == chat
    assert second["extra_info"] == {"index": 70, "split": "train", "level": "hard"}


def test_a_line_separator_inside_a_text_does_not_end_a_line(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row(0, prompt="one\u2028two"), ensure_ascii=False) + "\n\n", encoding="utf-8")
    assert [read["prompt"] for read in read_rows(str(path), "train")] == ["one\u2028two"]


@pytest.mark.parametrize(
    ("bad", "problem"),
    [
        ({"question": "?"}, r"rows.jsonl:2: no field 'prompt' \(data.prompt_key\); there are 'question'.*gsm8k:PATH"),
        (row(0, reward_model={"style": "rule"}), r"rows.jsonl:2: no field reward_model.ground_truth"),
        (row(0, reward_model="7"), "no field reward_model.ground_truth"),
        (row(0, data_source=None), "field 'data_source' must be a string, got NoneType"),
        (row(0, extra_info=[1]), "field 'extra_info' must be an object, got list"),
        (row(0, prompt=""), "field 'prompt' must be a text or a list of messages"),
        (row(0, prompt=[]), "field 'prompt' must be a text or a list of messages"),
        (row(0, prompt=[{"role": "user"}]), "with 'role' and 'content'"),
        (row(0, prompt=7), r"got '7' \(int\)"),
        ([1], "a row is a JSON object, got list"),
    ],
)
def test_what_is_not_a_row_is_refused_with_its_line(write: Write, bad: Any, problem: str) -> None:
    with pytest.raises(BatchError, match=problem):
        read_rows(write([row(0), bad]), "train")


def test_what_is_not_json_is_refused_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row(0)) + "\n{'prompt'\n")
    with pytest.raises(BatchError, match=r"rows\.jsonl:2: not JSON"):
        read_rows(str(path), "train")


def test_files_that_cannot_be_read_say_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=r"nothing\.jsonl does not exist .*built-in task: 'sort_digits'"):
        read_rows(str(tmp_path / "nothing.jsonl"), "train")
    with pytest.raises(UsageError, match="is a folder; name one file in it"):
        read_rows(f"gsm8k:{tmp_path}", "train")
    (tmp_path / "rows.csv").write_text("a")
    with pytest.raises(UsageError, match=r"is no \.jsonl, \.json or \.parquet file"):
        read_rows(str(tmp_path / "rows.csv"), "train")
    (tmp_path / "rows.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(UsageError, match=r"pyarrow is not installed: pip install pyarrow, or write"):
        read_rows(str(tmp_path / "rows.parquet"), "train")
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(UsageError, match="has no prompts"):
        train_source(str(tmp_path / "empty.jsonl"), seed=0)


def test_parquet_rows_are_those_of_jsonl(tmp_path: Path, write: Write) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="parquet files need pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.Table.from_pylist(rows(3)), tmp_path / "rows.parquet")
    assert read_rows(str(tmp_path / "rows.parquet"), "train") == read_rows(write(rows(3)), "train")


def test_gsm8k_is_recognised_by_its_prefix_only(write: Write) -> None:
    path = write([{"question": "1 + 1?", "answer": "two\n#### 2"}])
    (read,) = read_rows(f"gsm8k:{path}", "test")
    assert read["reward_model"]["ground_truth"] == "2"
    assert read["extra_info"]["split"] == "test"
    with pytest.raises(BatchError, match="gsm8k:PATH"):
        read_rows(path, "test")
    bad = write([{"question": "1 + 1?", "answer": "2"}], "bad.jsonl")
    with pytest.raises(BatchError, match=r"bad\.jsonl:1: record 0 of GSM8K has no line"):
        read_rows(f"gsm8k:{bad}", "test")


def test_the_built_in_task_is_the_default_and_brings_its_own_held_out_prompts(write: Write) -> None:
    for files in (None, "sort_digits"):
        source = train_source(files, seed=5)
        assert source.size is None
        assert source.row(10**6) == train_row(5, 10**6)
        heldout = heldout_source(None, files)
        assert heldout is not None
        assert [heldout.row(index) for index in range(256)] == heldout_rows()
        assert task_reward(files) == "rpcrl.tasks.sort_digits:score"
    path = write(rows(3))
    assert heldout_source(None, path) is None
    assert task_reward(path) is None
    assert task_reward(f"gsm8k:{path}") == "rpcrl.tasks.gsm8k:score"
    own = heldout_source(path, None, max_samples=2)
    assert own is not None
    assert own.size == 2


# ── Encoding ────────────────────────────────────────────────────────────────────────────────────────────────


def test_prompts_are_padded_on_the_left(encoder: PromptEncoder, tokenizer: Any) -> None:
    chat = row(1, prompt=[{"role": "user", "content": "descending 4 0 7 ="}], extra_info={"index": 1})
    batch = encoder.batch([{**row(0), "extra_info": {}}, chat], ["0-0", "0-1"])
    assert batch.batch["input_ids"].tolist() == [
        [0, 0, 0, *tokenizer.convert_tokens_to_ids(["ascending", "0", "1", "2", "="])],
        [0, 0, 0, *tokenizer.convert_tokens_to_ids(["descending", "4", "0", "7", "="])],
    ]
    assert batch.batch["attention_mask"].tolist() == [[0, 0, 0, 1, 1, 1, 1, 1]] * 2
    assert batch.non_tensor_batch["uid"].tolist() == ["0-0", "0-1"]
    assert batch.non_tensor_batch["raw_prompt"].tolist() == ["ascending 0 1 2 =", chat["prompt"]]
    assert batch.non_tensor_batch["ground_truth"].tolist() == ["0", "1"]
    assert batch.non_tensor_batch["extra_info"].tolist() == [{}, {"index": 1}]
    assert batch.non_tensor_batch["reward_model"][1] == {"style": "rule", "ground_truth": "1"}


def test_messages_need_a_chat_template() -> None:
    tokenizer = AutoTokenizer.from_pretrained(BASE_DIR)
    tokenizer.chat_template = None
    with pytest.raises(UsageError, match="has no chat template"):
        PromptEncoder(tokenizer, 8).batch([train_row(0, 0)], ["0-0"])


def test_long_prompts_are_an_error_or_filtered_and_counted(write: Write, tokenizer: Any) -> None:
    content = rows(10)
    content[3]["prompt"] = "ascending 1 2 3 4 5 6 ="
    content[7]["prompt"] = "ascending 1 2 3 4 ="
    source = train_source(write(content), seed=0)
    short = PromptEncoder(tokenizer, 5)
    with pytest.raises(BatchError) as caught:
        PromptLoader(source, short, batch_size=2, seed=0)
    text = str(caught.value)
    assert "2 of 10 prompts" in text
    assert "data.max_prompt_length=5 tokens (the longest has 8, the first is row 3 with 8)" in text
    assert "data.filter_overlong_prompts=true" in text
    loader = PromptLoader(source, short, batch_size=2, seed=0, filter_overlong_prompts=True)
    assert (loader.num_filtered, loader.batches_per_epoch) == (2, 4)
    assert sorted(truths(loader, 4)) == sorted(set("0123456789") - {"3", "7"})
    heldout = heldout_batch(source, short, filter_overlong_prompts=True)
    assert heldout.non_tensor_batch["uid"].tolist() == [f"heldout-{number}" for number in (0, 1, 2, 4, 5, 6, 8, 9)]


def test_a_long_prompt_of_an_endless_source_is_an_error_when_it_comes(tokenizer: Any) -> None:
    loader = PromptLoader(train_source(None, seed=0), PromptEncoder(tokenizer, 5), batch_size=4, seed=0)
    with pytest.raises(BatchError, match=r"prompt 0-0 has 6 tokens, allowed are 1 to data\.max_prompt_length=5"):
        loader.next_batch()
    assert loader.state()["batch"] == 0


# ── The loader ──────────────────────────────────────────────────────────────────────────────────────────────


def test_an_epoch_is_a_permutation_and_leaves_out_what_fills_no_batch(write: Write, encoder: PromptEncoder) -> None:
    loader = PromptLoader(train_source(write(rows(11)), seed=0), encoder, batch_size=4, seed=3)
    assert loader.batches_per_epoch == 2
    epochs = [truths(loader, 2) for _ in range(6)]
    assert loader.epoch == 6
    for epoch in epochs:
        assert len(set(epoch)) == 8
    assert len({tuple(epoch) for epoch in epochs}) == 6, "each epoch has an order of its own"
    assert set().union(*epochs) == {str(number) for number in range(11)}, "what is left out changes"


def test_uids_are_unique_in_the_run_and_without_underscore(write: Write, encoder: PromptEncoder) -> None:
    loader = PromptLoader(train_source(write(rows(4)), seed=0), encoder, batch_size=2, seed=0, shuffle=False)
    uids = [uid for _ in range(4) for uid in loader.next_batch().non_tensor_batch["uid"]]
    assert uids == ["0-0", "0-1", "0-2", "0-3", "1-0", "1-1", "1-2", "1-3"]


def test_the_position_rolls_over_exactly_at_the_end_of_an_epoch(write: Write, encoder: PromptEncoder) -> None:
    loader = PromptLoader(train_source(write(rows(8)), seed=0), encoder, batch_size=4, seed=0)
    positions = []
    for _ in range(5):
        positions.append((loader.state()["epoch"], loader.state()["batch"]))
        loader.next_batch()
    assert positions == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0)]


@pytest.mark.parametrize("files", ["rows", None], ids=["file", "built-in"])
@pytest.mark.parametrize("taken", [0, 1, 2, 3, 5])
def test_a_resumed_loader_goes_on_as_the_uninterrupted_one(
    write: Write, encoder: PromptEncoder, files: str | None, taken: int
) -> None:
    source = train_source(None if files is None else write(rows(9)), seed=2)
    whole = PromptLoader(source, encoder, batch_size=4, seed=2)
    expected = [whole.next_batch() for _ in range(8)][taken:]
    first = PromptLoader(source, encoder, batch_size=4, seed=2)
    for _ in range(taken):
        first.next_batch()
    second = PromptLoader(source, encoder, batch_size=4, seed=2)
    second.load_state(json.loads(json.dumps(first.state())))
    for batch in expected:
        resumed = second.next_batch()
        assert resumed.batch["input_ids"].tolist() == batch.batch["input_ids"].tolist()
        assert resumed.non_tensor_batch["uid"].tolist() == batch.non_tensor_batch["uid"].tolist()


def test_a_batch_that_was_prepared_ahead_is_the_one_that_comes_and_moves_nothing(
    write: Write, encoder: PromptEncoder
) -> None:
    source = train_source(write(rows(7)), seed=2)
    plain, ahead = (PromptLoader(source, encoder, batch_size=3, seed=2) for _ in range(2))
    for _ in range(5):
        before = ahead.state()
        ahead.prepare()
        ahead.prepare()
        assert ahead.state() == before == plain.state()
        assert truths(ahead, 1) == truths(plain, 1)
    ahead.prepare()
    ahead.load_state(before)
    plain.load_state(before)
    assert truths(ahead, 1) == truths(plain, 1), "what was prepared belongs to another place"


def test_a_position_in_something_else_is_refused(write: Write, encoder: PromptEncoder) -> None:
    source = train_source(write(rows(9)), seed=0)
    loader = PromptLoader(source, encoder, batch_size=4, seed=0)
    loader.next_batch()
    state = loader.state()
    for changed, problem in (
        ({"batch_size": 3}, "has batch_size=3, this run has 4"),
        ({"seed": 1}, "has seed=1, this run has 0"),
        ({"shuffle": False}, "has shuffle=False, this run has True"),
        ({"num_rows": 8}, "has num_rows=8, this run has 9"),
        ({"batch": 2}, "epoch=0 batch=2; an epoch has 2 batches"),
        ({"batch": "1"}, "batch='1'"),
        ({"epoch": -1}, "epoch=-1"),
    ):
        with pytest.raises(CheckpointError, match=problem):
            loader.load_state({**state, **changed})
        assert loader.state() == state, "a refused position moves nothing"


def test_fewer_prompts_than_a_batch_is_an_error_with_numbers(write: Write, encoder: PromptEncoder) -> None:
    with pytest.raises(UsageError, match=r"has 3 usable prompts, fewer than one batch of data\.train_batch_size=4"):
        PromptLoader(train_source(write(rows(3)), seed=0), encoder, batch_size=4, seed=0)
    PromptLoader(train_source(write(rows(4)), seed=0), encoder, batch_size=4, seed=0)


def test_the_order_is_written_in_stone() -> None:
    # A resumed run would read other prompts if these changed.
    assert permutation(8, seed=0, epoch=0).tolist() == [0, 1, 6, 3, 5, 4, 2, 7]
    assert permutation(8, seed=0, epoch=1).tolist() == [3, 0, 1, 5, 2, 7, 4, 6]
    assert permutation(8, seed=-7, epoch=0).tolist() == [2, 1, 6, 4, 5, 7, 0, 3]


def test_the_order_is_even() -> None:
    places = np.stack([permutation(10, seed=seed, epoch=epoch) for seed in range(50) for epoch in range(40)])
    assert (np.sort(places, axis=1) == np.arange(10)).all()
    counts = np.stack([(places == value).sum(axis=0) for value in range(10)])
    # 2,000 draws in 10 places: 200 each, standard deviation 13.4
    assert counts.min() > 140
    assert counts.max() < 260


def test_gsm8k_goes_through_a_loader(encoder: PromptEncoder) -> None:
    folder = Path(os.environ.get("RPCRL_GSM8K") or Path(__file__).parents[3] / "../shared/data/gsm8k")
    if not (folder / "train.jsonl").is_file():
        pytest.skip(f"GSM8K is not here ({folder}); set RPCRL_GSM8K to its folder")
    source = train_source(f"gsm8k:{folder / 'train.jsonl'}", seed=0, max_samples=50)
    loader = PromptLoader(source, PromptEncoder(AutoTokenizer.from_pretrained(BASE_DIR), 512), batch_size=4, seed=0)
    batch = loader.next_batch()
    assert batch.non_tensor_batch["data_source"].tolist() == ["openai/gsm8k"] * 4
    assert all(float(truth.replace(",", "")) >= 0 for truth in batch.non_tensor_batch["ground_truth"])
