"""What did the workers of a run print? ``rpcrl logs`` finds the files, of the latest run by itself, and shows them."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import click

from rpcrl.errors import UsageError
from rpcrl.leftovers import run_lives
from rpcrl.runtime.run_logs import RunLogs, WorkerLog, find_run, run_logs

__all__ = ["logs"]

POLL_S = 0.2
AGENT_LOG = "agent.log"


@click.command()
@click.argument("run", required=False, metavar="[RUN]")
@click.option("--rank", type=int, metavar="N", help="Only this rank (of each group).")
@click.option("--role", metavar="R", help="Only workers of this role, or of the group of this name.")
@click.option("--tail", type=click.IntRange(min=0), default=20, metavar="K", help="Last lines of each file (20).")
@click.option("--follow", is_flag=True, help="Go on with new lines until the run ends.")
def logs(run: str | None, rank: int | None, role: str | None, tail: int, follow: bool) -> None:
    """Show the paths and the last lines of a run's logs.

    RUN is a run directory, a directory of logs, or (a part of) a run's id; without it the latest run is taken.
    """
    found = run_logs(find_run(run))
    chosen = [worker for worker in found.workers if _is_wanted(worker, rank, role)]
    lives = run_lives(found.run_id)
    state = "it runs" if lives else "it has ended"
    click.echo(f"logs of run {found.run_id or 'unknown'} ({state}): {found.directory}")
    if not chosen and not (follow and lives):
        raise UsageError(_none_fit(found, rank, role))
    readers = {worker.file: _Reader(found.directory / worker.file) for worker in chosen}
    for worker in chosen:
        _show(_label(worker), readers[worker.file], tail, unfinished=not lives)
    agent = found.directory / AGENT_LOG
    if rank is None and role is None and agent.is_file() and agent.stat().st_size:  # it speaks when something is wrong
        _show("[agent]", _Reader(agent), tail, unfinished=True)
    if follow:
        _follow(found, readers, lambda worker: _is_wanted(worker, rank, role))


def _is_wanted(worker: WorkerLog, rank: int | None, role: str | None) -> bool:
    return (rank is None or worker.rank == rank) and (role is None or role in worker.roles or role == worker.group)


def _none_fit(found: RunLogs, rank: int | None, role: str | None) -> str:
    asked = " and ".join([f"rank {rank}"] * (rank is not None) + [f"role {role!r}"] * (role is not None))
    groups: dict[str, list[WorkerLog]] = {}
    for worker in found.workers:
        groups.setdefault(worker.group, []).append(worker)
    there = ", ".join(f"{name} ({'+'.join(group[0].roles)}, {len(group)} ranks)" for name, group in groups.items())
    return f"no worker of this run is {asked or 'known'}; its groups: {there or 'none was started'}"


def _label(worker: WorkerLog) -> str:
    return f"[{'+'.join(worker.roles)} {worker.rank}]"


def _show(label: str, reader: _Reader, tail: int, *, unfinished: bool) -> None:
    click.echo(f"\n{label} {reader.path}")
    if not reader.path.is_file():
        click.echo("  (no such file: the worker was not started, or the file was removed)")
    for line in deque(reader.lines(unfinished=unfinished), maxlen=tail):
        click.echo(f"  {line}")


def _follow(found: RunLogs, readers: dict[str, _Reader], is_wanted: Callable[[WorkerLog], bool]) -> None:
    """Print new lines of all chosen workers, also of groups that start meanwhile, until the run has ended."""
    click.echo("")
    pause = threading.Event()
    while True:
        lives = run_lives(found.run_id)
        for worker in run_logs(found.directory).workers:
            if not is_wanted(worker):
                continue
            reader = readers.setdefault(worker.file, _Reader(found.directory / worker.file))
            for line in reader.lines(unfinished=not lives):
                click.echo(f"{_label(worker)} {line}")
        if not lives:
            return  # what was written before the end has been read after it
        pause.wait(POLL_S)


@dataclass
class _Reader:
    """Reads one log file, from where it has come."""

    path: Path
    _offset: int = 0
    _rest: bytes = field(default=b"", repr=False)

    def lines(self, *, unfinished: bool) -> Iterator[str]:
        """Yield the lines since the last time; one without its end only if it may be ``unfinished``."""
        try:
            stream = self.path.open("rb")
        except OSError:
            return
        with stream:
            stream.seek(self._offset)
            for piece in stream:
                self._offset += len(piece)
                self._rest += piece
                if self._rest.endswith(b"\n"):
                    yield self._take()
        if self._rest and unfinished:
            yield self._take()

    def _take(self) -> str:
        line, self._rest = self._rest, b""
        return line.decode("utf-8", errors="replace").rstrip("\r\n").rpartition("\r")[2]
