"""Do the asynchronous modes take the steps of the others, keep samples young, and give each prompt one end?"""

import json
import signal
import subprocess
import sys

import pytest
import tensorboardX  # noqa: F401  (sets an environment variable when it is first imported)

from rpcrl.trainer import steps
from rpcrl.trainer.asynchronous import ColocateAsyncTrainer, SeparateAsyncTrainer
from rpcrl.trainer.colocate import ColocateTrainer
from tests.e2e.jobs import copy_up_to, metric_lines, train

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

COLOCATE = ("trainer.mode=colocate-async",)
SEPARATE = (
    "trainer.mode=separate-async",
    "trainer.v1.separate_async.parameter_sync_step=2",
    "rollout.checkpoint_engine.update_weights_bucket_megabytes=1",
)
MODES = {"colocate-async": (ColocateAsyncTrainer, COLOCATE), "separate-async": (SeparateAsyncTrainer, SEPARATE)}
STEPS = ("generate", "reward", "old_log_prob", "rollout_correction", "ref_log_prob", "advantage", "update_actor",
         "update_weights")  # fmt: skip
B, M, N = 8, 4, 4
"""Sizes of the short job."""


def ledger(run_dir):
    return [json.loads(line) for line in (run_dir / "ledger.jsonl").read_text().splitlines()]


def consumed(run_dir):
    return [uid for line in ledger(run_dir) for uid in line["consumed"]]


def test_modes_differ_in_hooks_only():
    for trainer in (ColocateAsyncTrainer, SeparateAsyncTrainer):
        for name in ("score", "reward", "update_critic", "update_actor", "validate", "_one_part", "_sync_weights"):
            assert getattr(trainer, name) is getattr(ColocateTrainer, name), name


@pytest.fixture(scope="module", params=MODES)
def whole(request, tmp_path_factory):
    """A run of four steps with everything on that a mode may do between two steps, and the trace of its calls."""
    trainer, mode = MODES[request.param]
    run_dir = tmp_path_factory.mktemp(request.param) / "run"
    trace, patch = [], pytest.MonkeyPatch()
    for name in STEPS:
        original = getattr(steps, name)

        def noted(*args, _name=name, _original=original, **kwargs):
            trace.append((_name, _original))
            return _original(*args, **kwargs)

        patch.setattr(steps, name, noted)
    more = ("actor.use_kl_loss=true", "trainer.total_training_steps=4", "trainer.save_freq=1", "trainer.test_freq=2")
    try:
        job = train(run_dir, *mode, *more, trainer=trainer)
    finally:
        patch.undo()
    return request.param, run_dir, job, trace, (*mode, *more)


def test_the_trace_is_the_modes_step_order(whole):
    mode, _, _, trace, _ = whole
    parts = 2 if mode == "separate-async" else 1
    part = ["reward", "old_log_prob", "ref_log_prob", "advantage", "update_actor"]
    step, validation = [*part * parts, "update_weights"], ["generate", "reward"]
    names = [name for name, _ in trace]
    assert names == ["update_weights", *step, *step, *validation, *step, *step, *validation]
    for name, function in trace:
        assert function is getattr(steps, name), "the same objects as in the other modes"


def test_samples_are_as_young_as_promised_and_updates_are_as_many_as_planned(whole):
    mode, run_dir, job, _, _ = whole
    lines = metric_lines(run_dir)
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    for line in lines:
        assert line["training/off_policy/trajectory_staleness_worst/max"] <= 1
        assert line["training/off_policy/trajectory_staleness/min"] >= 0
        assert line["actor/num_updates"] == B / M
        assert line["perf/total_num_tokens"] > 0
    if mode == "separate-async":
        # a batch was submitted a step before it is trained on, so a version old it is begun
        assert lines[-1]["training/off_policy/trajectory_staleness_worst/max"] == 1
    assert job.weight_version == 4
    assert "heldout/accuracy" in lines[1]
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["mode"] == mode
    assert summary["weight_syncs"] == 4


def test_each_prompt_is_trained_on_once_and_none_is_left(whole):
    _, run_dir, job, _, _ = whole
    assert sorted(consumed(run_dir)) == sorted(f"0-{number}" for number in range(4 * B))
    assert [line["weight_version"] for line in ledger(run_dir)] == [0, 1, 2, 3]
    assert job.sampler.unfinished() == []
    manifest = json.loads((run_dir / "checkpoints" / "global_step_2" / "manifest.json").read_text())
    before = [uid for line in ledger(run_dir)[:2] for uid in line["consumed"]]
    # the batch of step 3 is in flight while step 2 is saved
    assert set(manifest["unfinished_prompts"]) == {f"0-{number}" for number in range(3 * B)} - set(before)


@pytest.mark.parametrize("step", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_p98_a_resumed_run_goes_on_with_the_prompts_that_were_in_flight(whole, tmp_path, step):
    mode, run_dir, _, _, overrides = whole
    resumed = copy_up_to(run_dir, step, tmp_path / "run")
    (resumed / "ledger.jsonl").write_text((run_dir / "ledger.jsonl").read_text())
    job = train(resumed, *overrides, "trainer.resume=auto", trainer=MODES[mode][0])
    assert job.start_step == step
    assert [line["step"] for line in ledger(resumed)] == [1, 2, 3, 4]
    assert sorted(consumed(resumed)) == sorted(f"0-{number}" for number in range(4 * B))
    assert job.weight_version == 4
    assert [line["step"] for line in metric_lines(resumed)] == [1, 2, 3, 4]


def test_without_staleness_the_old_log_probs_are_the_samplers_in_every_part(tmp_path):
    """π_old is recomputed under the weights that the step began with: those that sampled, if nothing is in flight."""
    job = ("trainer.max_staleness=0", "trainer.v1.separate_async.num_warmup_batches=0", "actor.optim.lr=0.005",
           "algorithm.recompute_old_log_prob=true", "algorithm.rollout_correction.rollout_is=token",
           "actor.optim.lr_warmup_steps=0", "trainer.total_training_steps=2")  # fmt: skip
    train(tmp_path / "run", *SEPARATE, *job, trainer=SeparateAsyncTrainer)
    for line in metric_lines(tmp_path / "run"):
        assert line["training/off_policy/trajectory_staleness_worst/max"] == 0
        assert line["training/rollout_probs_diff_max"] < 1e-4
        assert line["rollout_corr/rollout_is_max"] == pytest.approx(1.0, abs=1e-3)
        assert line["rollout_corr/kl"] == pytest.approx(0.0, abs=1e-4)
    # and they do differ where the weights have moved: without restoring them the second part would show it
    assert metric_lines(tmp_path / "run")[0]["actor/grad_norm"] > 0


@pytest.mark.slow
def test_a_critic_learns_beside_the_actor_and_stale_samples_are_corrected(tmp_path):
    job = ("algorithm.adv_estimator=gae", "data.train_batch_size=32", "actor.ppo_mini_batch_size=16", "rollout.n=1",
           "algorithm.recompute_old_log_prob=true", "algorithm.rollout_correction.rollout_is=sequence",
           "algorithm.rollout_correction.rollout_is_threshold=0.5_2.0")  # fmt: skip
    train(tmp_path / "run", *SEPARATE, *job, trainer=SeparateAsyncTrainer)
    last = metric_lines(tmp_path / "run")[-1]
    assert last["critic/num_updates"] == 2
    assert last["training/off_policy/trajectory_staleness_worst/max"] == 1
    assert 0 < last["rollout_corr/rollout_is_mean"] < 2


KILLED = """
import os, signal, sys
from rpcrl.trainer.observer import Observer
from tests.e2e.jobs import train
from tests.e2e.test_async import MODES

mode, step, phase, run_dir, *job = sys.argv[1:]

class Killing(Observer):
    def on_phase(self, at, name):
        if at == int(step) and name == phase:
            os.kill(os.getpid(), signal.SIGKILL)

train(run_dir, *job, trainer=MODES[mode][0], observer=Killing())
"""


def killed_and_resumed(mode, step, phase, run_dir):
    trainer, overrides = MODES[mode]
    job = (*overrides, "trainer.total_training_steps=4", "trainer.save_freq=1")
    done = subprocess.run([sys.executable, "-c", KILLED, mode, str(step), phase, str(run_dir), *job], check=False)
    assert done.returncode == -signal.SIGKILL
    resumed = train(run_dir, *job, "trainer.resume=auto", trainer=trainer)
    assert 0 < resumed.start_step < 4
    assert sorted(consumed(run_dir)) == sorted(f"0-{number}" for number in range(4 * B))
    assert [line["step"] for line in ledger(run_dir)] == [1, 2, 3, 4]


@pytest.mark.slow
def test_p92_killed_in_a_step_each_prompt_is_trained_on_once_in_the_lineage_that_survives(tmp_path):
    killed_and_resumed("separate-async", 3, "update_actor", tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("phase", ["gen", "reward", "update_actor", "update_weights", "save_checkpoint"])
def test_p92_killed_in_any_phase(mode, phase, tmp_path):
    killed_and_resumed(mode, 3, phase, tmp_path / "run")
