"""Whose thread is this? A thread that a worker starts belongs to that worker, also where several share a process."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable
from typing import Any

__all__ = ["new_thread"]


def new_thread(target: Callable[..., None], *args: Any, name: str) -> threading.Thread:
    """Return a daemon thread that has the context of the one that makes it; it is not started yet."""
    return threading.Thread(target=contextvars.copy_context().run, args=(target, *args), name=name, daemon=True)
