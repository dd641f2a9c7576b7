"""Does every estimator train by its name alone, and do estimators and losses of one's own?"""

import pytest
import tensorboardX  # noqa: F401  (sets an environment variable when it is first imported)

from rpcrl import register_advantage, register_policy_loss
from rpcrl.config.registry import ADVANTAGES, POLICY_LOSSES
from tests.e2e.jobs import copy_up_to, metric_lines, train, weights_of

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

TINY = ("trainer.n_gpus_per_node=1", "trainer.total_training_steps=2", "data.max_response_length=7")

OWN = '''
import torch


def centred(token_level_rewards, response_mask, colour=None):
    """The score less the mean score of the batch; asks for nothing that a batch may lack."""
    scores = token_level_rewards.sum(-1, keepdim=True)
    advantages = (scores - scores.mean()) * response_mask
    return advantages, advantages


def reinforce(old_log_prob, log_prob, advantages, response_mask, settings, counts, rollout_is_weights=None):
    """The plain policy gradient."""
    loss = -(advantages * log_prob * response_mask).sum() * counts.dp_size / counts.batch_num_tokens
    return loss, {"my_figure": torch.tensor(0.25) * response_mask.sum() * counts.dp_size / counts.batch_num_tokens}
'''


@pytest.mark.parametrize(
    "settings",
    [
        ("dr_grpo", "actor.loss_agg_mode=seq-mean-token-sum-norm"),
        ("rloo",),
        ("reinforce_plus_plus", "algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl.kl_coef=0.01"),
        ("reinforce_plus_plus_baseline",),
    ],
    ids=lambda settings: settings[0],
)
def test_an_estimator_trains_by_its_name(tmp_path, settings):
    name, *overrides = settings
    train(tmp_path / "run", *TINY, f"algorithm.adv_estimator={name}", *overrides)
    lines = metric_lines(tmp_path / "run")
    assert len(lines) == 2
    for line in lines:
        assert line["actor/grad_norm"] > 0
        assert line["actor/skipped"] == 0
        assert line["critic/advantages/max"] > 0 > line["critic/advantages/min"]
        if name.startswith("reinforce"):
            assert line["critic/advantages/mean"] == pytest.approx(0, abs=1e-5), "whitened over the batch"


def test_an_estimator_and_a_loss_of_ones_own_by_path(tmp_path, monkeypatch):
    (tmp_path / "own.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    train("run", *TINY, "algorithm.adv_estimator=own.py:centred", "actor.policy_loss.loss_mode=own.py:reinforce")
    for line in metric_lines("run"):
        assert line["actor/my_figure"] == pytest.approx(0.25)
        assert line["critic/advantages/max"] - line["critic/advantages/min"] == pytest.approx(1.0)
        assert line["actor/grad_norm"] > 0


def ones(response_mask):
    return response_mask.float(), response_mask.float()


def registered(old_log_prob, log_prob, advantages, response_mask, settings, counts, rollout_is_weights=None):
    assert advantages.unique().tolist() in ([1.0], [0.0, 1.0])
    loss = -(log_prob * response_mask).sum() / counts.batch_num_tokens
    return loss, {"registered": loss.detach() * 0 + 1}


@pytest.fixture
def names():
    register_advantage("mine_in_a_test")(ones)
    register_policy_loss("mine_in_a_test")(registered)
    yield
    ADVANTAGES.forget("mine_in_a_test")
    POLICY_LOSSES.forget("mine_in_a_test")


def test_registered_functions_train_and_the_workers_find_the_loss_by_its_path(tmp_path, names):
    assert "mine_in_a_test" in ADVANTAGES
    path = POLICY_LOSSES.portable("mine_in_a_test")
    assert path.endswith("test_estimators:registered")
    train(
        tmp_path / "run",
        *TINY,
        "algorithm.adv_estimator=mine_in_a_test",
        "actor.policy_loss.loss_mode=mine_in_a_test",
        "trainer.total_training_steps=1",
    )
    assert metric_lines(tmp_path / "run")[0]["actor/registered"] == pytest.approx(1.0)


def test_an_adaptive_kl_weight_moves_and_a_resumed_run_goes_on_with_it(tmp_path):
    job = (
        *TINY,
        "algorithm.adv_estimator=rloo",
        "algorithm.use_kl_in_reward=true",
        "algorithm.kl_ctrl.type=adaptive",
        "algorithm.kl_ctrl.horizon=100",
        "algorithm.kl_ctrl.target_kl=10",
        "trainer.total_training_steps=3",
        "trainer.save_freq=1",
    )
    train(tmp_path / "whole", *job)
    weights = [line["actor/reward_kl_penalty_coeff"] for line in metric_lines(tmp_path / "whole")]
    # far below the target: a fifth of n / horizon less after every step of 32 samples
    assert weights == pytest.approx([0.001, 0.001 * 0.936, 0.001 * 0.936**2])
    resumed = copy_up_to(tmp_path / "whole", 2, tmp_path / "resumed")
    train(resumed, *job, "trainer.resume=auto")
    assert metric_lines(resumed)[-1]["actor/reward_kl_penalty_coeff"] == weights[-1]
    assert weights_of(resumed) == weights_of(tmp_path / "whole")
