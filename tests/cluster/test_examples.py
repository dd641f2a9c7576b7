"""Do the example programs run as they stand, and does the one that learns learn?"""

from __future__ import annotations

import difflib
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.cluster


def run(name: str, cwd: Path, *, within_s: float = 100) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "examples" / name)],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=within_s,
    )


def test_a_plain_loop_learns_from_reward_alone(tmp_path: Path) -> None:
    assert len((ROOT / "examples" / "embed_plain.py").read_text().splitlines()) < 80
    done = run("embed_plain.py", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    means = [float(value) for value in re.findall(r"mean reward ([\d.]+)", done.stdout)]
    assert len(means) == 4, done.stdout
    assert means[-1] >= 0.9, done.stdout


def test_the_script_of_trl_is_unchanged_but_for_ten_lines() -> None:
    plain, embedded = ((ROOT / "examples" / name).read_text().splitlines() for name in ("trl_plain.py", "embed_trl.py"))
    compared = [line for line in difflib.ndiff(plain, embedded) if line[:2] in ("+ ", "- ")]
    assert [line for line in compared if line.startswith("- ")] == []
    added = [line for line in compared if line[2:].strip()]
    assert 0 < len(added) <= 10
    assert all(line.endswith("# added") for line in added)


@pytest.mark.timeout(500)
@pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="needs TRL: pip install trl")
def test_trl_trains_alike_with_its_reward_on_workers(tmp_path: Path) -> None:
    rewards = []
    for name in ("trl_plain.py", "embed_trl.py"):
        done = run(name, tmp_path, within_s=240)
        assert done.returncode == 0, done.stdout + done.stderr
        found = re.search(r"mean reward ([\d.]+) in the first ten steps, ([\d.]+) in the last ten", done.stdout)
        assert found is not None, done.stdout
        rewards.append((float(found[1]), float(found[2])))
    assert rewards[0] == rewards[1], "the same seed and the same rewards make the same training"
    assert rewards[1][1] > rewards[1][0] + 0.2
