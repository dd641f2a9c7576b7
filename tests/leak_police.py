"""What does a test leave behind? Compares what this process owns before and after, and names what is new.

Everything is read from /proc, so that a look costs about a millisecond. Descendants are known by an
environment variable that they inherit: an orphan that init has adopted is still found, and the runs of other
people on the same machine are not blamed.
"""

from __future__ import annotations

import gc
import os
import re
import sys
import threading
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path

TOKEN = "RPCRL_TEST_SESSION"
"""Environment variable that every descendant of the test session carries."""

ALLOWED_ENVIRONMENT = (
    "PYTEST_CURRENT_TEST",
    "KMP_",
    "TORCH",
    "CUDA_MODULE_LOADING",
    "TRITON_",
    "TOKENIZERS_PARALLELISM",
)
"""Prefixes of variables that pytest, torch and tokenizers set for themselves, once a process."""
ALLOWED_THREADS = ("Dummy-", "tqdm", "pytest_timeout", "MainThread")
ALLOWED_COMMANDS = ("torch_shm_manager", "multiprocessing.resource_tracker", "multiprocessing.forkserver")
"""Processes that torch and the standard library keep for the rest of the session."""
ALLOWED_FILES = ("/dev/urandom", "/dev/random", "/dev/nvidia", "/dev/tty", "/proc/driver/nvidia")
ALLOWED_TEMPORARY = ("torchinductor_", "pytest-of-", "rpcrl-logs-")
"""Caches of torch, folders of pytest, and the logs of workers, which outlive their run on purpose."""
RUN_FILE = re.compile(r"(rpcrl-.+?)-(?:budget|[0-9a-f]{16}-(?:b?[0-9]+|here|here\.new))$")
"""Files of a run in shared memory: its budget, and segments, boards and the sign of each process."""
FOREIGN_THREADS = "ZMQbg"
"""Name under which libzmq runs its own threads: one left over is a context that nobody closed."""


@dataclass(frozen=True)
class State:
    """What the process owns at one moment."""

    children: frozenset[int]
    processes: frozenset[int]
    threads: frozenset[threading.Thread]
    native_threads: frozenset[int]
    files: dict[str, str]
    shared_memory: frozenset[str]
    temporary: frozenset[str]
    environment: dict[str, str]
    cwd: str
    torch: dict[str, object] = field(default_factory=dict)


def look(temporary: Path) -> State:
    """Return what this process and its descendants own now; ``temporary`` is the session's private folder."""
    return State(
        children=frozenset(_children()),
        processes=frozenset(int(name) for name in os.listdir("/proc") if name.isdigit()),
        threads=frozenset(threading.enumerate()),
        native_threads=frozenset(int(name) for name in os.listdir("/proc/self/task")),
        files=_files(),
        shared_memory=frozenset(os.listdir("/dev/shm")),
        temporary=frozenset(os.listdir(temporary)),
        environment=dict(os.environ),
        cwd=os.getcwd(),
        torch=_torch_state(),
    )


def leaks(before: State, temporary: Path, token: str) -> list[str]:
    """Return a line for everything that is here now and was not in ``before``."""
    now = look(temporary)
    found = _process_leaks(before, now, token)
    found += _thread_leaks(before)
    found += _native_thread_leaks(before, now)
    found += [
        f"file descriptor {number}: {target}"
        for number, target in now.files.items()
        if before.files.get(number) != target and not target.startswith(ALLOWED_FILES)
    ]
    found += _shared_memory_leaks(before, now, token)
    found += [
        f"temporary file {temporary / name}"
        for name in sorted(now.temporary - before.temporary)
        if not name.startswith(ALLOWED_TEMPORARY)
    ]
    found += _environment_leaks(before.environment, now.environment)
    if now.cwd != before.cwd:
        found.append(f"working directory {now.cwd}, was {before.cwd}")
    found += [
        f"torch: {name} is {value!r}, was {before.torch[name]!r}"
        for name, value in now.torch.items()
        if name in before.torch and before.torch[name] != value
    ]
    return found


def wait_until_clean(before: State, temporary: Path, token: str, *, within_s: float) -> list[str]:
    """Return the leaks that are still there after ``within_s``; at once when there are none."""
    deadline = time.monotonic() + within_s
    found = leaks(before, temporary, token)
    if found:
        gc.collect()
    while found and time.monotonic() < deadline:
        time.sleep(0.01)
        found = leaks(before, temporary, token)
    return found


def restore(before: State) -> None:
    """Put the environment and the working directory back, so that one test's leak does not fail the next."""
    current = dict(os.environ)
    for name in current.keys() - before.environment.keys():
        if not name.startswith(ALLOWED_ENVIRONMENT):
            del os.environ[name]
    for name, value in before.environment.items():
        if current.get(name) != value and not name.startswith(ALLOWED_ENVIRONMENT):
            os.environ[name] = value
    os.chdir(before.cwd)


def carriers(token: str) -> list[int]:
    """Return the pids of this session's descendants: other processes that carry ``token``."""
    pids = (int(name) for name in os.listdir("/proc") if name.isdigit())
    return [pid for pid in pids if pid != os.getpid() and _carries(pid, token)]


def _children() -> list[int]:
    found: list[int] = []
    for task in os.listdir("/proc/self/task"):
        try:
            text = Path(f"/proc/self/task/{task}/children").read_text()
        except OSError:
            continue
        found += [int(word) for word in text.split()]
    return found


def _files() -> dict[str, str]:
    found: dict[str, str] = {}
    for number in os.listdir("/proc/self/fd"):
        try:
            found[number] = os.readlink(f"/proc/self/fd/{number}")
        except OSError:
            continue  # the descriptor of this very listing
    return found


def _torch_state() -> dict[str, object]:
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "get_default_dtype") or not hasattr(torch, "distributed"):
        return {}
    return {
        "default dtype": torch.get_default_dtype(),
        "gradients enabled": torch.is_grad_enabled(),
        "process group": torch.distributed.is_available() and torch.distributed.is_initialized(),
    }


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


def _carries(pid: int, token: str) -> bool:
    try:
        return f"{TOKEN}={token}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False


def _process_state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def _process_leaks(before: State, now: State, token: str) -> list[str]:
    suspects = set(now.children - before.children)
    suspects.update(pid for pid in now.processes - before.processes if _carries(pid, token))
    found = []
    for pid in sorted(suspects - {os.getpid()}):
        state, command = _process_state(pid), _command(pid)
        if not state or any(allowed in command for allowed in ALLOWED_COMMANDS):
            continue
        found.append(f"process {pid} ({'not reaped' if state == 'Z' else 'running'}): {command or 'no command'}")
    return found


def _thread_leaks(before: State) -> list[str]:
    found = []
    frames = sys._current_frames()
    for thread in threading.enumerate():
        if thread in before.threads or thread.name.startswith(ALLOWED_THREADS):
            continue
        frame = frames.get(thread.ident or -1)
        stack = "".join(traceback.format_stack(frame)) if frame is not None else "(no Python frame)\n"
        indented = "\n".join(f"      {line}" for line in stack.rstrip().splitlines())
        found.append(f"thread {thread.name!r} (daemon={thread.daemon}), now at\n{indented}")
    return found


def _native_thread_leaks(before: State, now: State) -> list[str]:
    found = []
    for task in sorted(now.native_threads - before.native_threads):
        try:
            name = Path(f"/proc/self/task/{task}/comm").read_text().strip()
        except OSError:
            continue
        if name.startswith(FOREIGN_THREADS):
            found.append(f"native thread {name} ({task}): a ZeroMQ context that nobody closed")
    return found


def _environment_leaks(before: dict[str, str], now: dict[str, str]) -> list[str]:
    return [
        f"environment variable {name} is {now.get(name)!r}, was {before.get(name)!r}"
        for name in sorted(before.keys() | now.keys())
        if before.get(name) != now.get(name) and not name.startswith(ALLOWED_ENVIRONMENT)
    ]


def _shared_memory_leaks(before: State, now: State, token: str) -> list[str]:
    new = [name for name in now.shared_memory - before.shared_memory if not _is_of_an_open_run(name, before, now)]
    held = {path: _held_by_others(path, token) for path in {_budget_of(name) for name in new}}
    # Runs of other people end while we look: what is gone by now was not left.
    left = [f"/dev/shm/{name}" for name in sorted(new) if not held[_budget_of(name)]]
    return [f"shared memory {path}" for path in left if os.path.lexists(path)]


def _budget_of(name: str) -> str:
    """Return the path of the file that a run's processes all have mapped; any other file stands for itself."""
    match = RUN_FILE.match(name)
    return f"/dev/shm/{match[1]}-budget" if match else f"/dev/shm/{name}"


def _is_of_an_open_run(name: str, before: State, now: State) -> bool:
    """Tell whether this belongs to a run that several tests share, and that was open before: its end removes it."""
    budget = Path(_budget_of(name)).name
    return budget != name and budget in before.shared_memory and budget in now.shared_memory


def _held_by_others(path: str, token: str) -> bool:
    """Does the file belong to a process outside this session, or to its run? Read only on suspicion."""
    made_by_test = re.match(r"/dev/shm/rpcrl-test-(\d+)-", path)
    if made_by_test is not None:
        return int(made_by_test[1]) != os.getpid()  # the arena's own tests name their session
    ours = {os.getpid(), *carriers(token)}
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) in ours:
            continue
        try:
            run = re.search(rb"RPCRL_RUN_ID=([^\0]+)", Path(f"/proc/{name}/environ").read_bytes())
            if run is not None and path.startswith(f"/dev/shm/rpcrl-{run[1].decode()}-"):
                return True
            if path in Path(f"/proc/{name}/maps").read_text(errors="replace"):
                return True
            if any(os.readlink(link) == path for link in Path(f"/proc/{name}/fd").iterdir()):
                return True
        except OSError:
            continue
    return False
