"""What does a call cost on this machine, beside other systems? ``rpcrl bench dispatch`` measures and shows it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from rpcrl.errors import RpcrlError, UsageError

if TYPE_CHECKING:
    from rpcrl.bench.dispatch import Plan, Report
    from rpcrl.bench.measure import Row
    from rpcrl.bench.systems import System

__all__ = ["bench"]

MAX_PEERS = 4_096
QUICK_ROUNDS, QUICK_BUDGET_S = 5, 2.0


@click.group()
def bench() -> None:
    """Measure what rpcrl costs on this machine."""


@bench.command()
@click.option("--workers", default="1,2,4,8,16", show_default=True, metavar="N,…", help="Numbers of workers.")
@click.option("--mib", metavar="M,…", help="Sizes of the batches in MiB, instead of each case's own.")
@click.option("--cases", metavar="C,…", help="Only these cases; --cases list names them.")
@click.option("--transport", default="ipc,tcp", show_default=True, metavar="T,…", help="ipc; tcp is always with CURVE.")
@click.option(
    "--rivals",
    default="installed",
    show_default=True,
    metavar="R,…",
    help="ray, verl_ray, monarch, torch_rpc; or all, installed, none. Raw ZeroMQ and memcpy are always there.",
)
@click.option("--rival-python", multiple=True, metavar="R=PATH", help="The interpreter that has a rival.")
@click.option(
    "--rivals-dir",
    default=".rivals",
    show_default=True,
    type=click.Path(path_type=Path),
    help="Where `make bench-rivals` has put environments.",
)
@click.option(
    "--rounds", type=click.IntRange(min=3), default=30, show_default=True, help="Turns of each system in each case."
)
@click.option(
    "--budget",
    "budget_s",
    type=click.FloatRange(min=0.1),
    default=15.0,
    show_default=True,
    metavar="S",
    help="Seconds for a case, all systems together; three rounds are made anyhow.",
)
@click.option(
    "--quick", is_flag=True, help="A look: 5 rounds, 2 and 8 workers, up to 1 MiB, where nothing else is said."
)
@click.option(
    "--json",
    "json_path",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Write rows and machine to FILE.",
)
@click.option(
    "--picture", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE.svg", help="Draw the medians."
)
@click.option("--dry-run", is_flag=True, help="Check the request, say what would be measured, and end.")
@click.pass_context
def dispatch(
    context: click.Context,
    workers: str,
    mib: str | None,
    cases: str | None,
    transport: str,
    rivals: str,
    rival_python: tuple[str, ...],
    rivals_dir: Path,
    rounds: int,
    budget_s: float,
    quick: bool,
    json_path: Path | None,
    picture: Path | None,
    dry_run: bool,
) -> None:
    """Time calls on worker groups beside raw ZeroMQ, memcpy and rivals, in one run, turn by turn."""
    from rpcrl.bench import dispatch as measuring
    from rpcrl.cli.bench_table import show, show_about

    if cases == "list":
        click.echo("\n".join(measuring.CASES))
        return

    def is_given(name: str) -> bool:
        return context.get_parameter_source(name) is not click.core.ParameterSource.DEFAULT

    if quick:
        workers = workers if is_given("workers") else "2"
        transport = transport if is_given("transport") else "ipc"
        mib = mib or "1"
        rounds = rounds if is_given("rounds") else QUICK_ROUNDS
        budget_s = budget_s if is_given("budget_s") else QUICK_BUDGET_S
    for path in (json_path, picture):
        if path is not None and not path.absolute().parent.is_dir():
            raise click.UsageError(f"{path}: there is no folder {path.absolute().parent}")
    plan = measuring.Plan(
        systems=(),
        workers=tuple(int(count) for count in _numbers("--workers", workers, whole=True)),
        transports=tuple(_words(transport)),
        cases=tuple(_words(cases)) if cases else measuring.CASES,
        mib=tuple(_numbers("--mib", mib)) if mib else (),
        rounds=rounds,
        budget_s=budget_s,
        cold_starts=1 if quick else 3,
    )
    try:
        systems, absent = _systems(rivals, rivals_dir, _pythons(rival_python))
        plan = replace(plan, systems=systems)
        measuring.check_plan(plan)
    except UsageError as refused:
        raise click.UsageError(str(refused)) from None
    show_about(plan, absent)
    if dry_run:
        return
    report = measuring.run_plan(plan, show)
    _finish(plan, report, absent, json_path, picture)


@bench.command()
@click.option("--peers", default="64,256,1024", show_default=True, metavar="N,…", help="Numbers of simulated workers.")
@click.option("--rounds", type=click.IntRange(min=3), default=30, show_default=True, help="Turns of each number.")
def peers(peers: str, rounds: int) -> None:
    """Time what one controller pays for each worker and call, with many simulated workers."""
    from rpcrl.bench.measure import Case, duration, measure, timed
    from rpcrl.bench.peers import LightPeers

    counts = [int(count) for count in _numbers("--peers", peers, whole=True)]
    if any(not 1 <= count <= MAX_PEERS for count in counts):
        raise click.UsageError(f"--peers {peers}: from 1 to {MAX_PEERS}")
    with contextlib.ExitStack() as stack:
        groups = [stack.enter_context(LightPeers(count)) for count in counts]
        cases = [
            Case("rpcrl", "light_peers", timed(group.call_all), workers=count)
            for group, count in zip(groups, counts, strict=True)
        ]
        rows = measure(cases, rounds=rounds, budget_s=60.0, per_turn=1)
    least = rows[0].p50_s / rows[0].workers
    for row in rows:
        each = row.p50_s / row.workers
        click.echo(
            f"{row.workers:>6} workers: {duration(row.p50_s)} a call, {duration(each)} a worker, "
            f"{each / least:.2f} × the first"
        )


def _finish(plan: Plan, report: Report, absent: dict[str, str], json_path: Path | None, picture: Path | None) -> None:
    from rpcrl.bench.measure import environment
    from rpcrl.cli.bench_table import show_end

    surroundings = environment()
    show_end(report, surroundings, absent)
    if json_path is not None:
        document = {
            "benchmark": "rpcrl bench dispatch",
            "environment": surroundings,
            "systems": report.about,
            "not_measured": {**absent, **report.not_measured},
            "no_such_case": report.no_such_case,
            "rows": [row.plain() for row in report.rows],
        }
        json_path.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        click.echo(f"rows written to {json_path}")
    if picture is not None:
        from rpcrl.bench.picture import draw

        subtitle = f"{surroundings['cpu']}, {surroundings['cores']} cores, {surroundings['time_utc']}"
        picture.write_text(draw(report.rows, "What a call costs", subtitle), encoding="utf-8")
        click.echo(f"picture written to {picture}")
    if not _measured_ours(report.rows):
        raise RpcrlError("rpcrl itself could not be measured; the reasons stand above")


def _measured_ours(rows: Sequence[Row]) -> bool:
    return any(row.system == "rpcrl" for row in rows)


def _systems(rivals: str, venvs: Path, pythons: dict[str, str]) -> tuple[tuple[System, ...], dict[str, str]]:
    """Return what is to be measured, and what is absent with the reason; a rival asked for by name stays in."""
    from rpcrl.bench.systems import ALWAYS, RIVALS, find_system

    named = [] if rivals in ("none", "installed") else list(RIVALS) if rivals == "all" else _words(rivals)
    looked_for = list(RIVALS) if rivals == "installed" else named
    found = [find_system(name, venvs, pythons) for name in dict.fromkeys([*ALWAYS, *looked_for])]
    absent = {system.name: system.missing for system in found if system.missing and system.name not in named}
    if rivals not in ("installed", "all"):
        absent |= {name: "not asked for (--rivals)" for name in RIVALS if name not in named}
    return tuple(system for system in found if system.name not in absent), absent


def _pythons(given: Sequence[str]) -> dict[str, str]:
    wrong = [text for text in given if "=" not in text]
    if wrong:
        raise UsageError(f"--rival-python {wrong[0]}: write NAME=PATH, e.g. ray=/path/to/bin/python")
    return dict(text.split("=", 1) for text in given)


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _numbers(option: str, text: str, *, whole: bool = False) -> list[float]:
    try:
        numbers = [float(int(word)) if whole else float(word) for word in _words(text)]
    except ValueError:
        kind = "whole numbers" if whole else "numbers"
        raise click.UsageError(f"{option} {text}: {kind}, with commas between them") from None
    if not numbers:
        raise click.UsageError(f"{option} {text!r}: name at least one number")
    return numbers
