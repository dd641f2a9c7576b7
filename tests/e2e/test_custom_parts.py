"""Can a user bring prompts, a reward function and a model of their own, by path?"""

import json

import pytest
import tensorboardX  # noqa: F401  (sets an environment variable when it is first imported)

from rpcrl.errors import RpcrlError
from rpcrl.tasks.sort_digits import base_checkpoint
from tests.e2e.jobs import metric_lines, train, weights_of

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

REWARD = '''
def longer(data_source, solution_str, ground_truth, extra_info, *, per_token):
    """Pays for length; the answer does not matter."""
    assert data_source == "mine" and extra_info["colour"] == "red"
    return {"score": per_token * len(solution_str.split()), "acc": float(solution_str == ground_truth)}
'''


@pytest.fixture
def rows(tmp_path):
    path = tmp_path / "mine.jsonl"
    row = {
        "data_source": "mine",
        "prompt": [{"role": "user", "content": "ascending 3 1 2 ="}],
        "reward_model": {"style": "rule", "ground_truth": "1 2 3"},
        "extra_info": {"colour": "red"},
    }
    path.write_text((json.dumps(row) + "\n") * 8)
    return path


def test_a_reward_function_and_prompts_by_path(tmp_path, rows):
    (tmp_path / "reward.py").write_text(REWARD)
    train(
        tmp_path / "run",
        f"data.train_files={rows}",
        f"data.val_files={rows}",
        f"model.path={base_checkpoint()}",
        f"reward.fn={tmp_path}/reward.py:longer",
        "reward.reward_kwargs={per_token: 0.125}",
        "reward.num_workers=2",
        "trainer.total_training_steps=1",
    )
    line = metric_lines(tmp_path / "run")[0]
    assert 0.125 < line["critic/score/mean"] < 1
    assert line["critic/score/max"] % 0.125 == 0
    assert 0 <= line["reward/acc/mean"] <= 1, "what the function returns beside the score is a figure of the step"
    assert line["val-aux/mine/reward/mean@1"] == pytest.approx(0.375), "three digits, greedily"
    assert line["val-core/mine/acc/mean@1"] in (0.0, 1.0), "accuracy is the function's own acc, not its score"


def test_what_a_reward_function_raises_reaches_the_driver_with_the_row(tmp_path, rows):
    (tmp_path / "reward.py").write_text(
        "def broken(data_source, solution_str, ground_truth, extra_info):\n    raise ZeroDivisionError('no marks')\n"
    )
    with pytest.raises(RpcrlError, match="no marks") as caught:
        train(
            tmp_path / "run",
            f"data.train_files={rows}",
            f"model.path={base_checkpoint()}",
            f"reward.fn={tmp_path}/reward.py:broken",
        )
    assert isinstance(caught.value, ZeroDivisionError)
    assert "reward.py" in str(caught.value)


def test_a_model_by_path_goes_on_from_an_exported_one(tmp_path):
    train(tmp_path / "first", "trainer.total_training_steps=1")
    train(
        tmp_path / "second",
        f"model.path={tmp_path}/first/hf",
        "trainer.total_training_steps=1",
        "actor.optim.lr=0",
    )
    assert weights_of(tmp_path / "second") == weights_of(tmp_path / "first"), "a rate of 0 changes nothing"
