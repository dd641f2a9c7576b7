"""``rpcrl launch --dry-run`` prints what the launcher would start, and devices that are not there are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from rpcrl.cli.main import cli
from rpcrl.cli.processes import layout, planned
from rpcrl.config.load import load
from rpcrl.testing.tiny_model import write_tiny_classifier


def _dry_run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["launch", "--dry-run", *arguments])


def test_every_process_is_named_with_rank_device_environment_and_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = _dry_run("trainer.n_gpus_per_node=4", "trainer.threads_per_worker=2", "reward.num_workers=2")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    for rank in range(4):
        assert any(f"trainer.rank{rank} " in line and f"local rank {rank}, device virtual" in line for line in lines)
    assert sum("reward; node 0" in line and "no device" in line for line in lines) == 2
    assert any("RANK=3" in line and "WORLD_SIZE=4" in line and "OMP_NUM_THREADS=2" in line for line in lines)
    assert any("RANK=1" in line and "WORLD_SIZE=2" in line and "OMP_NUM_THREADS=1" in line for line in lines)
    assert sum(" -P -m launcher.shim rpcrl.runtime.worker_main" in line for line in lines) == 6
    assert any("ipc://" in line and "mode 0700" in line for line in lines)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_named_launcher_in_the_current_directory_is_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "launcher.py").write_text("raise SystemExit('not me')\n")
    monkeypatch.chdir(tmp_path)
    assert len(planned(layout(load(None), device="cpu"))["processes"]) == 3


@pytest.mark.parametrize("command", [("launch", "--dry-run"), ("plan",), ("launch",)])
def test_what_cannot_be_loaded_is_refused_by_every_command_at_once(command: tuple[str, ...]) -> None:
    broken = ("data.train_files=none.jsonl", "model.path=none", "reward.fn=none.py:score")
    result = CliRunner().invoke(cli, [*command, *broken])
    assert result.exit_code == 2
    assert "3 mistakes" in result.stderr
    for part in ("none.jsonl does not exist", "no such folder on this machine", "there is no file"):
        assert part in result.stderr


def test_a_critic_with_a_group_of_its_own_has_processes_of_its_own() -> None:
    shared = _dry_run("algorithm.adv_estimator=gae").stdout
    assert sum("actor+rollout+critic; node 0" in line for line in shared.splitlines()) == 2
    apart = _dry_run("algorithm.adv_estimator=gae", "critic.own_group=true").stdout
    assert sum(" actor+rollout; node 0" in line for line in apart.splitlines()) == 2
    assert sum("critic.rank" in line and " critic; node 0" in line for line in apart.splitlines()) == 2


def test_a_reference_with_a_group_of_its_own_has_processes_of_its_own() -> None:
    shared = _dry_run("actor.use_kl_loss=true").stdout
    assert sum("actor+rollout+ref; node 0" in line for line in shared.splitlines()) == 2
    apart = _dry_run("actor.use_kl_loss=true", "ref.own_group=true").stdout
    assert sum(" actor+rollout; node 0" in line for line in apart.splitlines()) == 2
    assert sum("ref.rank" in line and " ref; node 0" in line for line in apart.splitlines()) == 2


def test_agent_loop_workers_are_groups_of_one_without_a_device() -> None:
    agent = "rollout.agent"
    result = _dry_run(f"{agent}.default_agent_loop=single_turn_agent", f"{agent}.num_workers=2")
    lines = [line for line in result.stdout.splitlines() if "agent_loop_" in line and "; node 0" in line]
    assert [line.split()[0] for line in lines] == ["agent_loop_0.rank0", "agent_loop_1.rank0"]
    assert all("no device" in line for line in lines)
    assert "RUN_DIR/logs/agent_loop_1.rank0.log" in result.stdout


def test_a_reward_model_has_the_devices_behind_the_others(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,3,2")
    model = "reward.reward_model"
    judge = write_tiny_classifier(tmp_path / "judge")
    own = (f"{model}.enable_resource_pool=true", f"{model}.nnodes=1", f"{model}.n_gpus_per_node=1")
    result = _dry_run("trainer.device=cuda", f"{model}.enable=true", f"{model}.model_path={judge}", *own)
    assert result.exit_code == 0, result.stderr
    [line] = [line for line in result.stdout.splitlines() if "reward_model.rank0 " in line and "; node 0" in line]
    assert line.endswith("device 2"), line
    assert "reward.rank0" not in result.stdout, "no function scores beside it"


def test_two_groups_share_the_devices_of_their_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")
    result = _dry_run("algorithm.adv_estimator=gae", "critic.own_group=true", "trainer.device=cuda")
    assert result.exit_code == 0, result.stderr
    for name in ("trainer", "critic"):
        for rank, device in enumerate("31"):
            lines = [line for line in result.stdout.splitlines() if f"{name}.rank{rank} " in line]
            assert any(line.endswith(f"device {device}") for line in lines), lines


def test_logs_have_the_names_that_a_run_gives_them() -> None:
    result = _dry_run()
    assert "RUN_DIR/logs/trainer.rank1.log" in result.stdout
    assert "RUN_DIR/logs/reward.rank0.log" in result.stdout


@pytest.mark.parametrize(
    ("visible", "counted"),
    [("", "0 (none;"), ("-1", "0 (none;"), ("7", "1 (7;"), ("GPU-aaaa", "1 (GPU-aaaa;"), ("3,-1,1", "1 (3;")],
)
def test_p40_cuda_with_fewer_devices_than_workers_is_refused_with_the_list(
    visible: str, counted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    result = _dry_run("trainer.device=cuda")
    assert result.exit_code == 2
    assert "1 mistake" in result.stderr
    assert "of 2 workers get no device of their own" in result.stderr
    assert f"this node has {counted} from CUDA_VISIBLE_DEVICES={visible!r})" in result.stderr
    assert "set trainer.device=cpu" in result.stderr


@pytest.mark.parametrize(
    ("visible", "devices"),
    [("3,1", ["3", "1"]), ("GPU-aaaa,GPU-bbbb", ["GPU-aaaa", "GPU-bbbb"]), ("7", ["virtual device"] * 2)],
)
def test_p40_auto_takes_the_visible_devices_where_there_are_enough(
    visible: str, devices: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    result = _dry_run("trainer.device=auto")
    assert result.exit_code == 0, result.output
    for rank, device in enumerate(devices):
        assert f"local rank {rank}, device {device}\n" in result.stdout


def test_secrets_of_the_caller_are_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_do_not_show_me")
    assert "do_not_show_me" not in _dry_run().output
