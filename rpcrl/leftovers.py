"""What may a run leave behind, and who removes it?

Every descendant of a run carries ``RPCRL_RUN_ID``, so whoever survives finds them in ``/proc/PID/environ`` and
ends them; only processes of that one run are ever touched. A run directory (sockets) holds an owner file with the
driver's pid and its start time: the agent and the driver remove the directory, and when all were killed together
the next start does (``sweep_stale_runs``). What the run had in /dev/shm carries its id and goes with the directory.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import select
import shutil
import signal
import socket
import stat
import struct
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from rpcrl import env
from rpcrl.errors import UsageError

__all__ = [
    "BUDGET_OWNER_AT",
    "OWNER_FILE",
    "SHARED_MEMORY",
    "RunOwner",
    "create_run_dir",
    "descendants",
    "find_processes",
    "find_stale_runs",
    "find_stale_shared_memory",
    "machine_id",
    "machine_number",
    "remove_run_dir",
    "remove_shared_memory",
    "run_lives",
    "run_parent",
    "shared_memory_prefix",
    "start_ticks",
    "sweep_processes",
    "sweep_stale_runs",
]

OWNER_FILE = "owner.json"
"""Marks a directory as a run directory; without it nothing is ever removed."""

SHARED_MEMORY = "/dev/shm"
BUDGET_OWNER_AT = 64
"""Where in a run's budget its driver is named: pid, start time, machine, as 64-bit numbers. A pid of 0: not known."""
_PREFIX = "rpcrl-"
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunOwner:
    """Who made a run directory: enough to tell whether that process still lives."""

    run_id: str
    pid: int
    start_ticks: int
    machine: str
    host: str


# ---- processes ------------------------------------------------------------------------------------------------


def machine_id() -> str:
    """Return boot id and pid namespace: equal in two processes that see each other's pids."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"


def machine_number() -> int:
    """Return ``machine_id`` as a 64-bit number."""
    return int.from_bytes(hashlib.sha256(machine_id().encode()).digest()[:8], "little")


def start_ticks(pid: int) -> int | None:
    """Return the start time of a process in clock ticks since boot; None when it is gone or a zombie."""
    fields = _stat_fields(pid)
    if fields is None or fields[0] in ("Z", "X"):
        return None
    return int(fields[19])


def find_processes(run_id: str, *, worker_id: str | None = None) -> list[int]:
    """Return the pids of living processes that carry ``run_id`` (and ``worker_id``), less this process."""
    wanted = [f"{env.RUN_ID}={run_id}".encode()]
    if worker_id is not None:
        wanted.append(f"{env.WORKER_ID}={worker_id}".encode())
    return [pid for pid in _pids() if pid != os.getpid() and _carries(pid, wanted)]


def descendants(pid: int) -> list[int]:
    """Return the pids of all children of ``pid``, their children, and so on; zombies are left out."""
    children: dict[int, list[int]] = {}
    for other in _pids():
        fields = _stat_fields(other)
        if fields is not None and fields[0] not in ("Z", "X"):
            children.setdefault(int(fields[1]), []).append(other)
    found: list[int] = []
    queue = [pid]
    while queue:
        below = children.get(queue.pop(), [])
        found += below
        queue += below
    return found


def sweep_processes(
    run_id: str,
    *,
    worker_id: str | None = None,
    session: int | None = None,
    tree_of: int | None = None,
    spare: Iterable[int] = (),
    timeout_s: float = 3.0,
) -> list[int]:
    """Kill (SIGKILL) every process of a run and wait until it has ended; return the pids that were found.

    With ``worker_id`` only that worker's processes; also those of ``session`` and all below ``tree_of``, which
    catches processes that cleared their environment. This process and ``spare`` are never touched. Waits at most
    ``timeout_s``; what lives on after that is logged as a warning.
    """
    spared = {os.getpid(), *spare}

    def found() -> set[int]:
        pids = set(find_processes(run_id, worker_id=worker_id))
        if session is not None:
            pids.update(pid for pid in _pids() if _is_in_session(pid, session))
        if tree_of is not None:
            pids.update(descendants(tree_of))
        return pids - spared

    return _kill_until_gone(found, time.monotonic() + timeout_s)


def _kill_until_gone(found: Callable[[], set[int]], deadline_s: float) -> list[int]:
    """Kill what ``found`` names until it names nothing: a process may have forked while it was being killed."""
    killed: list[int] = []
    while pids := found():
        killed += sorted(pids.difference(killed))
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            _log.warning("processes %s did not end after SIGKILL (blocked in the kernel?)", sorted(pids))
            break
        _kill_and_wait(pids, left_s, found)
    return killed


def _kill_and_wait(pids: set[int], timeout_s: float, found: Callable[[], set[int]]) -> None:
    handles: dict[int, int] = {}
    waiting: set[int] = set()
    poller = select.poll()
    try:
        for pid in pids:
            try:
                handles[pid] = os.pidfd_open(pid)
            except ProcessLookupError:
                continue
        # A pid may have been reused between the look and the open; a handle that still matches cannot be.
        for pid in found() & handles.keys():
            try:
                signal.pidfd_send_signal(handles[pid], signal.SIGKILL)
            except (ProcessLookupError, PermissionError) as error:
                _log.debug("pid %d: %s", pid, error)
                continue
            poller.register(handles[pid], select.POLLIN)
            waiting.add(handles[pid])
        deadline_s = time.monotonic() + timeout_s
        while waiting and (left_s := deadline_s - time.monotonic()) > 0:
            ended = poller.poll(min(left_s, 0.2) * 1000)
            if not ended:
                break
            for handle, _ in ended:
                poller.unregister(handle)
                waiting.discard(handle)
    finally:
        for handle in handles.values():
            os.close(handle)


def _pids() -> Iterator[int]:
    for name in os.listdir("/proc"):
        if name.isdecimal():
            yield int(name)


def _carries(pid: int, wanted: list[bytes]) -> bool:
    """Tell whether a process was started with all of these variables; a zombie and a stranger carry none."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            variables = file.read().split(b"\0")
    except OSError:
        return False
    return all(variable in variables for variable in wanted)


def _is_in_session(pid: int, session: int) -> bool:
    fields = _stat_fields(pid)
    return fields is not None and fields[0] not in ("Z", "X") and int(fields[3]) == session


def _stat_fields(pid: int) -> list[str] | None:
    """Return the fields of ``/proc/PID/stat`` from the state on: state, ppid, pgrp, session, …"""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            text = file.read()
    except OSError:
        return None
    return text.rpartition(")")[2].split()


# ---- run directories ------------------------------------------------------------------------------------------


def run_parent() -> Path:
    """Return the folder in which run directories are made: the user's runtime folder, else that for temporary files."""
    runtime_dir = env.get("XDG_RUNTIME_DIR")
    if runtime_dir and os.access(runtime_dir, os.W_OK | os.X_OK):
        return Path(runtime_dir)
    return Path(tempfile.gettempdir())


def create_run_dir(run_id: str, path: Path | None = None) -> Path:
    """Make a run's directory (0700), with this process as its owner, and return it.

    By default it is new, below ``run_parent()``. A ``path`` of the user's may exist when it is empty and the user's
    own. Raises UsageError otherwise: everything in a run directory is removed when the run ends.
    """
    run_dir = run_parent() / f"{_PREFIX}{run_id}" if path is None else path
    # A default one must not exist: in /tmp somebody else may have put it there.
    run_dir.mkdir(mode=0o700, parents=path is not None, exist_ok=path is not None)
    status = run_dir.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        raise UsageError(
            f"run directory {run_dir} must be a directory of user {os.getuid()}, not of user {status.st_uid}"
        )
    if any(run_dir.iterdir()):
        raise UsageError(
            f"run directory {run_dir} is not empty; it holds sockets and is removed when the run ends. Name a new one"
        )
    run_dir.chmod(0o700)
    owner = RunOwner(run_id, os.getpid(), start_ticks(os.getpid()) or 0, machine_id(), socket.gethostname())
    (run_dir / OWNER_FILE).write_text(json.dumps(asdict(owner)))
    return run_dir


def remove_run_dir(path: Path, *, keep: Iterable[Path] = ()) -> bool:
    """Remove a run directory and all in it but ``keep`` (the log directory); tell whether it was one and is gone.

    Nothing is removed from a directory without an owner file. May be called twice, and by two processes at once.
    """
    if path.is_symlink() or not (path / OWNER_FILE).is_file():
        return False
    if (owner := _owner_of(path)) is not None:
        remove_shared_memory(owner.run_id)
    kept = [other.resolve() for other in keep]
    _remove_below(path, kept)
    # The owner file goes last: a removal that was cut short can be taken up again.
    (path / OWNER_FILE).unlink(missing_ok=True)
    try:
        path.rmdir()
    except FileNotFoundError:
        return True
    except OSError as error:
        if not kept:
            _log.warning("run directory %s stays: %s", path, error)
        return False
    return True


def _remove_below(path: Path, kept: list[Path]) -> None:
    try:
        entries = list(path.iterdir())
    except FileNotFoundError:
        return
    for entry in entries:
        resolved = entry.resolve()
        if entry.name == OWNER_FILE or resolved in kept:
            continue
        if entry.is_dir() and not entry.is_symlink():
            if any(resolved in other.parents for other in kept):
                _remove_below(entry, kept)
            else:
                shutil.rmtree(entry, ignore_errors=True)
        else:
            entry.unlink(missing_ok=True)


def shared_memory_prefix(run_id: str) -> str:
    """Return how the names of all files of a run in /dev/shm begin."""
    return f"{_PREFIX}{run_id}-"


def remove_shared_memory(run_id: str, tag: str | None = None) -> int:
    """Remove a run's files in /dev/shm, or only those of the process with ``tag``; return how many there were.

    Who has one mapped keeps what it sees.
    """
    if not run_id or "/" in run_id:
        return 0
    prefix = shared_memory_prefix(run_id) + (f"{tag}-" if tag is not None else "")
    removed = 0
    try:
        names = os.listdir(SHARED_MEMORY)
    except OSError:
        return 0
    for name in names:
        if name.startswith(prefix):
            try:
                os.unlink(f"{SHARED_MEMORY}/{name}")
            except OSError as error:  # another survivor was faster, or it is somebody else's
                _log.debug("%s: %s", name, error)
                continue
            removed += 1
    return removed


def run_lives(run_id: str) -> bool:
    """Tell whether the driver of a run on this machine is alive, or cannot be seen from here."""
    owner = _owner_of(run_parent() / f"{_PREFIX}{run_id}")
    return owner is not None and not _is_dead(owner)


def find_stale_shared_memory() -> list[str]:
    """Return the ids of this user's runs that have files in shared memory and whose driver is dead.

    Their directory may be gone: a logout removes the user's runtime folder, a clean-up the temporary one. Runs whose
    driver cannot be seen from here (another pid namespace) are left out.
    """
    stale: list[str] = []
    prefix, ending = f"{SHARED_MEMORY}/{_PREFIX}", "-budget"
    for path in Path(SHARED_MEMORY).glob(f"{_PREFIX}*{ending}"):
        try:
            status = path.lstat()
            if not stat.S_ISREG(status.st_mode) or status.st_uid != os.getuid():
                continue
            with open(path, "rb") as file:
                pid, ticks, machine = struct.unpack("=3Q", file.read(BUDGET_OWNER_AT + 24)[BUDGET_OWNER_AT:])
        except (OSError, struct.error):
            continue
        if pid and machine == machine_number() and start_ticks(pid) != ticks:
            stale.append(str(path).removeprefix(prefix).removesuffix(ending))
    return stale


def find_stale_runs(parent: Path) -> list[tuple[Path, RunOwner]]:
    """Return this user's run directories in ``parent`` whose owner is dead.

    Directories of other hosts or pid namespaces are left out: their owners cannot be seen from here.
    """
    stale: list[tuple[Path, RunOwner]] = []
    for run_dir in sorted(parent.glob(f"{_PREFIX}*")):
        owner = _owner_of(run_dir)
        if owner is not None and _is_dead(owner):
            stale.append((run_dir, owner))
    return stale


def sweep_stale_runs(parent: Path | None = None) -> list[RunOwner]:
    """Kill the processes and remove the directories of dead runs; return their owners. Living runs are not touched."""
    swept: list[RunOwner] = []
    for run_id in find_stale_shared_memory():
        remove_shared_memory(run_id)
    for run_dir, owner in find_stale_runs(run_parent() if parent is None else parent):
        sweep_processes(owner.run_id)
        remove_run_dir(run_dir)
        swept.append(owner)
    return swept


def _owner_of(run_dir: Path) -> RunOwner | None:
    """Return what the owner file says; None when there is none, or when the directory is not this user's."""
    try:
        status = run_dir.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
            return None
        fields = json.loads((run_dir / OWNER_FILE).read_text())
        return RunOwner(**fields)
    except (OSError, ValueError, TypeError):
        return None


def _is_dead(owner: RunOwner) -> bool:
    here = machine_id()
    if owner.machine == here:
        return start_ticks(owner.pid) != owner.start_ticks
    # Another boot of this very host: nothing of it lives. Another namespace or host: not ours to judge.
    same_boot = owner.machine.split("/")[0] == here.split("/")[0]
    return owner.host == socket.gethostname() and not same_boot
