"""Is a run that was stopped and resumed the run that was never stopped, bit for bit?"""

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import tensorboardX  # noqa: F401  (sets an environment variable when it is first imported)

from rpcrl.errors import ConfigError, RpcrlError
from rpcrl.trainer.observer import Observer
from tests.e2e.jobs import copy_up_to, metric_lines, train, weights_of, without_times

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

STEPS = 5
# 16 rows and 8 prompts a step: an epoch has two steps, and steps 2 and 4 end one.
JOB = (
    f"trainer.total_training_steps={STEPS}",
    "trainer.save_freq=1",
    "trainer.test_freq=2",
    "data.shuffle=true",
    "actor.strategy=fsdp2",
)


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    from rpcrl.tasks.sort_digits import train_row

    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    path.write_text("".join(json.dumps(train_row(5, index)) + "\n" for index in range(16)))
    return path


@pytest.fixture(scope="module")
def job(rows):
    from rpcrl.tasks.sort_digits import base_checkpoint

    files = (f"data.train_files={rows}", f"data.val_files={rows}", f"model.path={base_checkpoint()}")
    return (*JOB, *files, "reward.fn=rpcrl.tasks.sort_digits:score")


@pytest.fixture(scope="module")
def whole(tmp_path_factory, job):
    run_dir = tmp_path_factory.mktemp("whole") / "run"
    train(run_dir, *job)
    return run_dir


def check(whole, resumed):
    assert weights_of(resumed) == weights_of(whole)
    assert [without_times(line) for line in metric_lines(resumed)] == [
        without_times(line) for line in metric_lines(whole)
    ]
    last = f"checkpoints/global_step_{STEPS}/manifest.json"
    manifests = [json.loads((run / last).read_text()) for run in (whole, resumed)]
    # every file of the last checkpoint (weights, optimizer, random state) has the same bytes
    assert manifests[0]["ranks"] == manifests[1]["ranks"]
    assert manifests[0]["data"] == manifests[1]["data"]


@pytest.mark.parametrize("step", [2, 3])
def test_p98_resumed_at_an_epochs_end_and_in_its_middle(whole, job, tmp_path, step):
    resumed = copy_up_to(whole, step, tmp_path / "run")
    trainer = train(resumed, *job, "trainer.resume=auto")
    assert trainer.start_step == step
    check(whole, resumed)
    summary, original = (json.loads((run / "summary.json").read_text()) for run in (resumed, whole))
    for key in ("steps", "weight_syncs", "tokens", "heldout_accuracy"):
        assert summary[key] == original[key], "the summary covers the part before the stop too"
    assert trainer.run.read_summary()["wall_s"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("step", [1, 2, 3, 4])
def test_p98_resumed_after_every_step(whole, job, tmp_path, step):
    resumed = copy_up_to(whole, step, tmp_path / "run")
    train(resumed, *job, "trainer.resume=auto")
    check(whole, resumed)


def test_a_checkpoint_can_be_named_and_another_directory_filled(whole, job, tmp_path):
    train(tmp_path / "new", *job, f"trainer.resume={whole}/checkpoints/global_step_4")
    assert weights_of(tmp_path / "new") == weights_of(whole)
    assert [line["step"] for line in metric_lines(tmp_path / "new")] == [5]


def test_killed_after_the_last_checkpoint_the_run_is_only_finished(whole, job, tmp_path):
    resumed = copy_up_to(whole, STEPS, tmp_path / "run")
    train(resumed, *job, "trainer.resume=auto")
    check(whole, resumed)
    assert json.loads((resumed / "summary.json").read_text())["steps"] == STEPS


@pytest.mark.parametrize(
    "world", [("trainer.n_gpus_per_node=1",), ("trainer.n_gpus_per_node=4", "actor.strategy=ddp")], ids=str
)
def test_another_number_of_workers_goes_on_from_the_same_weights(whole, job, tmp_path, world):
    resumed = copy_up_to(whole, 4, tmp_path / "run")
    train(resumed, *job, "trainer.resume=auto", *world)
    last, expected = metric_lines(resumed)[-1], metric_lines(whole)[-1]
    assert last["step"] == STEPS
    for name in ("actor/pg_loss", "actor/grad_norm", "critic/score/mean", "actor/lr"):
        assert last[name] == pytest.approx(expected[name], rel=1e-3, abs=1e-6), name


def workers_of(pid):
    """Return the processes below ``pid`` that run rpcrl's workers."""
    found, parents = [], {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    for child in parents:
        above = child
        while above in parents and above != pid:
            above = parents[above]
        with contextlib.suppress(OSError):
            if above == pid and child != pid and "rpcrl" in Path(f"/proc/{child}/cmdline").read_text():
                found.append(child)
    return found


def test_a_disk_that_takes_no_more_leaves_the_last_checkpoint_and_the_run_goes_on_from_it(whole, job, tmp_path):
    class FullAfterStepTwo(Observer):
        limited = 0

        def on_step(self, step, metrics):
            if step == 2:
                # a file may not grow beyond this: the kernel refuses the write as a full disk does
                for worker in workers_of(os.getpid()):
                    resource.prlimit(worker, resource.RLIMIT_FSIZE, (50_000, 50_000))
                    self.limited += 1

    run_dir, full = tmp_path / "run", FullAfterStepTwo()
    with pytest.raises(RpcrlError, match="cannot write the checkpoint shard") as caught:
        train(run_dir, *job, observer=full)
    assert full.limited >= 2
    assert "the earlier checkpoints are as they were" in str(caught.value)
    checkpoints = run_dir / "checkpoints"
    assert (checkpoints / "latest_checkpointed_iteration.txt").read_text() == "2\n"
    assert not (checkpoints / "global_step_3").exists()
    assert train(run_dir, *job, "trainer.resume=auto").start_step == 2
    check(whole, run_dir)


KILLED_IN_A_SAVE = """
import os, signal, sys
from rpcrl.trainer import checkpoint
from tests.e2e.jobs import train

moment, run_dir, *job = sys.argv[1:]
write, publish = checkpoint.write_atomically, checkpoint.CheckpointStore.publish

def killing(self, manifest):
    if manifest.step == 3:
        if moment == "shards written":
            os.kill(os.getpid(), signal.SIGKILL)
        checkpoint.write_atomically = at_pointer
    return publish(self, manifest)

def at_pointer(path, text):
    if path.name.startswith("latest"):
        os.kill(os.getpid(), signal.SIGKILL)
    write(path, text)

checkpoint.CheckpointStore.publish = killing
train(run_dir, *job)
"""


@pytest.mark.parametrize(("moment", "whole_steps"), [("shards written", [1, 2]), ("pointer not moved", [1, 2, 3])])
def test_sigkill_in_a_save_leaves_the_last_checkpoint_whole(whole, job, tmp_path, moment, whole_steps):
    run_dir = tmp_path / "run"
    killed = subprocess.run(
        [sys.executable, "-c", KILLED_IN_A_SAVE, moment, str(run_dir), *job],
        check=False,
        capture_output=True,
        timeout=200,
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()
    checkpoints = run_dir / "checkpoints"
    assert sorted(int(path.name.rpartition("_")[2]) for path in checkpoints.glob("global_step_*")) == whole_steps
    assert any(checkpoints.glob(".global_step_3.partial")) == (moment == "shards written")
    trainer = train(run_dir, *job, "trainer.resume=auto")
    assert trainer.start_step == 2, "the pointer still names step 2"
    check(whole, run_dir)


def test_other_data_is_refused(whole, job, tmp_path):
    resumed = copy_up_to(whole, 2, tmp_path / "run")
    (resumed / "config.yaml").write_text("as: it was\n")
    with pytest.raises(ConfigError, match=r"made with data.seed=null, this command has data.seed=9"):
        train(resumed, *job, "trainer.resume=auto", "data.seed=9")
    assert (resumed / "config.yaml").read_text() == "as: it was\n"


def test_a_run_without_a_checkpoint_begins_again_and_says_so(job, tmp_path):
    class Ear(Observer):
        said = ""

        def on_status(self, text):
            self.said += f"{text}\n"

    run_dir, ear = tmp_path / "run", Ear()
    for part in ("checkpoints", "logs"):
        (run_dir / part).mkdir(parents=True)
    (run_dir / "metrics.jsonl").write_text('{"step": 0, "old": 1}\n{"step": 1, "old": 1}\n')
    train(run_dir, *job, "trainer.resume=auto", "trainer.total_training_steps=1", observer=ear)
    assert f"no checkpoint in {run_dir}: starting at step 1\n" in ear.said
    assert [line["step"] for line in metric_lines(run_dir)] == [1]
    assert "old" not in metric_lines(run_dir)[0]


def test_a_damaged_shard_is_refused_and_named(whole, job, tmp_path):
    resumed = copy_up_to(whole, 2, tmp_path / "run")
    shard = next((resumed / "checkpoints/global_step_2/actor/rank_1").glob("*.safetensors"))
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    with pytest.raises(Exception, match=rf"actor/rank_1/{shard.name} has SHA-256"):
        train(resumed, *job, "trainer.resume=auto")


def test_resume_without_a_directory_says_what_is_missing(job):
    with pytest.raises(
        ConfigError, match="auto goes on with the run in the run directory, and no run directory is named"
    ):
        train(None, *job, "trainer.resume=auto")
