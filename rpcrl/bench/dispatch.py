"""Which calls are measured, with which systems, and in which order? One run of ``rpcrl bench dispatch``.

For every number of workers and every transport all systems are started, and then each case is measured with all of
them turn by turn.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from rpcrl.bench.driver import Setup, Task
from rpcrl.bench.measure import Case, Row, measure
from rpcrl.bench.systems import Running, System, SystemFailed, start_all
from rpcrl.errors import UsageError

__all__ = ["CASES", "DATA_CASES", "KIB", "Plan", "Report", "check_plan", "run_plan", "tasks_of"]

KIB = 1 / 1024
MEMORY_KEPT = 0.6
"""Share of what is free that the batches of all systems may take together."""
COPIES_OF_A_BATCH = 5
"""Of each system: the batch, the workers' parts, what is queued, the results, what the driver makes of them."""
WORKERS_PER_CORE = 8
MIN_WORKERS_ALLOWED = 16

DATA_CASES: Mapping[str, tuple[float, ...]] = {
    "scatter_gather": (KIB, 1.0, 64.0, 256.0),
    "broadcast": (1.0, 64.0),
    "reference_chain": (64.0,),
}
"""Case → sizes in MiB, of all rows in sum. Each is measured untouched and touched."""
CASES: tuple[str, ...] = (
    "ping",
    "ping_same_threads",
    "scatter_gather",
    "broadcast",
    "in_flight",
    "reference_chain",
    "peer_call",
    "cold_start",
    "copy",
)
VARIANTS = ("untouched", "touched")


@dataclass(frozen=True)
class Plan:
    """What is asked for."""

    systems: tuple[System, ...]
    workers: tuple[int, ...]
    transports: tuple[str, ...]
    cases: tuple[str, ...]
    mib: tuple[float, ...] = ()
    """Sizes instead of each case's own."""
    rounds: int = 30
    budget_s: float = 15.0
    """For one case with one number of workers, all systems together."""
    cold_starts: int = 3


@dataclass
class Report:
    """What was found."""

    rows: list[Row] = field(default_factory=list)
    about: dict[str, str] = field(default_factory=dict)
    """System → its version."""
    not_measured: dict[str, str] = field(default_factory=dict)
    """System, with the number of workers or the case → why there are no rows of it."""
    no_such_case: dict[str, dict[str, str]] = field(default_factory=dict)
    """System → case that it does not have → why."""


def tasks_of(plan: Plan) -> list[Task]:
    """Return the tasks in the order in which they are measured."""
    tasks: list[Task] = []
    for case in plan.cases:
        if case in DATA_CASES:
            sizes = plan.mib or DATA_CASES[case]
            tasks += [Task(case, variant, mib) for mib in sizes for variant in VARIANTS]
        elif case == "copy":
            sizes = plan.mib or tuple(
                sorted({mib for name in plan.cases for mib in DATA_CASES.get(name, ())} or {64.0})
            )
            tasks += [Task(case, "", mib) for mib in sizes]
        else:
            tasks.append(Task(case, "", 0.0))
    return tasks


def check_plan(plan: Plan) -> None:
    """Raise UsageError, before anything is started, for what this machine or the benchmark cannot do."""
    problems: list[str] = []
    cores = os.cpu_count() or 1
    most = max(MIN_WORKERS_ALLOWED, WORKERS_PER_CORE * cores)
    if too_many := [count for count in plan.workers if not 1 <= count <= most]:
        problems.append(
            f"--workers {','.join(map(str, too_many))}: from 1 to {most} on this machine of {cores} cores; beyond that"
            " the scheduler is measured and not the call"
        )
    if unknown := [case for case in plan.cases if case not in CASES]:
        problems.append(f"--cases {','.join(unknown)}: known are {', '.join(CASES)}")
    if wrong := [transport for transport in plan.transports if transport not in ("ipc", "tcp")]:
        problems.append(f"--transport {','.join(wrong)}: ipc, or tcp (always with CURVE keys)")
    problems += [f"--rivals {system.name}: {system.missing}" for system in plan.systems if system.missing]
    if small := [mib for mib in plan.mib if mib < KIB]:
        problems.append(f"--mib {','.join(f'{mib:g}' for mib in small)}: at least {KIB:g} (1 KiB)")
    largest = max((task.mib for task in tasks_of(plan)), default=0.0)
    need = largest * COPIES_OF_A_BATCH * len(plan.systems)
    have = _available_mib() * MEMORY_KEPT
    if need > have:
        problems.append(
            f"--mib {largest:g}: {len(plan.systems)} systems with {COPIES_OF_A_BATCH} copies each take about"
            f" {need:,.0f} MiB, and {have:,.0f} MiB may be used here; take smaller batches or fewer --rivals"
        )
    if problems:
        raise UsageError("nothing was started:\n  " + "\n  ".join(problems))


def run_plan(plan: Plan, on_rows: Callable[[Sequence[Row]], None] = lambda _: None) -> Report:
    """Measure; ``on_rows`` gets the rows of each case when it is done. A system that fails is left out from then on."""
    report = Report()
    for transport in plan.transports:
        for workers in plan.workers:
            systems = [system for system in plan.systems if _takes_part(system, transport, plan)]
            running, failed = start_all(systems, Setup(workers, transport))
            report.not_measured.update({f"{name}, {workers} workers": why for name, why in failed.items()})
            report.about.update({each.system.name: each.about for each in running})
            try:
                for task in tasks_of(plan):
                    rows = _measure_task(plan, task, running, report)
                    report.rows += rows
                    on_rows(rows)
            finally:
                for each in running:
                    each.close()
    return report


def _takes_part(system: System, transport: str, plan: Plan) -> bool:
    """Rivals have one way of sending each: they are measured once, beside the first transport."""
    return system.name in ("rpcrl", "raw_zmq") or transport == plan.transports[0]


def _measure_task(plan: Plan, task: Task, running: list[Running], report: Report) -> list[Row]:
    cases: list[Case] = []
    for system in list(running):
        try:
            supported = system.prepare(task)
        except SystemFailed as error:
            _give_up(system, task, error, running, report)
            continue
        if supported:
            setup = system.setup
            sample = _sampler(system, task, running, report)
            name, transport = system.system.name, _transport_of(system.system.name, setup.transport)
            cases.append(Case(name, task.case, sample, task.variant, setup.workers, task.mib, transport))
        else:
            report.no_such_case.setdefault(system.system.name, {})[task.case] = system.reasons[task]
    if not cases:
        return []
    once = task.case == "cold_start"
    rounds, warm_up = (plan.cold_starts, 0) if once else (plan.rounds, 3)
    rows = measure(cases, rounds=rounds, warm_up=warm_up, budget_s=plan.budget_s, per_turn=1 if once else None)
    return [row for row in rows if row.n]


def _sampler(system: Running, task: Task, running: list[Running], report: Report) -> Callable[[int], list[float]]:
    def sample(count: int) -> list[float]:
        if system not in running:
            return []
        try:
            return system.run(count)
        except SystemFailed as error:
            _give_up(system, task, error, running, report)
            return []

    return sample


def _give_up(system: Running, task: Task, error: SystemFailed, running: list[Running], report: Report) -> None:
    report.not_measured[f"{system.system.name}, from {task.case} on"] = str(error)
    running.remove(system)
    system.close()


def _transport_of(name: str, transport: str) -> str:
    if name == "rpcrl" and transport == "tcp":
        return "tcp+curve"
    return transport if name in ("rpcrl", "raw_zmq") else "own"


def _available_mib() -> float:
    with open("/proc/meminfo", encoding="ascii") as file:
        fields = dict(line.split(":", 1) for line in file)
    return int(fields["MemAvailable"].split()[0]) / 1024
