"""``rpcrl plan``: the figures of the article, the frozen JSON, and refusal with exit code 2."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from rpcrl.cli.main import cli

COLOCATE = (
    "data.train_batch_size=1024",
    "actor_rollout_ref.actor.ppo_mini_batch_size=256",
    "actor_rollout_ref.rollout.n=1",
    "actor_rollout_ref.rollout.tensor_model_parallel_size=2",
    "trainer.n_gpus_per_node=8",
)
SEPARATE_ASYNC = (
    "data.train_batch_size=1024",
    "actor.ppo_mini_batch_size=256",
    "rollout.n=8",
    "rollout.tensor_model_parallel_size=2",
    "trainer.n_gpus_per_node=8",
    "rollout.nnodes=1",
    "rollout.n_gpus_per_node=4",
    "rollout.checkpoint_engine.backend=nccl",
    "trainer.v1.separate_async.parameter_sync_step=4",
)
KEYS = ["samples", "actor_updates", "replicas", "gpus", "worker_gpu_share", "weight_syncs", "pools", "violations"]


def _plan(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["plan", *arguments])


def test_the_json_of_the_articles_settings_is_frozen() -> None:
    result = _plan("--mode", "colocate", "--json", *COLOCATE)
    assert result.exit_code == 0
    answer = json.loads(result.stdout)
    assert list(answer) == KEYS
    assert [answer[key] for key in KEYS[:4]] == [1024, 4, 4, 8]
    assert answer["worker_gpu_share"] == pytest.approx(1 / 3)
    assert answer["weight_syncs"] == 1
    assert answer["violations"] == []
    assert list(answer["pools"][0]) == ["name", "process_on_nodes", "gpus", "roles"]
    answer = json.loads(_plan("--mode", "separate-async", "--json", *SEPARATE_ASYNC).stdout)
    assert [answer[key] for key in KEYS[:4]] == [8192, 4, 2, 12]
    assert answer["weight_syncs"] == 1


def test_with_mistakes_the_json_is_still_whole_and_the_exit_code_2() -> None:
    broken = [text for text in SEPARATE_ASYNC if "nccl" not in text and "rollout.n" not in text]
    none = ("rollout.nnodes=0", "rollout.n_gpus_per_node=0", "rollout.checkpoint_engine.backend=naive")
    result = _plan("--mode", "separate-async", "--json", *broken, *none, "data.train_batch_size=1000")
    assert result.exit_code == 2
    answer = json.loads(result.stdout)
    assert list(answer) == KEYS
    assert answer["actor_updates"] is None
    assert [found["key"] for found in answer["violations"]] == [
        "data.train_batch_size",
        "trainer.v1.separate_async.parameter_sync_step",
        "actor_rollout_ref.rollout.nnodes",
        "actor_rollout_ref.rollout.n_gpus_per_node",
        "actor_rollout_ref.rollout.checkpoint_engine.backend",
    ]
    for found in answer["violations"]:
        assert list(found) == ["key", "problem", "remedies"]
        assert found["remedies"]


def test_without_a_readable_configuration_there_are_no_figures() -> None:
    result = _plan("--json", "rollout.nn=4")
    assert result.exit_code == 2
    answer = json.loads(result.stdout)
    assert list(answer) == KEYS
    assert all(answer[key] is None for key in KEYS[:-1])


def test_the_text_shows_each_figure_with_its_formula() -> None:
    result = _plan("--mode", "separate-async", *SEPARATE_ASYNC)
    assert result.exit_code == 0
    for part in ("8192   B x n = 1024 x 8", "2   4 / (TP 2 x DP 1 x PP 1 = 2)", "4   B / M x epochs = 1024 / 256 x 1"):
        assert part in result.stdout
    for part in ("0.333   1 / max_colocate_count = 1 / 3", "12   trainer 8 + rollout 4", "cross pool"):
        assert part in result.stdout
    assert "that is 4 actor updates" in result.stdout


def test_mistakes_go_to_standard_error_with_exit_code_2() -> None:
    result = _plan("trainer.n_gpus_per_node=8", "rollout.tensor_model_parallel_size=3")
    assert result.exit_code == 2
    assert "1 mistake; nothing was started" in result.stderr
    assert "8 rollout devices % (TP 3" in result.stderr
    assert "fix: set rollout.tensor_model_parallel_size to 2 or 4" in result.stderr


def test_plan_takes_the_arguments_of_launch(tmp_path: Path) -> None:
    config = tmp_path / "run.yaml"
    config.write_text("rollout: {n: 4}\n")
    result = _plan(
        "--config", str(config), "--run-dir", "x", "--seed", "3", "--json", "--resume", "data.train_batch_size=16"
    )
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["samples"] == 64


def test_keys_lists_every_setting() -> None:
    lines = _plan("--keys").stdout.splitlines()
    assert "rollout.n" in lines
    assert "    Samples per prompt (default: 8)" in lines


def test_p96_the_command_refuses_under_python_o_too() -> None:
    command = [sys.executable, "-O", "-m", "rpcrl.cli.main", "plan", "--json", "data.train_batch_size=1000"]
    done = subprocess.run(
        [
            *command,
            "actor.ppo_mini_batch_size=256",
            "trainer.n_gpus_per_node=8",
            "rollout.tensor_model_parallel_size=3",
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert [found["key"] for found in json.loads(done.stdout)["violations"]] == [
        "actor_rollout_ref.rollout.tensor_model_parallel_size",
        "data.train_batch_size",
    ]
