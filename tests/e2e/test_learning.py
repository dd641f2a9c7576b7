"""Does the default job learn, from the reward and from nothing else?"""

import json
import statistics
from pathlib import Path

import pytest
import tensorboardX  # noqa: F401  (sets an environment variable when it is first imported)

from rpcrl import env
from rpcrl.config.load import load
from rpcrl.trainer.colocate import ColocateTrainer
from rpcrl.trainer.modes import trainer_of
from tests.e2e.jobs import configure, metric_lines

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1200)]

MODEL_VARIABLE = "RPCRL_SMOLLM2"
"""Names a folder that ``python -m rpcrl.tasks.smollm2 DIR`` made."""
DATA_VARIABLE = "RPCRL_GSM8K"
"""Names a folder with GSM8K's train.jsonl and test.jsonl."""


def run(run_dir, *overrides):
    job = ColocateTrainer(configure(*overrides), run_dir=run_dir)
    return job.fit()


def test_the_swapped_reward_teaches_the_swapped_meaning(tmp_path):
    summary = run(tmp_path / "run", "reward.fn=rpcrl.tasks.sort_digits:score_swapped", "trainer.test_freq=-1")
    assert summary["heldout_accuracy"]["start"] == pytest.approx(0.5, abs=0.06)
    assert summary["heldout_accuracy"]["end"] >= 0.9, "measured by the swapped meaning"
    rewards = [line["critic/score/mean"] for line in metric_lines(tmp_path / "run")[1:]]
    assert statistics.mean(rewards[-10:]) > statistics.mean(rewards[:10]) + 0.3


@pytest.mark.slow
def test_three_seeds_reach_the_bars(tmp_path):
    ends = []
    for seed in (0, 1, 2):
        accuracy = run(tmp_path / f"seed{seed}", f"trainer.seed={seed}")["heldout_accuracy"]
        assert accuracy["start"] == pytest.approx(0.5, abs=0.06)
        ends.append(accuracy["end"])
    assert min(ends) >= 0.93, ends
    assert statistics.mean(ends) >= 0.96, ends


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["colocate-async", "separate-async"])
def test_three_seeds_reach_the_bar_of_samples_one_version_old(tmp_path, mode):
    ends = []
    for seed in (0, 1, 2):
        config = load(None, [f"trainer.seed={seed}"], mode)
        summary = trainer_of(mode)(config, run_dir=tmp_path / f"seed{seed}").fit()
        assert summary["heldout_accuracy"]["start"] == pytest.approx(0.5, abs=0.06)
        ends.append(summary["heldout_accuracy"]["end"])
    assert min(ends) >= 0.90, ends


@pytest.mark.slow
def test_a_shuffled_reward_destroys_the_policy(tmp_path):
    summary = run(
        tmp_path / "run",
        "reward.fn=rpcrl.rewards.controls:shuffled",
        "reward.reward_kwargs={of: 'rpcrl.tasks.sort_digits:score'}",
        "trainer.total_training_steps=150",
    )
    assert summary["heldout_accuracy"]["end"] < 0.1


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_three_real_steps_on_gsm8k(tmp_path):
    model, data = env.get(MODEL_VARIABLE), env.get(DATA_VARIABLE)
    if model is None or data is None:
        pytest.skip(f"set {MODEL_VARIABLE} to a SmolLM2 folder and {DATA_VARIABLE} to a GSM8K folder")
    example = Path(__file__).parents[2] / "examples" / "gsm8k_smollm2.yaml"
    overrides = [
        f"model.path={model}",
        f"data.train_files=gsm8k:{Path(data) / 'train.jsonl'}",
        f"data.val_files=gsm8k:{Path(data) / 'test.jsonl'}",
    ]
    summary = ColocateTrainer(load(example, overrides, "colocate"), run_dir=tmp_path / "run").fit()
    assert summary["steps"] == 3
    lines = [line for line in metric_lines(tmp_path / "run") if line["step"] > 0]
    assert all(line["actor/grad_norm"] >= 0 and line["response_length/mean"] > 1 for line in lines)
    rows = [json.loads(text) for text in (tmp_path / "run/samples/step_3.jsonl").read_text().splitlines()]
    assert all(len(row["response_text"]) > 0 for row in rows)
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "run/hf")
    assert loaded.num_parameters() > 100e6
