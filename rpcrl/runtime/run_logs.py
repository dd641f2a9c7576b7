"""Where are the logs of a run, and who wrote which file? Kept on disk, so that they are found after the run too.

::

    TMPDIR/rpcrl-logs-UID/RUN_ID      the logs of a run; a link where the run keeps them elsewhere (log_dir=…)
      agent.log
      GROUP.rankN.log                 all that one worker wrote
      workers.jsonl                   one line a worker: run, group, rank, roles, file
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rpcrl.errors import UsageError
from rpcrl.logs import get_logger, log_name

if TYPE_CHECKING:
    from rpcrl.runtime.membership import Member

__all__ = ["RunLogs", "WorkerLog", "find_run", "log_parent", "note_workers", "open_log_dir", "run_logs"]

INDEX = "workers.jsonl"
logger = get_logger(__name__)


@dataclass(frozen=True)
class WorkerLog:
    """The log file of one worker."""

    run_id: str
    group: str
    rank: int
    roles: tuple[str, ...]
    file: str
    """Name in the directory of the run's logs."""


@dataclass(frozen=True)
class RunLogs:
    """What is known of a run's logs; ``run_id`` is empty when no worker was started."""

    directory: Path
    run_id: str
    workers: tuple[WorkerLog, ...]


def log_parent() -> Path:
    """Return the folder that holds, or links to, the logs of all runs of this user."""
    return Path(tempfile.gettempdir()) / f"rpcrl-logs-{os.getuid()}"


def open_log_dir(run_id: str, log_dir: str | Path | None) -> Path:
    """Make the directory of a run's logs and return it; one that the user names is linked to, so that it is found.

    Raises UsageError when the folder for all runs belongs to somebody else.
    """
    parent = log_parent()
    if log_dir is None:
        _make_parent(parent)
        directory = parent / run_id
        directory.mkdir(exist_ok=True)
        return directory
    directory = Path(log_dir).absolute()
    directory.mkdir(parents=True, exist_ok=True)
    try:
        _make_parent(parent)
        for link in parent.iterdir():
            if link.is_symlink() and not link.exists():
                link.unlink(missing_ok=True)  # those logs were removed
        (parent / run_id).symlink_to(directory)
    except (OSError, UsageError) as error:
        logger.warning("`rpcrl logs` will not find %s by itself: %s", directory, error)
    return directory


def _make_parent(parent: Path) -> None:
    parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if (owner := parent.lstat().st_uid) != os.getuid():  # in /tmp somebody else may have put it there
        raise UsageError(
            f"{parent} belongs to user {owner}, not to user {os.getuid()}: name a directory for the logs, "
            "Controller(log_dir=…), or another TMPDIR"
        )


def note_workers(directory: Path, run_id: str, group: str, members: Iterable[Member]) -> None:
    """Write down which worker of a group writes which file. A full disk costs the note, never the run."""
    workers = [WorkerLog(run_id, group, member.rank, member.roles, log_name(group, member.rank)) for member in members]
    try:
        with (directory / INDEX).open("a", encoding="utf-8") as index:
            index.write("".join(json.dumps(asdict(worker)) + "\n" for worker in workers))
    except OSError as error:
        logger.warning("%s cannot be written: %s", directory / INDEX, error)


def run_logs(directory: Path) -> RunLogs:
    """Return the logs of the last run in a directory, in the order in which its workers were started."""
    found: dict[str, WorkerLog] = {}
    try:
        lines = (directory / INDEX).read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    for line in lines:
        try:
            entry = json.loads(line)
            worker = WorkerLog(**{**entry, "roles": tuple(entry["roles"])})
        except (ValueError, TypeError, KeyError):
            continue  # a line that is being written, or was cut
        found.pop(worker.file, None)
        found[worker.file] = worker
    run_id = next(reversed(found.values())).run_id if found else ""
    return RunLogs(directory, run_id, tuple(worker for worker in found.values() if worker.run_id == run_id))


def find_run(name: str | None) -> Path:
    """Return the directory of a run's logs: of the latest run, or of one named by its id, a part of it, or a path.

    A path may be that of the logs or of the run directory of a launch. Raises UsageError, with the runs that there are.
    """
    if name is not None and (path := Path(name)).is_dir():
        directory = path / "logs" if (path / "logs").is_dir() else path
        if not (directory / INDEX).is_file() and not (directory / "agent.log").is_file():
            raise UsageError(f"{path} holds no logs of a run: it has neither {INDEX} nor agent.log, nor a folder logs")
        return directory.resolve()
    parent = log_parent()
    runs = sorted((entry for entry in parent.iterdir() if entry.is_dir()), key=_age) if parent.is_dir() else []
    if not runs:
        raise UsageError(f"no run of rpcrl has left logs in {parent}; name a directory: rpcrl logs RUN_DIR")
    fitting = [run for run in runs if name is None or name in run.name]
    if name is not None and len(fitting) != 1 and any(run.name == name for run in fitting):
        fitting = [run for run in fitting if run.name == name]
    if not fitting or (name is not None and len(fitting) > 1):
        what = f"{len(fitting)} runs fit {name!r}" if fitting else f"no run and no directory {name!r}"
        shown = ", ".join(run.name for run in reversed((fitting or runs)[-5:]))
        raise UsageError(f"{what}; the latest in {parent}: {shown}")
    return fitting[-1].resolve()


def _age(run: Path) -> tuple[float, str]:
    index = run / INDEX
    return (index if index.is_file() else run).stat().st_mtime, run.name
