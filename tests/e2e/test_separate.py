"""Is a run on two pools the run on one? The same steps, the same weights."""

import json

import pytest
import tensorboardX  # noqa: F401  (sets an environment variable when it is first imported)

from rpcrl.trainer import steps
from rpcrl.trainer.colocate import ColocateTrainer
from rpcrl.trainer.separate import SeparateTrainer
from tests.e2e.jobs import copy_up_to, metric_lines, train, weights_of

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

SEPARATE = (
    "trainer.mode=separate",
    "rollout.nnodes=1",
    "rollout.checkpoint_engine.backend=broadcast",
    "rollout.checkpoint_engine.update_weights_bucket_megabytes=1",
)
JOB = ("actor.entropy_coeff=0.1",)
"""Without the entropy the first loss is 0."""


def sizes(trainers, rollouts):
    return (f"trainer.n_gpus_per_node={trainers}", f"rollout.n_gpus_per_node={rollouts}")


def test_modes_differ_in_hooks_only():
    hooks = {"mode", "after_sampling"}
    own = {name for name in vars(SeparateTrainer) if not name.startswith(("__", "_abc_"))}
    assert own == hooks
    for name in ("step", "sample", "score", "reward", "update_critic", "update_actor", "validate", "sync_weights"):
        assert getattr(SeparateTrainer, name) is getattr(ColocateTrainer, name), name


def recorded(monkeypatch, run_dir, *overrides, trainer):
    """Run one step and return the names of the steps in their order, and the functions that ran."""
    ran = []
    for name in ("generate", "reward", "old_log_prob", "ref_log_prob", "advantage", "update_actor", "update_weights"):
        original = getattr(steps, name)

        def noted(*args, _name=name, _original=original, **kwargs):
            ran.append((_name, _original))
            return _original(*args, **kwargs)

        monkeypatch.setattr(steps, name, noted)
    train(run_dir, "trainer.total_training_steps=1", *overrides, trainer=trainer)
    monkeypatch.undo()
    return ran


def test_both_modes_run_the_same_step_functions_in_the_same_order(monkeypatch, tmp_path):
    kl = "actor.use_kl_loss=true"
    one = recorded(monkeypatch, tmp_path / "one", kl, "trainer.n_gpus_per_node=1", trainer=ColocateTrainer)
    two = recorded(monkeypatch, tmp_path / "two", kl, *SEPARATE, *sizes(1, 1), trainer=SeparateTrainer)
    assert one == two
    order = ["update_weights", "generate", "reward", "old_log_prob", "ref_log_prob", "advantage", "update_actor"]
    assert [name for name, _ in two] == [*order, "update_weights", "generate", "reward"], "the last is a validation"


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Two ranks in each pool; with validation and a checkpoint at each step."""
    run_dir = tmp_path_factory.mktemp("separate") / "run"
    more = ("trainer.test_freq=2", "trainer.save_freq=1")
    return run_dir, train(run_dir, *JOB, *SEPARATE, *sizes(2, 2), *more, trainer=SeparateTrainer)


def test_weights_are_colocates_bit_for_bit(whole, tmp_path):
    run_dir, job = whole
    train(tmp_path / "colocate", *JOB, "trainer.n_gpus_per_node=2")
    assert weights_of(run_dir) == weights_of(tmp_path / "colocate")
    assert set(job.groups.by_role()) == {"actor", "rollout", "reward"}


def test_validation_and_versions(whole):
    run_dir, job = whole
    lines = {line["training/global_step"]: line for line in metric_lines(run_dir)}
    assert [step for step, line in lines.items() if any(name.startswith("val") for name in line)] == [2.0, 3.0]
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["mode"] == "separate"
    assert summary["weight_syncs"] == 3
    assert job.weight_version == 3


def test_a_resumed_run_is_the_run_that_was_never_stopped(whole, tmp_path):
    run_dir, _ = whole
    more = ("trainer.test_freq=2", "trainer.save_freq=1", "trainer.resume=auto")
    resumed = copy_up_to(run_dir, 1, tmp_path / "run")
    job = train(resumed, *JOB, *SEPARATE, *sizes(2, 2), *more, trainer=SeparateTrainer)
    assert job.start_step == 1
    assert weights_of(resumed) == weights_of(run_dir)


def test_other_numbers_of_ranks_agree_in_the_first_updates_loss(tmp_path):
    train(tmp_path / "run", *JOB, *SEPARATE, *sizes(1, 2), "actor.ppo_micro_batch_size_per_gpu=4",
          "actor.ppo_mini_batch_size=8", "trainer.total_training_steps=1", trainer=SeparateTrainer)  # fmt: skip
    train(tmp_path / "colocate", *JOB, "trainer.n_gpus_per_node=2", "actor.ppo_mini_batch_size=8",
          "trainer.total_training_steps=1")  # fmt: skip
    one, other = (metric_lines(tmp_path / name)[0]["actor/loss"] for name in ("run", "colocate"))
    assert abs(other) > 1e-3, "a loss of nothing would agree with anything"
    assert one == pytest.approx(other, rel=1e-5)
