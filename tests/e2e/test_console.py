"""Which lines of its workers does a launch show, and does ``rpcrl logs`` find the others?"""

import subprocess
import sys

import pytest

from tests.e2e.jobs import SHORT

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

REWARD = """
import os

def loud(data_source, solution_str, ground_truth, extra_info):
    print("a judge speaks", flush=True)
    return 1.0
"""


def rpcrl(*arguments):
    command = [sys.executable, "-m", "rpcrl.cli.main", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=140, check=True).stdout


@pytest.mark.parametrize(("switch", "ranks"), [((), {0}), (("--console", "all"), {0, 1}), (("--console=off",), set())])
def test_p71_launch_shows_rank_0_and_all_ranks_when_asked(tmp_path, switch, ranks):
    (tmp_path / "reward.py").write_text(REWARD)
    run = tmp_path / "run"
    shown = rpcrl(
        "launch",
        *switch,
        "--run-dir",
        str(run),
        *SHORT,
        "trainer.total_training_steps=1",
        "reward.num_workers=2",
        f"reward.fn={tmp_path}/reward.py:loud",
    )
    for rank in (0, 1):
        assert (f"[reward {rank}] a judge speaks" in shown) == (rank in ranks), shown
    assert (f"complete output of the workers: {run / 'logs'}" in shown) == (switch != ("--console=off",))
    found = rpcrl("logs", str(run), "--role", "reward", "--rank", "1")
    assert f"[reward 1] {run / 'logs' / 'reward.rank1.log'}" in found
    assert "  a judge speaks" in found
