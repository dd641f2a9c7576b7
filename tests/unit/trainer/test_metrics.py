from types import SimpleNamespace

import numpy as np
import pytest
import torch

from rpcrl.trainer.metrics import (
    PhaseTimer,
    data_metrics,
    log_prob_difference,
    reduce_metrics,
    reward_metrics,
    timing_metrics,
)


def batch(**columns):
    return SimpleNamespace(batch=columns, non_tensor_batch={})


def two_rows():
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    return batch(
        response_mask=mask,
        attention_mask=torch.cat([torch.tensor([[0, 1], [1, 1]]), mask], 1),
        token_level_scores=torch.tensor([[0.0, 1, 0], [0, 0, 0]]),
        token_level_rewards=torch.tensor([[0.0, 0.5, 0], [0, 0, 0]]),
        advantages=torch.tensor([[1.0, 1, 9], [-1, -1, -1]]),
        returns=torch.tensor([[2.0, 2, 9], [-1, -1, -1]]),
    )


def test_what_a_reward_function_tells_beside_the_score_has_means():
    columns = {
        "response_text": ["a", "b", "c"],
        "score": [1.0, 0.0, 0.1],
        "format": [1.0, 0.0, 1.0],
        "acc": [True, False, False],
        "judged": [None, 4, None],
        "why": ["x", "y", "z"],
        "nobody": [None, None, None],
        "uid": [1, 2, 3],
    }
    rows = SimpleNamespace(non_tensor_batch={name: np.array(values, dtype=object) for name, values in columns.items()})
    assert reward_metrics(rows, set(columns) - {"uid"}) == pytest.approx(
        {"reward/acc/mean": 1 / 3, "reward/format/mean": 2 / 3, "reward/judged/mean": 4.0}
    )


def test_data_metrics_by_hand():
    metrics = data_metrics(two_rows(), max_prompt_length=2, max_response_length=3)
    assert metrics["critic/score/mean"] == 0.5
    assert metrics["critic/rewards/max"] == 0.5
    assert metrics["critic/advantages/max"] == 1.0, "a column outside the mask is not looked at"
    assert metrics["critic/advantages/mean"] == pytest.approx((2 - 3) / 5)
    assert metrics["response_length/mean"] == 2.5
    assert metrics["response_length/clip_ratio"] == 0.5
    assert metrics["prompt_length/min"] == 1.0
    assert metrics["prompt_length/clip_ratio"] == 0.5
    assert metrics["response/aborted_ratio"] == 0.0


def test_values_and_what_they_explain_by_hand():
    rows = two_rows()
    assert not any("values" in name for name in data_metrics(rows, max_prompt_length=2, max_response_length=3))
    rows.batch["values"] = torch.tensor([[1.0, 1, 9], [-1, -1, 0]])
    metrics = data_metrics(rows, max_prompt_length=2, max_response_length=3)
    assert metrics["critic/values/mean"] == pytest.approx(0.0)
    assert metrics["critic/values/max"] == 1.0, "a column outside the mask is not looked at"
    # returns 2 2 -1 -1 -1 have variance 2.7, what is left over (1 1 0 0 -1) has 0.7
    assert metrics["critic/vf_explained_var"] == pytest.approx(1 - 0.7 / 2.7, rel=1e-4)
    rows.batch["values"] = rows.batch["returns"]
    metrics = data_metrics(rows, max_prompt_length=2, max_response_length=3)
    assert metrics["critic/vf_explained_var"] == pytest.approx(1.0)


def test_timing_metrics_by_hand():
    metrics = timing_metrics(
        {"gen": 0.5, "update_actor": 1.0}, step_s=2.0, total_tokens=100, response_tokens=50, num_devices=2
    )
    assert metrics["timing_s/gen"] == 0.5
    assert metrics["timing_s/step"] == 2.0
    assert metrics["timing_per_token_ms/gen"] == 10.0
    assert metrics["timing_per_token_ms/update_actor"] == 10.0
    assert "timing_per_token_ms/ref" not in metrics
    assert metrics["perf/throughput"] == 25.0
    assert metrics["perf/total_num_tokens"] == 100


def test_reduction_goes_by_name():
    parts = [{"loss": 1.0, "lr": 0.1, "x_max": 3.0, "x/min": 3.0}, {"loss": 3.0, "lr": 0.2, "x_max": 1.0, "x/min": 1.0}]
    assert reduce_metrics([*parts, {"loss": 5.0, "kl_loss": 7.0}]) == {
        "loss": 3.0,
        "lr": 0.2,
        "x_max": 3.0,
        "x/min": 1.0,
        "kl_loss": 7.0,
    }


def test_a_phase_entered_twice_adds_up_and_counts_when_it_raises():
    seen = []
    timer = PhaseTimer(seen.append)
    with timer("gen"):
        pass
    first_s = timer.seconds["gen"]
    with pytest.raises(ValueError, match="x"), timer("gen"):
        raise ValueError("x")
    assert timer.seconds["gen"] > first_s
    assert seen == ["gen", "gen"]


def test_log_prob_difference_is_of_probabilities_inside_the_mask():
    metrics = log_prob_difference(
        batch(
            response_mask=torch.tensor([[1, 1, 0]]),
            old_log_probs=torch.log(torch.tensor([[0.5, 0.25, 1.0]])),
            rollout_log_probs=torch.log(torch.tensor([[0.5, 0.75, 0.1]])),
        )
    )
    assert metrics["training/rollout_probs_diff_max"] == pytest.approx(0.5)
    assert metrics["training/rollout_probs_diff_mean"] == pytest.approx(0.25)
    assert metrics["training/rollout_probs_diff_valid"] == 1.0


def test_turns_and_failures_of_agent_loops():
    rows = two_rows()
    rows.non_tensor_batch = {"num_turns": np.array([3, 0]), "finish_reason": np.array(["stop", "failed"])}
    metrics = data_metrics(rows, max_prompt_length=2, max_response_length=3)
    assert {name: value for name, value in metrics.items() if name.startswith(("num_turns", "agent_loop"))} == {
        "num_turns/mean": 1.5,
        "num_turns/max": 3.0,
        "num_turns/min": 0.0,
        "agent_loop/rows": 2.0,
        "agent_loop/failed_tasks": 1.0,
    }
