"""Which processes does a group need on this node, each with which command, environment and device?

Pure: data in, data out. ``plan_workers`` serves the agent; ``plan_layout`` serves ``python -m launcher plan``, which
prints what a launch would start. The layout on its standard input is one JSON object::

    {
      "run_id": "dry-run",                     optional
      "log_dir": "logs",                       optional
      "devices": ["0", "1"],                   optional: plan for these devices instead of this node's
      "groups": [
        {
          "group": "actor",
          "process_on_nodes": [2, 2],          virtual nodes of this host; devices are counted on from node to node
          "module": "rpcrl.runtime.worker_main",   optional
          "device": "cuda",                    "cpu", "cuda" or null; optional, null
          "slot_offset": [0, 2],               optional: first device slot of each node
          "roles": ["actor", "rollout"],       optional
          "environment": {"OMP_NUM_THREADS": "4"}  optional
        }
      ]
    }

The answer is ``{"processes": [...], "violations": [...]}``; of the environment it holds only what the launcher
sets, and values of variables whose names look secret are masked. It ends with status 2 when there are violations.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from launcher.devices import Inventory
from rpcrl import env
from rpcrl.errors import ConfigError, DispatchError, UsageError, Violation
from rpcrl.logs import log_name
from rpcrl.topology import ResourcePool, pick_device
from rpcrl.wire.messages import StartWorkers, WorkerStart

__all__ = ["BOOTSTRAP_FD_NUMBER", "Node", "ProcessSpec", "plan_layout", "plan_workers"]

BOOTSTRAP_FD_NUMBER = 3
"""Every worker finds its bootstrap bytes on this descriptor; the variable names it, so nobody needs to know."""

DEFAULT_MODULE = "rpcrl.runtime.worker_main"
_MASKED = re.compile(r"TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL|API_?KEY|PRIVATE", re.IGNORECASE)


@dataclass(frozen=True)
class Node:
    """What the plan needs to know of the node that it is for."""

    run_id: str
    log_dir: str
    python: str
    """Path of the interpreter."""
    agent_pid: int
    environment: Mapping[str, str] = field(repr=False)
    """The agent's own environment, which workers inherit in part."""
    inventory: Inventory = field(default_factory=Inventory)


@dataclass(frozen=True)
class ProcessSpec:
    """One worker process, ready to be started."""

    identity: str
    group: str
    rank: int
    local_rank: int
    node_rank: int
    roles: tuple[str, ...]
    device: str | None
    """Id of its real device; None without one."""
    argv: tuple[str, ...]
    variables: Mapping[str, str]
    """What the launcher and the group set."""
    environment: Mapping[str, str] = field(repr=False)
    """The whole environment: what is inherited, and ``variables`` over it."""
    log_path: str = ""
    bootstrap: bytes = field(default=b"", repr=False)


def plan_workers(start: StartWorkers, node: Node) -> list[ProcessSpec]:
    """Return one spec per worker, in the message's order.

    Raises ConfigError with the problems of all workers at once: protected or impossible variables, too few devices,
    two ranks on one device.
    """
    violations = _environment_violations(start)
    devices, device_violations = _assign_devices(start, node.inventory)
    violations += device_violations
    if violations:
        raise ConfigError(violations)
    inherited = env.without_launcher(node.environment, also={*env.PROTECTED, *env.THREAD_VARIABLES})
    specs = []
    for worker, device in zip(start.workers, devices, strict=True):
        variables = _variables(start, worker, device, node)
        specs.append(
            ProcessSpec(
                identity=worker.identity,
                group=start.group,
                rank=worker.rank,
                local_rank=worker.local_rank,
                node_rank=worker.node_rank,
                roles=worker.roles,
                device=device,
                argv=(node.python, "-P", "-m", "launcher.shim", start.module),
                variables=variables,
                environment={**inherited, **variables},
                log_path=f"{node.log_dir.rstrip('/')}/{log_name(start.group, worker.rank)}",
                bootstrap=worker.bootstrap,
            )
        )
    return specs


def _environment_violations(start: StartWorkers) -> list[Violation]:
    violations = []
    for name, value in sorted(start.environment.items()):
        key = f"group {start.group!r}, environment[{name!r}]"
        if name in env.PROTECTED:
            violations.append(
                Violation(
                    key, "is set by the launcher for every worker", (f"remove {name} from the group's environment",)
                )
            )
        elif not name or "=" in name or "\0" in name or "\0" in value:
            violations.append(
                Violation(key, "no process can have such a variable", ("use a name without '=' and no NUL byte",))
            )
    return violations


def _assign_devices(start: StartWorkers, inventory: Inventory) -> tuple[list[str | None], list[Violation]]:
    """Return each worker's real device, and what is wrong with the assignment."""
    if start.device != "cuda":
        return [None] * len(start.workers), []
    assigned: list[str | None] = []
    violations = []
    holders: dict[str, int] = {}
    for worker in start.workers:
        device = None
        key = f"group {start.group!r}, rank {worker.rank}"
        slot = worker.local_rank if worker.device_slot is None else worker.device_slot
        try:
            device = pick_device(inventory.devices, slot, source=inventory.source)
        except DispatchError as error:
            needed = f"; the group asks for {len(start.workers)} devices here"
            violations.append(Violation(f"{key} (local rank {worker.local_rank})", f"{error}{needed}"))
        else:
            if device in holders:
                violations.append(_shared_device(key, device, holders[device], worker, inventory))
            holders.setdefault(device, worker.rank)
        assigned.append(device)
    return assigned, violations


def _shared_device(key: str, device: str, other: int, worker: WorkerStart, inventory: Inventory) -> Violation:
    return Violation(
        key,
        f"would share device {device} with rank {other} of the same group (slot {worker.device_slot} of "
        f"{', '.join(inventory.devices)}; from {inventory.source}), and NCCL refuses two ranks on one device",
        ("give the pool one slot per device", "or put the second group of ranks into another group"),
    )


def _variables(start: StartWorkers, worker: WorkerStart, device: str | None, node: Node) -> dict[str, str]:
    """Return what one worker gets: defaults, then the group's own, then what nobody may change."""
    variables = dict.fromkeys(env.THREAD_VARIABLES, "1")
    variables["PYTHONUNBUFFERED"] = "1"
    variables[env.HUGE_PAGES] = node.environment.get(env.HUGE_PAGES, "1")
    if device is not None and node.inventory.pci_order:
        variables["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    variables |= start.environment
    variables |= {
        "RANK": str(worker.rank),
        "WORLD_SIZE": str(worker.world_size),
        "LOCAL_RANK": str(worker.local_rank),
        "LOCAL_WORLD_SIZE": str(worker.local_world_size),
        "NODE_RANK": str(worker.node_rank),
        # Empty, not unset: a worker without a device must not come across the GPUs that happen to be here.
        env.VISIBLE_DEVICES: device or "",
        env.RUN_ID: node.run_id,
        env.WORKER_ID: worker.identity,
        env.PARENT_PID: str(node.agent_pid),
        env.BOOTSTRAP_FD: str(BOOTSTRAP_FD_NUMBER),
    }
    return variables


# ---- python -m launcher plan ------------------------------------------------------------------------------------


def plan_layout(layout: Mapping[str, object], node: Node) -> dict[str, list[dict[str, object]]]:
    """Return the processes of a layout (see the module's docstring) and all its violations as plain data."""
    processes: list[dict[str, object]] = []
    violations: list[Violation] = []
    groups = layout.get("groups")
    if not isinstance(groups, list) or not groups:
        violations.append(Violation("groups", f"must be a list of at least one group, not {groups!r}"))
        groups = []
    for number, group in enumerate(groups):
        try:
            start = _layout_group(group, f"groups[{number}]")
            processes += [_printable(spec) for spec in plan_workers(start, node)]
        except ConfigError as error:
            violations += error.violations
    return {
        "processes": [] if violations else processes,
        "violations": [
            {"key": found.key, "problem": found.problem, "remedies": list(found.remedies)} for found in violations
        ],
    }


_GROUP_KEYS = ("group", "process_on_nodes", "module", "device", "slot_offset", "roles", "environment")


def _layout_group(group: object, key: str) -> StartWorkers:
    if not isinstance(group, Mapping):
        raise ConfigError([Violation(key, f"must be an object with the keys {', '.join(_GROUP_KEYS)}")])
    violations = [
        Violation(f"{key}.{name}", "is not a key of a group", (f"one of {', '.join(_GROUP_KEYS)}",))
        for name in group
        if name not in _GROUP_KEYS
    ]
    name = group.get("group")
    if not isinstance(name, str) or not name:
        violations.append(Violation(f"{key}.group", f"must be the group's name, not {name!r}"))
    environment = group.get("environment", {})
    if not isinstance(environment, Mapping) or not all(isinstance(value, str) for value in environment.values()):
        violations.append(Violation(f"{key}.environment", "must map names to strings"))
    roles = group.get("roles", [])
    if not isinstance(roles, Sequence) or isinstance(roles, str):
        violations.append(Violation(f"{key}.roles", f"must be a list of role names, not {roles!r}"))
    counts = group.get("process_on_nodes", [1])
    offsets = group.get("slot_offset") or _running_sum(counts)
    try:
        pool = ResourcePool(counts, device=group.get("device"), _slot_offset=offsets)
        seats = pool.placements()
    except (UsageError, TypeError, IndexError) as error:
        violations.append(Violation(f"{key}.process_on_nodes", str(error)))
    if violations:
        raise ConfigError(violations)
    workers = tuple(
        WorkerStart(
            identity=f"{name}.rank{seat.rank}",
            rank=seat.rank,
            world_size=seat.world_size,
            node_rank=seat.node_rank,
            local_rank=seat.local_rank,
            local_world_size=seat.local_world_size,
            device_slot=seat.device_slot,
            roles=tuple(roles),
            bootstrap=b"",
        )
        for seat in seats
    )
    return StartWorkers(str(name), str(group.get("module", DEFAULT_MODULE)), pool.device, workers, environment)


def _running_sum(counts: object) -> list[int]:
    """Return where each virtual node's devices begin when the nodes share one host."""
    offsets = [0]
    for count in counts if isinstance(counts, list) else []:
        offsets.append(offsets[-1] + (count if isinstance(count, int) else 0))
    return offsets[:-1]


def _printable(spec: ProcessSpec) -> dict[str, object]:
    return {
        "identity": spec.identity,
        "group": spec.group,
        "rank": spec.rank,
        "node_rank": spec.node_rank,
        "local_rank": spec.local_rank,
        "roles": list(spec.roles),
        "device": spec.device,
        "argv": list(spec.argv),
        "environment": {
            name: "***" if _MASKED.search(name) else value
            for name, value in sorted(spec.variables.items())
            if name not in (env.PARENT_PID, env.BOOTSTRAP_FD)
        },
        "log_path": spec.log_path,
    }
