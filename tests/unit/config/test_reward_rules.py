"""Who scores, in which processes, and which settings then steer nothing."""

from __future__ import annotations

from rpcrl.config.account import Pool, account
from rpcrl.config.launch_rules import version_checks
from rpcrl.config.load import load


def _pools(*overrides: str) -> tuple[Pool, ...]:
    return account(load(None, list(overrides), "colocate")).pools


def test_reward_workers_are_counted_where_a_function_scores() -> None:
    enabled = "reward.reward_model.enable=true"
    pools = [pool.name for pool in _pools(enabled)]
    assert pools == ["global_pool"], "the model alone scores, in the trainer's processes"
    assert "reward_model" in _pools(enabled)[0].roles
    both = _pools(enabled, "reward.fn=rewards.py:score")
    assert [pool.name for pool in both] == ["global_pool", "reward_workers"]


def test_settings_of_a_reward_model_that_is_not_there_are_refused() -> None:
    def idle(*overrides: str) -> list[str]:
        return [violation.key for violation in version_checks(load(None, list(overrides), "colocate"))]

    model = "reward.reward_model"
    given = (f"{model}.model_path=models/judge", f"{model}.micro_batch_size_per_gpu=4", f"{model}.weight=0.5")
    assert set(idle(*given)) == {f"{model}.model_path", f"{model}.micro_batch_size_per_gpu", f"{model}.weight"}
    assert idle(*given, f"{model}.enable=true") == [f"{model}.weight"], "there is nothing that it could be weighed with"
    assert idle(*given, f"{model}.enable=true", "reward.fn=rewards.py:score") == []
    sized = (f"{model}.enable=true", f"{model}.nnodes=1", f"{model}.n_gpus_per_node=1")
    assert idle(*sized) == [f"{model}.nnodes", f"{model}.n_gpus_per_node"], "without a pool of its own"
    assert idle(*sized, f"{model}.enable_resource_pool=true") == []
