"""``rpcrl doctor`` tells dead runs from living ones, and cleans only the dead."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
from click.testing import CliRunner

from rpcrl.cli.main import cli
from rpcrl.env import RUN_ID
from rpcrl.leftovers import OWNER_FILE, RunOwner, create_run_dir, machine_id, remove_run_dir


@pytest.fixture
def parent(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    parent = tmp_path_factory.mktemp("r")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(parent))
    return parent


def _doctor(*arguments: str) -> list[dict[str, str]]:
    result = CliRunner().invoke(cli, ["doctor", "--json", *arguments])
    findings: list[dict[str, str]] = json.loads(result.stdout)
    return findings


def _texts(findings: list[dict[str, str]], what: str) -> list[str]:
    return [finding["text"] for finding in findings if finding["what"] == what]


def _dead_run(parent: Path) -> tuple[Path, subprocess.Popen[str]]:
    """Return the directory of a run whose driver is dead, and a process that it left behind."""
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    directory = parent / "rpcrl-dead1"
    directory.mkdir(mode=0o700)
    owner = RunOwner("dead1", gone.pid, 1, machine_id(), socket.gethostname())
    (directory / OWNER_FILE).write_text(json.dumps(asdict(owner)))
    left = subprocess.Popen(
        [sys.executable, "-c", "print(flush=True); input()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, RUN_ID: "dead1"},
    )
    assert left.stdout is not None
    left.stdout.readline()
    return directory, left


def test_what_a_dead_run_left_is_told_and_cleaned_on_request(parent: Path) -> None:
    directory, left = _dead_run(parent)
    try:
        (text,) = _texts(_doctor(), "leftovers")
        assert "run dead1" in text
        assert "1 processes" in text
        assert directory.exists()
        assert left.poll() is None
        assert _texts(_doctor("--clean"), "cleaned") == ["1 dead runs were removed; living runs were not touched"]
        assert not directory.exists()
        assert left.wait(timeout=10) == -9
        assert _texts(_doctor(), "leftovers") == ["none"]
    finally:
        left.kill()
        left.communicate()


def test_a_living_run_is_listed_with_what_it_listens_on_and_never_cleaned(parent: Path) -> None:
    directory = create_run_dir("alive1")
    with socket.socket(socket.AF_UNIX) as local, socket.socket() as tcp:
        local.bind(str(directory / "control.sock"))
        tcp.bind(("127.0.0.1", 0))
        tcp.listen()
        findings = _doctor("--clean")
        (text,) = _texts(findings, "running")
        assert "run alive1" in text
        assert "control.sock" in text
        port = tcp.getsockname()[1]
        assert f"pid {os.getpid()}: tcp 127.0.0.1:{port}" in _texts(findings, "listening")
        assert directory.exists()
    remove_run_dir(directory)


def test_a_socket_path_that_would_be_too_long_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = tmp_path / ("d" * 90)
    deep.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(deep))
    result = CliRunner().invoke(cli, ["doctor"])
    assert result.exit_code == 1
    assert "Linux takes 107" in result.stdout
    assert "fix: set XDG_RUNTIME_DIR or TMPDIR to a shorter path" in result.stdout
