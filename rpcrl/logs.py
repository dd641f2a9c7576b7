"""How does rpcrl log? One logger per module under ``rpcrl``; in workers each line carries role and rank."""

from __future__ import annotations

import logging
import sys

__all__ = ["get_logger", "set_up"]

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
