"""Prompts are read before any process starts, and every mistake in them comes in one message."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rpcrl.config.load import load
from rpcrl.errors import ConfigError
from rpcrl.trainer.sources import open_prompts, source_checks

ROW = {"prompt": "1 + 1 =", "data_source": "sums", "reward_model": {"ground_truth": "2"}}


def _config(*overrides: str):
    return load(None, ["actor_rollout_ref.model.path=/models/none", *overrides], "colocate")


def test_every_mistake_in_the_files_comes_at_once(tmp_path: Path):
    train, val = tmp_path / "train.jsonl", tmp_path / "val.jsonl"
    train.write_text(json.dumps(ROW) + "\n{not json\n")
    val.write_text(json.dumps({"question": "no prompt"}) + "\n")
    with pytest.raises(ConfigError) as caught:
        open_prompts(_config(f"data.train_files={train}", f"data.val_files={val}", "reward.fn=f.py:score"))
    first, second = caught.value.violations
    assert (first.key, second.key) == ("data.train_files", "data.val_files")
    assert "train.jsonl" in first.problem
    assert "2" in first.problem, "the line is named"
    assert "prompt" in second.problem


def test_fewer_prompts_than_a_batch_are_refused_with_the_numbers(tmp_path: Path):
    train = tmp_path / "train.jsonl"
    train.write_text((json.dumps(ROW) + "\n") * 3)
    with pytest.raises(ConfigError, match="has 3 prompts, fewer than one batch of B = 32"):
        open_prompts(_config(f"data.train_files={train}", "reward.fn=f.py:score"))


def test_an_evaluation_without_heldout_prompts_is_refused(tmp_path: Path):
    train = tmp_path / "train.jsonl"
    train.write_text((json.dumps(ROW) + "\n") * 32)
    config = _config(f"data.train_files={train}", "reward.fn=f.py:score")
    assert open_prompts(config).heldout is None
    with pytest.raises(ConfigError, match="brings none along: nothing can be evaluated") as caught:
        open_prompts(config, heldout_needed=True)
    assert [violation.key for violation in caught.value.violations] == ["data.val_files"]
    open_prompts(_config(f"data.train_files={train}", f"data.val_files={train}"), heldout_needed=True)


def test_a_gsm8k_path_is_checked_without_its_prefix(tmp_path: Path):
    there = tmp_path / "there.jsonl"
    record = json.dumps({"question": "1 + 1?", "answer": "It is 2.\n#### 2"}) + "\n"
    there.write_text(record * 32)
    config = _config(f"data.train_files=gsm8k:{there}", f"data.val_files=gsm8k:{tmp_path}/missing.jsonl")
    problems = {violation.key: violation.problem for violation in source_checks(config)}
    assert "data.train_files" not in problems
    assert f"the data file {tmp_path}/missing.jsonl does not exist" in problems["data.val_files"]


def test_model_reward_and_rows_are_all_told_together(tmp_path: Path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text("{not json\n")
    config = _config(f"data.train_files={rows}", "reward.fn=missing.py:score")
    keys = [violation.key for violation in source_checks(config)]
    assert keys == ["actor_rollout_ref.model.path", "reward.fn", "data.train_files"]


def test_a_folder_that_is_no_model_is_refused_with_what_it_lacks(tmp_path: Path):
    def problem() -> str:
        (violation,) = source_checks(load(None, [f"model.path={tmp_path}"]))
        return violation.problem

    assert "has no config.json" in problem()
    (tmp_path / "config.json").write_text("{")
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert "its config.json is not JSON" in problem()
    (tmp_path / "config.json").write_text("{}")
    assert "has no tokenizer.json" in problem()
    (tmp_path / "tokenizer.json").write_text("{}")
    assert source_checks(load(None, [f"model.path={tmp_path}"])) == []


def test_prompts_of_the_built_in_task_must_fit():
    from rpcrl.engines.hf_model import load_tokenizer
    from rpcrl.tasks.sort_digits import MAX_PROMPT_TOKENS, heldout_rows
    from rpcrl.trainer.data import PromptEncoder
    from rpcrl.trainer.sources import model_folder

    encoder = PromptEncoder(load_tokenizer(model_folder(load(None))), MAX_PROMPT_TOKENS)
    assert max(len(encoder.token_ids(row)) for row in heldout_rows()) == MAX_PROMPT_TOKENS
    (violation,) = source_checks(load(None, ["data.max_prompt_length=4"]))
    assert violation.key == "data.max_prompt_length"
    assert violation.remedies == (f"set data.max_prompt_length={MAX_PROMPT_TOKENS}",)


@pytest.mark.parametrize("key", ["algorithm.adv_estimator", "actor_rollout_ref.actor.policy_loss.loss_mode"])
def test_functions_of_ones_own_are_loaded_before_anything_starts(tmp_path: Path, key: str):
    own = tmp_path / "own.py"
    own.write_text("def mine(**everything): ...\n")
    problems = {
        name: {violation.key: violation.problem for violation in source_checks(_config(f"{key}={name}"))}
        for name in (f"{own}:mine", f"{own}:his", "no_such_module:fn")
    }
    assert key not in problems[f"{own}:mine"]
    assert "has no function 'his'" in problems[f"{own}:his"][key]
    assert "there is no module 'no_such_module'" in problems["no_such_module:fn"][key]


def test_an_estimator_that_needs_values_needs_a_critic(tmp_path: Path):
    own = tmp_path / "own.py"
    own.write_text("def mine(values, response_mask): ...\n")
    setting = f"algorithm.adv_estimator={own}:mine"
    (problem,) = (v.problem for v in source_checks(_config(setting)) if v.key == "algorithm.adv_estimator")
    assert problem.endswith("own.py:mine needs the values of a critic")
    assert "algorithm.adv_estimator" not in {v.key for v in source_checks(_config(setting, "critic.enable=true"))}
