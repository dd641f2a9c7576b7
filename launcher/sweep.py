"""How does the agent clear away what its workers have started?

A worker's own process group and session go with it, then what carries its id, wherever it has moved. At the end of
the run everything that the run left goes, also what cleared its environment: such orphans come to the agent, which
is their subreaper.
"""

from __future__ import annotations

import ctypes
import os
import signal
from pathlib import Path

from rpcrl.leftovers import remove_run_dir, sweep_processes

__all__ = ["become_subreaper", "signal_group", "sweep_run", "sweep_worker"]

_PR_SET_CHILD_SUBREAPER = 36


def become_subreaper() -> None:
    """Adopt orphaned descendants of this process from now on, so that they can be found and reaped."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def signal_group(pid: int, number: signal.Signals) -> None:
    """Send a signal to a worker's process group. The worker is not reaped yet, so its pid still names the group."""
    try:
        os.killpg(pid, number)
    except (ProcessLookupError, PermissionError):
        # Gone, or all that is left runs as somebody else.
        return


def sweep_worker(run_id: str, identity: str, pid: int, *, timeout_s: float = 0.3) -> list[int]:
    """Kill what a worker has left, before it is reaped; return the pids. Waits a moment at most."""
    signal_group(pid, signal.SIGKILL)
    return sweep_processes(run_id, worker_id=identity, session=pid, spare=(pid,), timeout_s=timeout_s)


def sweep_run(run_id: str, run_dir: str, log_dir: str) -> list[int]:
    """Kill everything of the run but this process and remove the run directory, not the logs; return the pids."""
    killed = sweep_processes(run_id, tree_of=os.getpid())
    remove_run_dir(Path(run_dir), keep=(Path(log_dir),))
    return killed
