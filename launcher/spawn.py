"""How is one worker process started? By exec, from the agent's main thread, with three descriptors and no others.

The parent-death signal follows the thread that started the process, hence the main thread. ``posix_spawn`` is used
because ``subprocess.Popen`` may wait for its children on its own, and here only the supervisor waits.
"""

from __future__ import annotations

import fcntl
import os
import signal
import threading
from dataclasses import dataclass

from launcher.plan import BOOTSTRAP_FD_NUMBER, ProcessSpec

__all__ = ["PIPE_BYTES", "Spawned", "spawn"]

PIPE_BYTES = 1 << 20
"""Asked-for size of the output pipe: a worker that prints in bursts need not wait for the agent."""

_FIRST_SAFE_FD = 10
_DEFAULT_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD, signal.SIGHUP, signal.SIGPIPE, signal.SIGXFSZ)


@dataclass(frozen=True)
class Spawned:
    """A process that runs: its pid and the reading end of its output."""

    pid: int
    output_fd: int
    pipe_bytes: int


def spawn(spec: ProcessSpec) -> Spawned:
    """Start one worker in a session and process group of its own; its pid names both.

    Raises OSError when the command cannot be executed; nothing runs then.
    """
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError("workers are started from the agent's main thread: their parent-death signal follows it")
    reading, writing = os.pipe()
    bootstrap = -1
    try:
        os.set_blocking(reading, False)
        try:
            pipe_bytes = fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        except OSError:
            # Over the user's limit on pipe memory: the kernel's default size works, too.
            pipe_bytes = fcntl.fcntl(writing, fcntl.F_GETPIPE_SZ)
        bootstrap = _memory_file(spec.bootstrap)
        pid = os.posix_spawn(
            spec.argv[0],
            spec.argv,
            spec.environment,
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                (os.POSIX_SPAWN_DUP2, writing, 1),
                (os.POSIX_SPAWN_DUP2, writing, 2),
                (os.POSIX_SPAWN_DUP2, bootstrap, BOOTSTRAP_FD_NUMBER),
            ],
            setsid=True,
            setsigmask=[],
            setsigdef=_DEFAULT_SIGNALS,
        )
    except BaseException:
        os.close(reading)
        raise
    finally:
        os.close(writing)
        if bootstrap >= 0:
            os.close(bootstrap)
    return Spawned(pid, reading, pipe_bytes)


def _memory_file(content: bytes) -> int:
    """Return a descriptor of an unnamed file with ``content``, at its start; numbered beyond those that workers get."""
    # A pipe would hold 64 KiB and then wait for the worker to read.
    first = os.memfd_create("rpcrl-bootstrap")
    try:
        view = memoryview(content)
        while view:
            view = view[os.write(first, view) :]
        os.lseek(first, 0, os.SEEK_SET)
        return fcntl.fcntl(first, fcntl.F_DUPFD_CLOEXEC, _FIRST_SAFE_FD)
    finally:
        os.close(first)
