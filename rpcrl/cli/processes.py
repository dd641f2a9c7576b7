"""Which processes would a launch start? Asked of the launcher itself, so that the answer is what it would do."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rpcrl.config.account import (
    Pool,
    account,
    all_devices,
    is_separate,
    own_groups,
    reward_pool_devices,
    rollout_devices,
    trainer_devices,
)
from rpcrl.config.run import RunConfig
from rpcrl.env import THREAD_VARIABLES, child_path, snapshot
from rpcrl.errors import StartError, Violation

__all__ = ["device_checks", "dry_run_lines", "layout", "planned", "resolved_device"]

_GROUP_OF_POOL = {
    "global_pool": "trainer",
    "rollout_pool": "rollout",
    "reward_pool": "reward_model",
    "reward_workers": "reward",
}


def layout(config: RunConfig, *, device: str) -> dict[str, object]:
    """Return the launcher's layout of a run: its groups, on how many nodes, with which environment."""
    groups = []
    for pool in account(config).pools:
        threads = config.trainer.threads_per_worker if pool.gpus else 1
        for group, process_on_nodes, roles in _groups_of(pool, config):
            groups.append(
                {
                    "group": group,
                    "process_on_nodes": process_on_nodes,
                    "device": device if pool.gpus else None,
                    "slot_offset": _slot_offset(pool, config),
                    "roles": roles,
                    "environment": dict.fromkeys(THREAD_VARIABLES, str(threads)),
                }
            )
    return {"run_id": "dry-run", "log_dir": "RUN_DIR/logs", "groups": groups}


def _slot_offset(pool: Pool, config: RunConfig) -> list[int]:
    """Return the first device slot of a pool on each node: trainer, rollout and reward model one behind the other."""
    rollout = config.actor_rollout_ref.rollout.n_gpus_per_node if is_separate(config) else 0
    before = {"rollout_pool": config.trainer.n_gpus_per_node, "reward_pool": config.trainer.n_gpus_per_node + rollout}
    return [before.get(pool.name, 0)] * len(pool.process_on_nodes)


def _groups_of(pool: Pool, config: RunConfig) -> Iterator[tuple[str, list[int], list[str]]]:
    """Yield (name, processes on each node, roles) of a pool's groups.

    There is one, unless reference or critic have groups of their own; of agent-loop workers each has.
    """
    roles, name = list(pool.roles), _GROUP_OF_POOL.get(pool.name, pool.name)
    if pool.name == "agent_workers":
        for number in range(sum(pool.process_on_nodes)):
            yield f"agent_loop_{number}", [1], roles
        return
    alone = [role for role in own_groups(config) if role in roles]
    yield name, list(pool.process_on_nodes), [role for role in roles if role not in alone]
    for role in alone:
        yield role, list(pool.process_on_nodes), [role]


def planned(description: Mapping[str, object]) -> dict[str, Any]:
    """Return the launcher's answer to a layout: ``processes`` and ``violations``.

    Raises StartError when the launcher cannot be run.
    """
    # -P: a folder named launcher in the current directory is not the launcher.
    command = [sys.executable, "-P", "-m", "launcher", "plan"]
    done = subprocess.run(
        command,
        input=json.dumps(description),
        env=snapshot() | child_path(),
        capture_output=True,
        text=True,
        check=False,
    )
    try:
        answer = json.loads(done.stdout)
    except ValueError:
        raise StartError(
            f"the launcher's plan failed with exit code {done.returncode}: {done.stderr.strip() or 'no output'}"
        ) from None
    if not isinstance(answer, dict):
        raise StartError(f"the launcher's plan is a {type(answer).__name__}, not an object")
    return answer


def resolved_device(config: RunConfig) -> str:
    """Return the device that a launch would take on this machine: ``auto`` is cuda where there are enough, else cpu."""
    if config.trainer.device != "auto":
        return config.trainer.device
    return "cpu" if planned(layout(config, device="cuda"))["violations"] else "cuda"


def device_checks(config: RunConfig) -> list[Violation]:
    """Return one violation when cuda is asked for and this machine has fewer devices than workers."""
    if config.trainer.device != "cuda":
        return []
    problems = planned(layout(config, device="cuda"))["violations"]
    if not problems:
        return []
    world = f"{all_devices(config) + reward_pool_devices(config)} workers"
    remedy = "set trainer.n_gpus_per_node to the number of GPUs"
    if is_separate(config):
        world += f" ({trainer_devices(config)} of the trainer and {rollout_devices(config)} of the rollout)"
        remedy = "set trainer.n_gpus_per_node + rollout.n_gpus_per_node to the number of GPUs"
    if reward_pool_devices(config):
        world += f" ({reward_pool_devices(config)} of them of the reward model)"
    return [
        Violation(
            "trainer.n_gpus_per_node",
            f"trainer.device=cuda, and {len(problems)} of {world} get no device of their own: {problems[0]['problem']}",
            (remedy, "or set trainer.device=cpu: virtual devices"),
        )
    ]


def dry_run_lines(config: RunConfig) -> list[str]:
    """Return what a launch would start: processes with rank, device and environment, and what they would bind."""
    answer = planned(layout(config, device=resolved_device(config)))
    processes: Sequence[Mapping[str, Any]] = answer["processes"]
    lines = ["processes", "  driver      this program; starts the agent"]
    lines.append(f"  agent       {sys.executable} -P -m launcher   (one a node; starts and reaps the workers)")
    shared = _shared_environment(processes)
    for spec in processes:
        without = spec["group"] == "reward" or spec["group"].startswith("agent_loop_")
        device = "virtual device" if spec["device"] is None and not without else spec["device"]
        lines.append(
            f"  {spec['identity']:<16} {'+'.join(spec['roles'])}; node {spec['node_rank']}, local rank "
            f"{spec['local_rank']}, {'no device' if device is None else f'device {device}'}"
        )
        lines.append(f"      command      {' '.join(spec['argv'])}")
        own = {name: value for name, value in spec["environment"].items() if name not in shared}
        lines.append(f"      environment  {_assignments(own)}")
        lines.append(f"      log          {spec['log_path']}")
    lines.append(f"environment of every worker\n  {_assignments(shared)}")
    lines += _address_lines()
    return lines


def _shared_environment(processes: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    if not processes:
        return {}
    first: dict[str, str] = processes[0]["environment"]
    return {
        name: value
        for name, value in first.items()
        if all(spec["environment"].get(name) == value for spec in processes)
    }


def _assignments(environment: Mapping[str, str]) -> str:
    return " ".join(f"{name}={value}" for name, value in sorted(environment.items()))


def _address_lines() -> list[str]:
    from rpcrl.leftovers import run_parent

    return [
        "bind addresses",
        f"  control and data   ipc://{run_parent()}/rpcrl-RUN_ID/control.sock (directory of mode 0700); no TCP port",
        "  torch.distributed  rank 0 of group trainer listens on 127.0.0.1, on a port that it chooses at the start",
    ]
