"""A run goes on only as the run that it was: every setting that decides it is compared."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rpcrl.config.load import load
from rpcrl.errors import ConfigError
from rpcrl.trainer.resume import check_same_run, deciding_settings

HERE = Path("run/checkpoints/global_step_2")


def test_every_difference_is_listed_with_both_values() -> None:
    saved = json.loads(json.dumps(deciding_settings(load(None))))
    other = load(None, ["trainer.seed=3", "rollout.n=4", "data.train_batch_size=16", "actor.optim.lr=1e-3"])
    with pytest.raises(ConfigError) as caught:
        check_same_run(saved, other, directory=HERE)
    assert {violation.key for violation in caught.value.violations} == {
        "trainer.seed",
        "actor_rollout_ref.rollout.n",
        "data.train_batch_size",
        "actor_rollout_ref.actor.optim.lr",
    }
    assert "was made with rollout.n=8, this command has rollout.n=4" in str(caught.value)


def test_what_decides_nothing_may_change() -> None:
    saved = json.loads(json.dumps(deciding_settings(load(None))))
    free = ["trainer.total_training_steps=200", "trainer.save_freq=5", "actor.ppo_micro_batch_size_per_gpu=4"]
    check_same_run(saved, load(None, [*free, "data.val_max_samples=9", "reward.num_workers=2"]), directory=HERE)
    check_same_run({}, load(None), directory=HERE)


def test_a_file_is_the_same_under_any_spelling_and_one_that_was_moved_is_not_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "rows.jsonl").write_text("")
    (tmp_path / "more.jsonl").write_text("")
    saved = deciding_settings(load(None, [f"data.train_files={tmp_path}/rows.jsonl"]))
    monkeypatch.chdir(tmp_path)
    check_same_run(saved, load(None, ["data.train_files=rows.jsonl"]), directory=HERE)
    other = load(None, ["data.train_files=more.jsonl"])
    with pytest.raises(ConfigError, match=r"data\.train_files"):
        check_same_run(saved, other, directory=HERE)
    (tmp_path / "rows.jsonl").unlink()
    check_same_run(saved, other, directory=HERE)
