"""Do agent loops reach vLLM as they reach the torch engine? A tool's turn between two of vLLM's."""

from __future__ import annotations

import json

import pytest
import tensorboardX  # noqa: F401  (sets an environment variable when it is first imported)

from tests.e2e.jobs import metric_lines, train

pytestmark = [pytest.mark.vllm, pytest.mark.cluster, pytest.mark.timeout(300)]

HERE = "tests.e2e.agent_loops"


def test_a_tool_speaks_between_two_turns_of_vllm(tmp_path):
    """The old log-probs are recomputed: those that vLLM gave the tokens of both turns are the trainer's."""
    job = train(
        tmp_path / "run",
        "rollout.name=vllm",
        "trainer.n_gpus_per_node=1",
        "trainer.total_training_steps=1",
        "trainer.log_train_generations=1000",
        "algorithm.recompute_old_log_prob=true",
        f"rollout.agent.default_agent_loop={HERE}:SortTool",
        f"reward.fn={HERE}:brief",
        "data.max_response_length=12",
    )
    [line] = metric_lines(job.run.path)
    assert line["num_turns/max"] == 2
    assert line["agent_loop/rows"] > 32
    assert line["training/rollout_probs_diff_max"] < 1e-4, line
    assert line["actor/grad_norm"] > 0
    rows = [json.loads(text) for text in (job.run.path / "samples" / "step_1.jsonl").read_text().splitlines()]
    assert any(row["num_turns"] == 2 and "=" in row["response_text"] for row in rows)
