"""``rpcrl launch``: what it refuses before anything starts, and how an end becomes an exit code."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from rpcrl.cli.launch import run_to_exit_code
from rpcrl.cli.main import cli
from rpcrl.cli.signals import Ended
from rpcrl.errors import ConfigError, StartError, Violation

FLAGS = {
    "plan": ["--mode", "--config", "--run-dir", "--resume", "--seed", "--json", "--keys"],
    "launch": [
        "--mode", "--config", "--run-dir", "--resume", "--seed", "--dry-run", "--generate-only", "--eval-only",
        "--console", "--debug",
    ],
    "doctor": ["--clean", "--vllm", "--json"],
    "logs": ["--rank", "--role", "--tail", "--follow"],
    "bench dispatch": [
        "--workers", "--mib", "--cases", "--transport", "--rivals", "--rival-python", "--rivals-dir", "--rounds",
        "--budget", "--quick", "--json", "--picture", "--dry-run",
    ],
    "bench peers": ["--peers", "--rounds"],
}  # fmt: skip


def _launch(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["launch", *arguments])


def test_the_commands_and_their_flags_are_frozen() -> None:
    commands: dict[str, click.Command] = {}
    for name, command in cli.commands.items():
        parts = command.commands if isinstance(command, click.Group) else {"": command}
        commands |= {f"{name} {part}".strip(): each for part, each in parts.items()}
    assert sorted(commands) == sorted(FLAGS)
    for name, flags in FLAGS.items():
        options = [param for param in commands[name].params if isinstance(param, click.Option)]
        assert [option.opts[0] for option in options] == flags


def test_version_and_help_load_neither_torch_nor_transformers() -> None:
    code = (
        "import sys\nfrom rpcrl.cli.main import cli\n"
        "for arguments in (['--help'], ['launch', '--help'], ['--version']):\n"
        "    cli.main(arguments, standalone_mode=False)\n"
        "print(sorted({'torch', 'transformers', 'tensordict', 'zmq', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
    assert "rpcrl, version 0." in done.stdout


def test_the_module_runs_as_a_program() -> None:
    command = [sys.executable, "-m", "rpcrl.cli.main", "--version"]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.startswith("rpcrl, version")


@pytest.mark.parametrize("mode", ["colocate", "separate", "colocate-async", "separate-async"])
def test_every_mode_has_a_default_job(mode: str) -> None:
    result = _launch("--mode", mode, "--dry-run")
    assert result.exit_code == 0, result.output


def test_every_mistake_is_told_at_once_and_nothing_starts(tmp_path: Path) -> None:
    result = _launch(
        "--run-dir",
        str(tmp_path / "run"),
        "rollout.nn=4",
        "rollout.tensor_model_parallel_size=2",
        "rollout.name=torch",
        "data.train_files=none.jsonl",
        "model.path=none",
        "reward.reward_model.enable=true",
    )
    assert result.exit_code == 2
    for part in (
        "5 mistakes",
        "did you mean rollout.n?",
        "a replica in 1 process",
        "the data file none.jsonl does not exist",
        f"{Path.cwd() / 'none'}: no such folder on this machine",
        "a reward model is to score, and no folder of one is named",
    ):
        assert part in result.stderr
    assert not (tmp_path / "run").exists()


def test_a_file_of_prompts_needs_a_model(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("{}\n")
    result = _launch(f"data.train_files={rows}")
    assert result.exit_code == 2
    assert "set model.path" in result.stderr


@pytest.mark.parametrize(
    ("override", "part"),
    [
        ("trainer.nnodes=2", "this version runs on one machine"),
        ("rollout.checkpoint_engine.backend=nccl", "nccl would change nothing"),
        ("trainer.v1.separate_async.parameter_sync_step=2", "belongs to mode separate-async"),
    ],
)
def test_what_this_version_does_not_run_is_refused_and_accounted(override: str, part: str) -> None:
    result = _launch(override)
    assert result.exit_code == 2
    assert "1 mistake" in result.stderr
    assert part in result.stderr
    planned = CliRunner().invoke(cli, ["plan", override])
    assert planned.exit_code == 0
    assert "launch in this version refuses: " in planned.stdout
    assert part in planned.stdout
    assert list(json.loads(CliRunner().invoke(cli, ["plan", "--json", override]).stdout))[-1] == "violations"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_output_that_cannot_be_written_is_told_without_a_traceback() -> None:
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "rpcrl.cli.main", "plan"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == "rpcrl: the output could not be written: No space left on device\n"


def test_the_two_ways_not_to_train_exclude_each_other() -> None:
    result = _launch("--generate-only", "--eval-only")
    assert result.exit_code == 2
    assert "exclude each other" in result.stderr


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (ConfigError([Violation("a.b", "is wrong", ("mend it",))]), 2, "a.b: is wrong"),
        (StartError("rank 1 did not come up"), 1, "the run failed: rank 1 did not come up"),
        (ZeroDivisionError("division by zero"), 1, "the run failed: ZeroDivisionError: division by zero"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (Ended(signal.SIGTERM), 143, "interrupted"),
        (Ended(signal.SIGHUP), 129, "interrupted"),
    ],
)
def test_an_error_becomes_an_exit_code_and_words(
    error: BaseException, code: int, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def run() -> None:
        raise error

    assert run_to_exit_code(run, lambda: tmp_path, lambda: ["interrupted"], debug=False) == code
    told = capsys.readouterr().err
    assert said in told
    assert "Traceback" not in told
    assert (str(tmp_path) in told) == (code != 2)
    assert (tmp_path / "driver-error.txt").exists() == (code == 1)


def test_debug_shows_the_traceback(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def run() -> None:
        raise ZeroDivisionError("division by zero")

    assert run_to_exit_code(run, lambda: None, list, debug=True) == 1
    assert "Traceback" in capsys.readouterr().err
    assert run_to_exit_code(lambda: None, lambda: None, list, debug=False) == 0


def test_doctor_looks_at_everything() -> None:
    result = CliRunner().invoke(cli, ["doctor", "--json"])
    findings = {finding["what"]: finding for finding in json.loads(result.stdout)}
    for what in (
        "rpcrl and Python",
        "torch",
        "ZeroMQ",
        "devices",
        "open files",
        "/dev/shm",
        "socket directory",
        "ports",
    ):
        assert findings[what]["text"]
    assert "CURVE" in findings["ZeroMQ"]["text"]
    assert result.exit_code == (1 if any(found["status"] == "fail" for found in findings.values()) else 0)
