"""A reward model scores a run: in a pool of its own, and beside a function in the trainer's processes."""

import json

import pytest
import tensorboardX  # noqa: F401  (sets an environment variable when it is first imported)

from rpcrl.engines.sequence_classifier import SequenceClassifier
from rpcrl.errors import ConfigError
from rpcrl.testing.tiny_model import write_tiny_classifier
from rpcrl.trainer.separate import SeparateTrainer
from tests.e2e.jobs import metric_lines, train

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(180)]

MODEL = "reward.reward_model"


def samples(run_dir, name):
    return [json.loads(line) for line in (run_dir / "samples" / f"{name}.jsonl").read_text().splitlines()]


def test_a_reward_model_in_its_own_pool_scores_the_separate_mode(tmp_path):
    judge = write_tiny_classifier(tmp_path / "judge", seed=3)
    job = train(
        tmp_path / "run",
        "trainer.mode=separate",
        "trainer.total_training_steps=1",
        f"{MODEL}.enable=true",
        f"{MODEL}.model_path={judge}",
        f"{MODEL}.enable_resource_pool=true",
        f"{MODEL}.nnodes=1",
        f"{MODEL}.n_gpus_per_node=2",
        f"{MODEL}.micro_batch_size_per_gpu=3",
        trainer=SeparateTrainer,
    )
    summary = job.run.read_summary()
    assert set(summary["peak_rss_bytes"]) == {"driver", "actor", "rollout", "reward_model"}, "no function, no process"
    assert len(metric_lines(job.run.path)) == 1
    rows = samples(job.run.path, "step_1")
    model = SequenceClassifier(judge)
    expected = model.score([model.text_of(row["raw_prompt"], row["response_text"]) for row in rows])
    assert [row["score"] for row in rows] == pytest.approx(expected, abs=1e-5)
    assert len(set(expected)) > 1


def test_a_reward_model_of_the_wrong_kind_is_refused_before_any_process_starts(tmp_path):
    judge = write_tiny_classifier(tmp_path / "judge")
    config = judge / "config.json"
    content = json.loads(config.read_text())
    content["id2label"] = {"0": "bad", "1": "good"}
    config.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=r"has 1 label, whose logit is the score; this one has 2"):
        train(tmp_path / "run", f"{MODEL}.enable=true", f"{MODEL}.model_path={judge}")
    assert not (tmp_path / "run").exists()


@pytest.mark.slow  # the parts are covered by tests/unit/trainer/test_steps.py and the run above
def test_a_function_and_a_model_in_the_trainers_processes_score_together(tmp_path):
    judge = write_tiny_classifier(tmp_path / "judge", seed=3)
    job = train(
        tmp_path / "run",
        "trainer.total_training_steps=1",
        "reward.fn=rpcrl.tasks.sort_digits:score",
        f"{MODEL}.enable=true",
        f"{MODEL}.model_path={judge}",
        f"{MODEL}.weight=0.5",
    )
    rows = samples(job.run.path, "step_1")
    model = SequenceClassifier(judge)
    numbers = model.score([model.text_of(row["raw_prompt"], row["response_text"]) for row in rows])
    own = [float(row["response_text"] == row["ground_truth"]) for row in rows]
    expected = [function + 0.5 * number for function, number in zip(own, numbers, strict=True)]
    assert [row["score"] for row in rows] == pytest.approx(expected, abs=1e-5)
