"""One fault, on purpose, in the process that calls it. The standard library alone: it also runs before a hello."""

from __future__ import annotations

import os
import signal
import time

TEXT = "this fault is on purpose"
RANK = "1"


def is_here() -> bool:
    """Is this the worker that the fault is for? The driver is none."""
    return os.environ.get("RANK") == RANK and "RPCRL_WORKER_ID" in os.environ


def happen(how: str, folder: str) -> None:
    """Note that it happens, and when (the clock is the machine's); then raise, exit, or send the signal ``how``."""
    with open(f"{folder}/happening", "w") as file:
        file.write(repr(time.monotonic()))
    os.rename(f"{folder}/happening", f"{folder}/happened")
    if how == "exception":
        raise RuntimeError(TEXT)
    if how == "exit":
        os._exit(17)
    os.kill(os.getpid(), getattr(signal, how))
