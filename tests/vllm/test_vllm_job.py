"""Does the default job run with vLLM rollouts in its worker processes?"""

from __future__ import annotations

import statistics

import pytest
import tensorboardX  # noqa: F401  (sets an environment variable when it is first imported)

from tests.e2e.jobs import configure, metric_lines, train

pytestmark = [pytest.mark.vllm, pytest.mark.cluster, pytest.mark.timeout(300)]


def test_a_short_job_samples_with_vllm_what_its_trainer_scores(tmp_path):
    """Two workers with actor and rollout each; the old log-probs are recomputed, so both models are compared."""
    train(tmp_path / "run", "rollout.name=vllm", "algorithm.recompute_old_log_prob=true")
    lines = [line for line in metric_lines(tmp_path / "run") if line["step"] > 0]
    assert [line["step"] for line in lines] == [1, 2, 3]
    for line in lines:
        assert line["training/rollout_probs_diff_max"] < 1e-4, line
        assert line["actor/grad_norm"] > 0


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_three_paired_seeds_end_where_torch_ends(tmp_path):
    from rpcrl.trainer.colocate import ColocateTrainer

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
    assert statistics.mean(gaps) <= 0.03


def test_a_rollout_in_processes_of_its_own_takes_weights_over_the_channel(tmp_path):
    """No trainer and no process group beside vLLM here; the canary goes by calls."""
    from rpcrl.trainer.separate import SeparateTrainer

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
