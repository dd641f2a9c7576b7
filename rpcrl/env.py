"""Which environment variables does rpcrl read and write? This is the only module that touches them.

Workers get torchrun's names (``RANK`` … ``MASTER_PORT``), the visible-devices variable, thread counts, and
the ``RPCRL_`` names below. Nothing secret is ever put into the environment.
"""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterable, Mapping
from pathlib import Path

__all__ = [
    "BOOTSTRAP_FD",
    "HUGE_PAGES",
    "LAUNCHER_VARIABLES",
    "PARENT_PID",
    "PROTECTED",
    "RUN_ID",
    "THREAD_VARIABLES",
    "VISIBLE_DEVICES",
    "WORKER_ID",
    "child_path",
    "drop",
    "get",
    "put",
    "snapshot",
    "without_launcher",
]

RUN_ID = "RPCRL_RUN_ID"
"""Carried by every descendant of a run; who survives sweeps processes by it."""
WORKER_ID = "RPCRL_WORKER_ID"
"""Identity of the worker that a process belongs to; its grandchildren carry it too."""
BOOTSTRAP_FD = "RPCRL_BOOTSTRAP_FD"
"""Number of the inherited file descriptor that holds a process's bootstrap (address, keys, roles)."""
PARENT_PID = "RPCRL_PARENT_PID"
"""Pid that a worker expects as its parent; it ends itself when the parent is another."""
VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"

RANK_VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "NODE_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
)
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
"""One per worker by default: two OpenMP threads beside any other load collapse 10 to 80 times."""
HUGE_PAGES = "THP_MEM_ALLOC_ENABLE"
"""torch asks the system for huge pages when this is 1, as numpy always does: large results cost a quarter then."""
PROTECTED = frozenset({*RANK_VARIABLES, VISIBLE_DEVICES, RUN_ID, WORKER_ID, BOOTSTRAP_FD, PARENT_PID})
"""A user's per-group environment may not set these."""

LAUNCHER_VARIABLES = (
    "TORCHELASTIC_",
    "GROUP_",
    "ROLE_",
    "SLURM_PROCID",
    "SLURM_LOCALID",
    "SLURM_NODEID",
    "PMI_",
)
"""Prefixes of an outer launcher's per-task variables; they are stripped from workers."""


def get(name: str, default: str | None = None) -> str | None:
    """Return one variable of this process."""
    return os.environ.get(name, default)


def put(values: Mapping[str, str]) -> None:
    """Set variables of this process."""
    os.environ.update(values)


def child_path() -> dict[str, str]:
    """Return the PYTHONPATH with which ``python -P -m launcher`` finds this rpcrl; empty if it is installed.

    With -P a folder named ``launcher`` in the current directory is not taken for ours, and neither is the checkout
    that rpcrl may have been imported from: so that folder is named.
    """
    root = str(Path(__file__).resolve().parents[1])
    if root in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}:
        return {}
    given = os.environ.get("PYTHONPATH")
    return {"PYTHONPATH": f"{root}{os.pathsep}{given}" if given else root}


def drop(*names: str) -> None:
    """Remove variables of this process, so that its children do not inherit them."""
    for name in names:
        os.environ.pop(name, None)


def snapshot() -> dict[str, str]:
    """Return a copy of this process's environment."""
    return dict(os.environ)


def without_launcher(environment: Mapping[str, str], *, also: Iterable[str] = ()) -> dict[str, str]:
    """Return ``environment`` less an outer launcher's per-task variables, the rank variables and ``also``."""
    dropped = {*RANK_VARIABLES, *also}
    return {
        name: value
        for name, value in environment.items()
        if name not in dropped and not name.startswith(LAUNCHER_VARIABLES)
    }
