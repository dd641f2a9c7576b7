"""Who may write into a run's directory? One driver at a time: it holds a lock that the kernel takes back at any death.

The lock is ``flock`` on ``run.lock``; the file says which process holds it, for the message of the next one. The file
stays when the run ends, the lock does not.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
from pathlib import Path

from rpcrl.errors import ConfigError, Violation

__all__ = ["LOCK_FILE", "RunLock"]

LOCK_FILE = "run.lock"


class RunLock:
    """An exclusive hold on a run's directory, from construction to ``release``.

    Raises ConfigError naming the process that holds it. Child processes do not inherit it.
    """

    def __init__(self, directory: Path) -> None:
        path = directory / LOCK_FILE
        self._descriptor: int | None = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self.release()
            raise ConfigError([_refusal(directory, path, error)]) from None
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode(), 0)

    def release(self) -> None:
        """Let another driver take the directory. Idempotent."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def _refusal(directory: Path, path: Path, error: OSError) -> Violation:
    if not isinstance(error, BlockingIOError):
        return Violation(
            "trainer.run_dir",
            f"{directory} cannot be locked against a second run: {error.strerror}",
            ("name a directory on a local file system: --run-dir runs/mine",),
        )
    try:
        holder = json.loads(path.read_text(encoding="utf-8"))
        who = f"process {holder['pid']} on {holder['host']}"
    except (OSError, ValueError, KeyError, TypeError):  # it has the lock and has not written yet
        who = "another process"
    return Violation(
        "trainer.run_dir",
        f"{directory} is in use: {who} is running in it",
        ("wait until that run ends, or end it", "or name another directory: --run-dir runs/another"),
    )
