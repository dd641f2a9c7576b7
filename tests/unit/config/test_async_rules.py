"""Which settings of the asynchronous modes are refused, and which are read where?"""

from __future__ import annotations

import pytest

from rpcrl.config.launch_rules import version_checks
from rpcrl.config.load import load, read
from rpcrl.config.rollout_threshold import bounds_of
from rpcrl.errors import UsageError, Violation


def _found(*overrides: str, mode: str, launch: bool = False) -> dict[str, Violation]:
    loaded = read(None, list(overrides), mode, also=(version_checks,) if launch else ())
    return {violation.key: violation for violation in loaded.violations}


@pytest.mark.parametrize("mode", ["colocate-async", "separate-async"])
def test_the_default_job_of_each_mode_passes(mode: str) -> None:
    assert _found(mode=mode, launch=True) == {}


@pytest.mark.parametrize("mode", ["colocate-async", "separate-async"])
def test_more_batches_in_flight_than_the_bound_has_room_for_are_refused(mode: str) -> None:
    key = f"trainer.v1.{mode.replace('-', '_')}.num_warmup_batches"
    found = _found(f"{key}=3", mode=mode)
    assert list(found) == [key]
    assert "3 weight versions before its step, and trainer.max_staleness allows 1" in found[key].problem
    assert found[key].remedies == ("set trainer.max_staleness=3", f"or set {key}=1")
    assert not _found(f"{key}=3", "trainer.max_staleness=3", mode=mode)
    assert not _found(f"{key}=0", "trainer.max_staleness=0", mode=mode)


def test_the_critics_mini_batches_make_up_one_part() -> None:
    gae = ("algorithm.adv_estimator=gae", "rollout.n=1")
    found = _found(*gae, "critic.ppo_mini_batch_size=16", mode="separate-async")
    assert "8 % 16 = 8" in found["critic.ppo_mini_batch_size"].problem
    assert not _found(*gae, "critic.ppo_mini_batch_size=4", mode="separate-async")


def test_importance_weights_need_recomputed_log_probs() -> None:
    key = "algorithm.rollout_correction.rollout_is"
    found = _found(f"{key}=token", mode="separate-async")
    assert "every weight would be 1" in found[key].problem
    assert not _found(f"{key}=token", "algorithm.recompute_old_log_prob=true", mode="separate-async")
    verls = ("algorithm.rollout_correction.bypass_mode=false", f"{key}=sequence")
    assert not _found(*verls, mode="separate-async")


@pytest.mark.parametrize("setting", ["rollout_is_threshold=3.0", "rollout_is_batch_normalize=true"])
def test_settings_of_weights_that_nobody_asked_for_are_refused(setting: str) -> None:
    found = _found(f"algorithm.rollout_correction.{setting}", mode="colocate")
    assert "rollout_is=null" in str(*found.values())


@pytest.mark.parametrize(
    ("threshold", "bounds"), [(2.0, (None, 2.0)), ("3", (None, 3.0)), ("0.5_2.0", (0.5, 2.0)), ("0_1", (0.0, 1.0))]
)
def test_thresholds_are_one_bound_or_two(threshold: float | str, bounds: tuple[float | None, float]) -> None:
    assert bounds_of(threshold) == bounds
    weights = ("algorithm.recompute_old_log_prob=true", "algorithm.rollout_correction.rollout_is=token")
    load(None, [*weights, f"algorithm.rollout_correction.rollout_is_threshold={threshold}"], "colocate")


@pytest.mark.parametrize("threshold", [True, 0.0, -1.0, "x", "2_1", "-1_2", "1_2_3"])
def test_thresholds_that_bound_nothing_are_refused(threshold: float | str) -> None:
    with pytest.raises(UsageError, match="rollout_is_threshold"):
        bounds_of(threshold)
    weights = ("algorithm.recompute_old_log_prob=true", "algorithm.rollout_correction.rollout_is=token")
    key = "algorithm.rollout_correction.rollout_is_threshold"
    if not isinstance(threshold, bool):
        assert key in _found(*weights, f"{key}={threshold}", mode="colocate")


def test_verls_age_counts_from_one() -> None:
    config = load(None, ["trainer.v1.sampler.max_off_policy_threshold=8"], "separate_async")
    assert config.trainer.max_staleness == 7


@pytest.mark.parametrize(
    ("setting", "mode"),
    [
        ("trainer.max_staleness=3", "separate"),
        ("trainer.v1.sampler.max_off_policy_strategy=drop", "colocate"),
        ("trainer.v1.sampler.task_timeout_s=5.0", "separate"),
        ("trainer.v1.separate_async.parameter_sync_step=2", "colocate-async"),
        ("trainer.v1.colocate_async.num_warmup_batches=0", "separate-async"),
        ("rollout.free_cache_engine=false", "separate-async"),
    ],
)
def test_what_a_mode_does_not_read_is_refused(setting: str, mode: str) -> None:
    found = _found(setting, mode=mode, launch=True)
    assert list(found) == [key for key in found if key.endswith(setting.split("=")[0].removeprefix("rollout."))]
    assert "would change nothing" in str(*found.values())


def test_nodes_of_the_rollout_beyond_the_first_are_refused() -> None:
    assert "2 nodes of the rollout" in str(*_found("rollout.nnodes=2", mode="separate-async", launch=True).values())


def test_agent_loops_make_whole_batches_only() -> None:
    loop = "rollout.agent.default_agent_loop=rpcrl.agents.loops:single_turn_agent"
    for mode in ("colocate-async", "separate-async"):
        assert "asks for 1 prompt at a time" in str(*_found(loop, mode=mode, launch=True).values())


FILTER = "algorithm.filter_groups"


@pytest.mark.parametrize("mode", ["colocate", "separate", "colocate-async", "separate-async"])
def test_groups_may_be_filtered_in_every_mode_by_verls_names(mode: str) -> None:
    on = (f"{FILTER}.enable=true", f"{FILTER}.metric=acc", f"{FILTER}.max_num_gen_batches=3")
    assert not _found(*on, mode=mode, launch=True)
    settings = load(None, list(on), mode).algorithm.filter_groups
    assert (settings.enable, settings.metric, settings.max_num_gen_batches) == (True, "acc", 3)


def test_a_group_of_one_cannot_be_filtered_and_a_filter_that_is_off_has_no_settings() -> None:
    lone = ("algorithm.adv_estimator=gae", "rollout.n=1")
    found = _found(f"{FILTER}.enable=true", *lone, mode="colocate")
    assert "with rollout.n=1 a group has one sample" in found[f"{FILTER}.enable"].problem
    assert found[f"{FILTER}.enable"].remedies == ("set rollout.n=2 or more", f"or set {FILTER}.enable=false")
    off = _found(f"{FILTER}.metric=acc", f"{FILTER}.max_num_gen_batches=2", mode="colocate")
    assert list(off) == [f"{FILTER}.metric", f"{FILTER}.max_num_gen_batches"]
    assert "2 would change nothing" in off[f"{FILTER}.max_num_gen_batches"].problem
