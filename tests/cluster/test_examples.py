"""Do the example programs run as they stand, and does the one that learns learn?"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.cluster


def test_a_plain_loop_learns_from_reward_alone(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "embed_plain.py")],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    means = [float(value) for value in re.findall(r"mean reward ([\d.]+)", done.stdout)]
    assert len(means) == 4, done.stdout
    assert means[-1] >= 0.9, done.stdout
