"""Does set-up start from nothing, and refuse what cannot work before it installs anything?"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.meta.sources import ROOT

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="this machine has no make")


def _make(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    return subprocess.run(
        ["make", *arguments],
        cwd=ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )


def test_help_lists_targets_that_exist() -> None:
    done = _make("help")
    assert done.returncode == 0, done.stderr
    listed = re.findall(r"^\s+make ([\w-]+)", done.stdout, re.MULTILINE)
    assert {"run", "test", "check", "test-slow", "test-gpu", "bench", "clean"} <= set(listed)
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert [name for name in listed if re.search(rf"^{name}:", makefile, re.MULTILINE) is None] == []


def test_a_missing_interpreter_is_named_with_a_way_out(tmp_path: Path) -> None:
    done = _make("install", f"VENV={tmp_path / 'venv'}", "PYTHON=python-that-is-not-here")
    assert done.returncode != 0
    assert "no python-that-is-not-here on the PATH" in done.stderr
    assert not (tmp_path / "venv").exists()


def test_an_old_interpreter_is_refused_with_both_versions(tmp_path: Path) -> None:
    old = tmp_path / "python3.9"
    old.write_text(
        f'#!/bin/sh\nexec {sys.executable} -c "import sys; sys.version_info = (3, 9, 2); exec(sys.argv[1])" "$2"\n'
    )
    old.chmod(0o755)
    done = _make("install", f"VENV={tmp_path / 'venv'}", f"PYTHON={old}")
    assert done.returncode != 0
    assert "rpcrl needs Python 3.11 or newer" in done.stderr
    assert "is 3.9" in done.stderr
    assert not (tmp_path / "venv").exists()


def test_the_torch_of_a_cpu_machine_is_pinned_before_everything_else() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    installs = re.findall(r"pip install .*", makefile)
    assert "-r requirements/cpu.txt" in installs[0]
    pins = (ROOT / "requirements" / "cpu.txt").read_text(encoding="utf-8")
    assert re.search(r"^torch==\d", pins, re.MULTILINE)
