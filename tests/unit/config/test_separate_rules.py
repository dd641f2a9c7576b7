"""What must hold so that the rollout can have a pool of its own, and how is it told?"""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from rpcrl.cli.main import cli
from rpcrl.config.account import account
from rpcrl.config.launch_rules import version_checks
from rpcrl.config.load import load, read, to_yaml
from rpcrl.errors import Violation

ROLLOUT = "actor_rollout_ref.rollout"
BACKEND = f"{ROLLOUT}.checkpoint_engine.backend"


def _found(*overrides: str, mode: str = "separate", launch: bool = False) -> dict[str, Violation]:
    also = (version_checks,) if launch else ()
    return {violation.key: violation for violation in read(None, overrides, mode, also=also).violations}


def test_without_settings_each_pool_has_one_device_and_weights_cross_by_broadcast() -> None:
    config = load(None, (), "separate", also=(version_checks,))
    figures = account(config)
    pools = {pool.name: (pool.process_on_nodes, pool.gpus, pool.roles) for pool in figures.pools}
    assert pools["global_pool"] == ((1,), 1, ("actor",))
    assert pools["rollout_pool"] == ((1,), 1, ("rollout",))
    assert (figures.replicas, figures.gpus) == (1, 2)
    assert (figures.weight_syncs.per_step, figures.weight_syncs.where) == (1, "cross pool")
    assert config.actor_rollout_ref.rollout.checkpoint_engine.backend == "broadcast"


def test_what_is_set_wins_over_the_modes_own_defaults_and_a_written_configuration_reads_back() -> None:
    config = load(None, ("trainer.n_gpus_per_node=2", "rollout.n_gpus_per_node=4"), "separate")
    assert (config.trainer.n_gpus_per_node, config.actor_rollout_ref.rollout.n_gpus_per_node) == (2, 4)
    assert "mode: separate" in to_yaml(config)
    assert load(None, (), "colocate").trainer.n_gpus_per_node == 2


def test_all_mistakes_of_the_pools_come_together_with_numbers_and_remedies() -> None:
    found = _found("rollout.nnodes=0", "rollout.n_gpus_per_node=0", "rollout.checkpoint_engine.backend=naive")
    assert list(found) == [f"{ROLLOUT}.nnodes", f"{ROLLOUT}.n_gpus_per_node", BACKEND]
    assert "nnodes x n_gpus_per_node = 0 x 0 devices, so rollout.nnodes must be > 0, not 0" in str(
        found[f"{ROLLOUT}.nnodes"]
    )
    assert "rollout.n_gpus_per_node must be > 0, not 0" in str(found[f"{ROLLOUT}.n_gpus_per_node"])
    assert "naive hands weights over inside one process, but in mode separate there are 2 pools" in str(found[BACKEND])
    assert "set rollout.checkpoint_engine.backend=broadcast" in str(found[BACKEND])
    assert all(len(violation.remedies) >= 2 for violation in found.values())


@pytest.mark.parametrize(
    ("devices", "tp", "problem"),
    [
        (1, 2, "1 rollout devices % (TP 2 x DP 1 x PP 1 = 2) = 1: 0 replicas leave 1 devices over"),
        (5, 2, "5 rollout devices % (TP 2 x DP 1 x PP 1 = 2) = 1: 2 replicas leave 1 devices over"),
    ],
)
def test_replicas_are_one_or_more_and_leave_no_device_over(devices: int, tp: int, problem: str) -> None:
    settings = (f"rollout.n_gpus_per_node={devices}", f"rollout.tensor_model_parallel_size={tp}")
    found = _found(*settings)
    assert problem in found[f"{ROLLOUT}.tensor_model_parallel_size"].problem
    assert "rollout.nnodes x rollout.n_gpus_per_node" in found[f"{ROLLOUT}.tensor_model_parallel_size"].remedies[-1]


def test_the_trainers_rules_count_the_trainers_devices_only() -> None:
    assert not _found("trainer.n_gpus_per_node=4", "rollout.n_gpus_per_node=3")
    found = _found("trainer.n_gpus_per_node=3", "rollout.n_gpus_per_node=4")
    assert "8 x 8 = 64 samples % 3 data-parallel ranks" in next(iter(found.values())).problem


def test_a_channel_of_a_users_own_is_for_two_pools() -> None:
    own = "rollout.checkpoint_engine.backend=my_module:Channel"
    assert not _found(own, launch=True)
    assert "between 2 pools, and in mode colocate there is 1" in _found(own, mode="colocate")[BACKEND].problem
    assert "no module:Class" in _found("rollout.checkpoint_engine.backend=pigeon")[BACKEND].problem


def test_nccl_needs_a_device_for_each_of_its_ranks() -> None:
    settings = ("rollout.checkpoint_engine.backend=nccl", "rollout.n_gpus_per_node=2")
    found = _found(*settings, launch=True)
    assert "one for each of its 3 ranks" in found[BACKEND].problem
    assert "backend=broadcast" in found[BACKEND].remedies[0]
    assert not _found(*settings, "trainer.device=cuda", launch=True)


def test_two_nccl_ranks_never_share_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    dry = ["launch", "--mode", "separate", "--dry-run", "trainer.device=cuda"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5")
    refused = CliRunner().invoke(cli, dry)
    assert refused.exit_code == 2
    assert "1 of 2 workers (1 of the trainer and 1 of the rollout) get no device of their own" in refused.stderr
    assert "trainer.n_gpus_per_node + rollout.n_gpus_per_node" in refused.stderr
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,3,9")
    planned = CliRunner().invoke(cli, [*dry, "rollout.n_gpus_per_node=2"])
    assert planned.exit_code == 0, planned.output
    seats = [line.strip() for line in planned.stdout.splitlines() if ", device " in line]
    assert [(seat.split()[0], seat.rpartition(" ")[2]) for seat in seats] == [
        ("trainer.rank0", "5"),
        ("rollout.rank0", "3"),
        ("rollout.rank1", "9"),
    ]


@pytest.mark.parametrize(
    ("setting", "part"),
    [
        ("rollout.nnodes=2", "2 nodes of the rollout are accounted"),
        ("rollout.free_cache_engine=false", "in the separate modes they share none"),
        ("rollout.name=sglang", "this version samples with the engines torch and vllm"),
    ],
)
def test_what_this_version_does_not_run_in_mode_separate_is_refused(setting: str, part: str) -> None:
    found = _found(setting, launch=True)
    assert len(found) == 1
    assert part in str(*found.values())


def test_plan_shows_both_pools() -> None:
    shown = CliRunner().invoke(cli, ["plan", "--mode", "separate", "rollout.n_gpus_per_node=2"])
    assert shown.exit_code == 0
    assert "trainer 1 + rollout 2, cpu" in shown.stdout
    assert "global_pool      1 processes, 1 devices: actor" in shown.stdout
    assert "rollout_pool     2 processes, 2 devices: rollout" in shown.stdout
    assert "launch in this version refuses" not in shown.stdout
