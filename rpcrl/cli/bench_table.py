"""How are rows of a benchmark shown on a terminal? One table a case, each row beside raw ZeroMQ's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from rpcrl.bench.measure import Row, duration

if TYPE_CHECKING:
    from rpcrl.bench.dispatch import Plan, Report

__all__ = ["show", "show_about", "show_end"]

_console = Console(highlight=False)


def show_about(plan: Plan, absent: Mapping[str, str]) -> None:
    """Say what is going to be measured, and what is not."""
    names = ", ".join(system.name for system in plan.systems)
    _console.print(f"systems: {names}; workers {plan.workers}; transports {plan.transports} (tcp is always with CURVE)")
    for name, why in absent.items():
        _console.print(f"not measured: {name}: {why}", markup=False, soft_wrap=True, style="dim")


def show(rows: Sequence[Row]) -> None:
    """Show the rows of one case."""
    if not rows:
        return
    first = rows[0]
    size = f", {first.mib:g} MiB" if first.mib >= 1 else f", {first.mib * 1024:g} KiB" if first.mib else ""
    title = f"{first.case}{size}{', ' + first.variant if first.variant else ''}, {first.workers} workers"
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    table.add_column("system", min_width=10)
    table.add_column("transport", min_width=10)
    for name in ("median", "p99", "spread", "× raw_zmq", "n"):
        table.add_column(name, justify="right", min_width=9)
    floor = next((row.p50_s for row in rows if row.system == "raw_zmq"), 0.0)
    for row in sorted(rows, key=lambda row: row.p50_s):
        ratio = f"{row.p50_s / floor:.2f}" if floor else "–"
        cells = (duration(row.p50_s), duration(row.p99_s), f"{row.spread:.0%}", ratio, str(row.n))
        table.add_row(row.system, row.transport, *cells, style="bold" if row.system == "rpcrl" else None)
    _console.print(table)
    _console.print()


def show_end(report: Report, surroundings: Mapping[str, object], absent: Mapping[str, str]) -> None:
    """Show the machine, the versions, and why something was not measured."""
    _console.print(
        f"{surroundings['cpu']}, {surroundings['cores']} cores, load {surroundings['load_1min']}, Python "
        f"{surroundings['python']}, commit {surroundings['commit']}, {surroundings['time_utc']}",
        soft_wrap=True,
    )
    _console.print("; ".join(f"{name}: {about}" for name, about in report.about.items()), markup=False, soft_wrap=True)
    for name, why in {**absent, **report.not_measured}.items():
        _console.print(f"not measured: {name}: {why}", markup=False, soft_wrap=True, style="dim")
    for name, cases in report.no_such_case.items():
        if name != "memcpy":  # it copies, and takes no calls
            _console.print(f"{name} has no {', '.join(cases)}", markup=False, soft_wrap=True, style="dim")
