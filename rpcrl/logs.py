"""How does rpcrl log? One logger per module under ``rpcrl``; in workers each line carries role and rank."""

from __future__ import annotations

import hashlib
import logging
import re
import sys

__all__ = ["get_logger", "log_name", "set_up"]

_FORMAT = "%(levelname)s %(asctime)s %(name)s: %(message)s"


def get_logger(name: str) -> logging.Logger:
    """Return the logger of a module; a library user decides what becomes of its records."""
    return logging.getLogger(name)


def set_up(level: int | str = logging.INFO, *, prefix: str = "") -> None:
    """Send rpcrl's records to standard error, each line after ``prefix``; for processes that rpcrl owns."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(f"{prefix}{_FORMAT}", datefmt="%H:%M:%S"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)


def log_name(group: str, rank: int) -> str:
    """Return the file name of a worker's log; a group name that is no file name gets a digest, so that none collide."""
    safe = re.sub(r"[^A-Za-z0-9._+-]", "_", group).lstrip(".")
    if not safe or safe != group:
        safe = f"{safe or 'group'}-" + hashlib.sha256(group.encode()).hexdigest()[:8]
    return f"{safe}.rank{rank}.log"
