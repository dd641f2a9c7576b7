"""What does the death of a rollout replica cost an asynchronous run? Its requests, which are asked for again."""

import os
import signal
from pathlib import Path

import pytest
import tensorboardX  # noqa: F401  (sets an environment variable when it is first imported)

from rpcrl.errors import WorkerLostError
from rpcrl.trainer.asynchronous import SeparateAsyncTrainer
from rpcrl.trainer.observer import Observer
from tests.e2e.jobs import metric_lines, train
from tests.e2e.test_async import B, consumed, ledger

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

JOB = (
    "trainer.mode=separate-async",
    "trainer.v1.separate_async.parameter_sync_step=2",
    "rollout.checkpoint_engine.update_weights_bucket_megabytes=1",
)


def process_of(identity):
    """Return the process id of a worker by its name in the run; None if it is gone."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                variables = (entry / "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            if f"RPCRL_WORKER_ID={identity}".encode() in variables and f"{os.getpid()}" in parents_of(entry):
                return int(entry.name)
    return None


def parents_of(entry):
    """Yield the ids of the processes above one, so that only workers of this test's process are found."""
    found = []
    while entry.name not in ("0", "1"):
        try:
            entry = Path("/proc") / (entry / "stat").read_text().rpartition(")")[2].split()[1]
        except OSError:
            break
        found.append(entry.name)
    return found


class Killer(Observer):
    """Ends a replica each time that (step, phase) is one of ``moments``; the replicas in turn."""

    def __init__(self, moments):
        self.moments = set(moments)
        self.job = None
        self.killed = []

    def on_phase(self, step, phase):
        if (step, phase) not in self.moments:
            return
        self.moments.discard((step, phase))
        groups = self.job.groups.rollout.groups()
        if groups:
            identity = groups[len(self.killed) % len(groups)].identities[0]
            pid = process_of(identity)
            if pid is not None:
                os.kill(pid, signal.SIGKILL)
                self.killed.append(identity)


def killed_run(run_dir, moments, *overrides, steps):
    killer = Killer(moments)

    class Watched(SeparateAsyncTrainer):
        def on_train_begin(self):
            killer.job = self
            super().on_train_begin()

    job = train(run_dir, *JOB, f"trainer.total_training_steps={steps}", *overrides, trainer=Watched, observer=killer)
    assert [line["step"] for line in metric_lines(run_dir)] == list(range(1, steps + 1))
    assert sorted(consumed(run_dir)) == sorted(f"0-{number}" for number in range(steps * B)), "none lost, none twice"
    assert all(line["dropped"] == [] for line in ledger(run_dir)), "the requests of a lost replica are issued again"
    for line in metric_lines(run_dir):
        assert line["training/off_policy/trajectory_staleness_worst/max"] <= 1
    return job, killer


def test_the_only_replica_is_killed_in_a_weight_sync_and_started_again_with_current_weights(tmp_path):
    job, killer = killed_run(tmp_path / "run", [(2, "update_weights")], steps=3)
    assert len(killer.killed) == 1
    assert job.groups.rollout.num_lost == 1
    assert job.weight_version == 3
    assert killer.killed[0] not in {name for group in job.groups.rollout.groups() for name in group.identities}


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["gen", "reward", "update_actor", "update_weights", "testing"])
@pytest.mark.parametrize("replicas", [1, 2])
def test_a_replica_is_killed_in_any_phase(tmp_path, phase, replicas):
    size = f"rollout.n_gpus_per_node={replicas}"
    _, killer = killed_run(tmp_path / "run", [(2, phase)], size, "trainer.test_freq=2", steps=4)
    assert len(killer.killed) == 1


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_twenty_kills_in_one_run(tmp_path):
    phases = ("gen", "update_actor", "reward", "update_weights")
    moments = [(step, phases[step % 4]) for step in range(2, 60, 2)]
    job, killer = killed_run(tmp_path / "run", moments, "rollout.n_gpus_per_node=2", steps=60)
    assert len(killer.killed) >= 20, killer.killed
    assert job.groups.rollout.num_lost >= 20


@pytest.mark.slow
def test_a_replica_that_never_does_a_task_ends_the_run_in_the_end(tmp_path, monkeypatch):
    from rpcrl.trainer import replicas

    monkeypatch.setattr(replicas, "MOST_DEATHS", 1)
    killer = Killer([])

    class Deadly(SeparateAsyncTrainer):
        def _sync_weights(self, version):
            super()._sync_weights(version)
            if version >= 1:
                for group in self.groups.rollout.groups():
                    os.kill(process_of(group.identities[0]), signal.SIGKILL)

        def on_train_begin(self):
            self.groups.rollout.served = lambda name: None
            super().on_train_begin()

    with pytest.raises(WorkerLostError, match="SIGKILL"):
        train(tmp_path / "run", *JOB, "trainer.total_training_steps=6", trainer=Deadly, observer=killer)
