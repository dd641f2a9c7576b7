"""Does the default job run with vLLM rollouts in its worker processes?"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tensorboardX  # noqa: F401  (sets an environment variable when it is first imported)

from rpcrl import env
from rpcrl.cli.view import summary_lines
from rpcrl.config.load import load
from rpcrl.trainer.colocate import ColocateTrainer
from rpcrl.trainer.separate import SeparateTrainer
from tests.e2e.jobs import configure, metric_lines, train
from tests.e2e.test_learning import DATA_VARIABLE, MODEL_VARIABLE

pytestmark = [pytest.mark.vllm, pytest.mark.cluster, pytest.mark.timeout(300)]


def test_a_short_job_samples_with_vllm_what_its_trainer_scores(tmp_path):
    """Two workers with actor and rollout each; the old log-probs are recomputed, so both models are compared."""
    train(tmp_path / "run", "rollout.name=vllm", "algorithm.recompute_old_log_prob=true")
    lines = [line for line in metric_lines(tmp_path / "run") if line["step"] > 0]
    assert [line["step"] for line in lines] == [1, 2, 3]
    for line in lines:
        assert line["training/rollout_probs_diff_max"] < 1e-4, line
        assert line["actor/grad_norm"] > 0
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    account = summary["rollout_engine"]
    assert account["engine"] == "vllm"
    assert account["start_s"] > 0
    assert account["kv_cache_bytes"] == 256 * 2**20
    assert account["sleep_frees_memory"] is False
    assert any("frees no memory while it sleeps" in text for text in summary_lines(summary, None))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_three_paired_seeds_end_where_torch_ends(tmp_path):
    gaps = []
    for seed in (0, 1, 2):
        ends = {}
        for name in ("torch", "vllm"):
            job = ColocateTrainer(
                configure(f"trainer.seed={seed}", f"rollout.name={name}", "trainer.test_freq=-1"),
                run_dir=tmp_path / f"{name}{seed}",
            )
            ends[name] = job.fit()["heldout_accuracy"]["end"]
        gaps.append(abs(ends["vllm"] - ends["torch"]))
    assert max(gaps) <= 0.03, gaps


def test_a_rollout_in_processes_of_its_own_takes_weights_over_the_channel(tmp_path):
    """No trainer and no process group beside vLLM here; the canary goes by calls."""
    train(
        tmp_path / "run",
        "trainer.mode=separate",
        "rollout.name=vllm",
        "algorithm.recompute_old_log_prob=true",
        trainer=SeparateTrainer,
    )
    lines = [line for line in metric_lines(tmp_path / "run") if line["step"] > 0]
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert all(line["training/rollout_probs_diff_max"] < 1e-4 for line in lines)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_two_real_steps_on_gsm8k(tmp_path):
    model, data = env.get(MODEL_VARIABLE), env.get(DATA_VARIABLE)
    if model is None or data is None:
        pytest.skip(f"set {MODEL_VARIABLE} to a SmolLM2 folder and {DATA_VARIABLE} to a GSM8K folder")
    example = Path(__file__).parents[2] / "examples" / "gsm8k_smollm2.yaml"
    overrides = [
        f"model.path={model}",
        f"data.train_files=gsm8k:{Path(data) / 'train.jsonl'}",
        f"data.val_files=gsm8k:{Path(data) / 'test.jsonl'}",
        "rollout.name=vllm",
        "algorithm.recompute_old_log_prob=true",
        "trainer.total_training_steps=2",
    ]
    summary = ColocateTrainer(load(example, overrides, "colocate"), run_dir=tmp_path / "run").fit()
    assert summary["steps"] == 2
    lines = [line for line in metric_lines(tmp_path / "run") if line["step"] > 0]
    assert all(line["response_length/mean"] > 1 for line in lines)
    assert all(line["training/rollout_probs_diff_max"] < 1e-3 for line in lines), "float32 on both sides"
