"""The GSM8K example is a configuration that loads and means what its comment says."""

from __future__ import annotations

from pathlib import Path

from rpcrl.config.load import load

EXAMPLE = Path(__file__).parents[3] / "examples" / "gsm8k_smollm2.yaml"


def test_the_example_is_three_steps_of_four_prompts_four_samples_and_96_tokens() -> None:
    config = load(EXAMPLE, [], "colocate")
    assert config.trainer.total_training_steps == 3
    assert config.data.train_batch_size == 4
    assert config.actor_rollout_ref.rollout.n == 4
    assert config.data.max_response_length == 96
    assert config.data.train_files == "gsm8k:../shared/data/gsm8k/train.jsonl"
    assert config.reward.fn == "rpcrl.tasks.gsm8k:score"


def test_paths_are_given_on_the_command_line() -> None:
    config = load(EXAMPLE, ["model.path=/m", "data.train_files=gsm8k:/d/train.jsonl"], "colocate")
    assert config.actor_rollout_ref.model.path == "/m"
    assert config.data.train_files == "gsm8k:/d/train.jsonl"
