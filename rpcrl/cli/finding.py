"""What does ``rpcrl doctor`` say of one thing that it has looked at?"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Finding"]


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    status: str
    """``ok``, ``note`` (works, but worth knowing) or ``fail``."""
    what: str
    text: str
    remedy: str = ""
