"""Agent loops in the account, and their settings where there are none."""

from __future__ import annotations

from rpcrl.config.account import account
from rpcrl.config.launch_rules import version_checks
from rpcrl.config.load import load, read

AGENT = "actor_rollout_ref.rollout.agent"
LOOP = f"{AGENT}.default_agent_loop=single_turn_agent"
GIVEN = {
    "num_workers": 3,
    "agent_loop_kwargs": {"colour": 1},
    "task_timeout_s": 5.0,
    "max_attempts": 1,
    "on_failed_task": "empty",
    "placement": "deterministic",
}


def _overrides(*names: str) -> list[str]:
    return [f"{AGENT}.{name}={str(GIVEN[name]).replace(chr(39), '')}" for name in names]


def test_agent_workers_are_counted_and_take_no_device() -> None:
    config = load(None, [LOOP, *_overrides("num_workers")], "colocate")
    pool = account(config).pools[-1]
    assert (pool.name, pool.process_on_nodes, pool.gpus, pool.roles) == ("agent_workers", (3,), 0, ("agent_loop",))
    assert "agent_workers" not in [pool.name for pool in account(load(None, [], "colocate")).pools]


def test_settings_of_agent_loops_that_are_not_there_are_refused() -> None:
    overrides = _overrides(*GIVEN)
    for mode in ("colocate", "separate"):
        found = {violation.key for violation in version_checks(load(None, overrides, mode))}
        assert found == {f"{AGENT}.{name}" for name in GIVEN}
        assert version_checks(load(None, [LOOP, *overrides], mode)) == []


def test_verls_keys_that_mean_something_else_say_what_to_do() -> None:
    found = {
        violation.key: violation
        for violation in read(
            None, [f"{AGENT}.agent_loop_config_path=loops.yaml", "rollout.multi_turn.enable=true"], "colocate"
        ).violations
    }
    assert "an agent loop is named by its import path" in found[f"{AGENT}.agent_loop_config_path"].problem
    assert "actor_rollout_ref.rollout.multi_turn.enable" in found
    assert not read(None, [f"{AGENT}.num_workers=8", LOOP], "colocate").violations
