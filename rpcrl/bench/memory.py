"""What does the machine's memory itself cost? One copy, and processes that read the same shared memory."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from rpcrl.bench.driver import Action, Driver, Setup, Task, Unsupported, serve

__all__ = ["MemoryDriver"]


class MemoryDriver:
    """``copy``: one memcpy between warm buffers. ``broadcast``: every worker maps one file and sums it."""

    about = "numpy copy, and mmap of /dev/shm"

    def __init__(self, setup: Setup) -> None:
        self._workers = setup.workers
        self._readers: list[subprocess.Popen[bytes]] = []
        self._file: Path | None = None

    def prepare(self, task: Task) -> Action:
        """Return what does the case once. Raises Unsupported."""
        self.close()
        size = round(task.mib * 2**20)
        if task.case == "copy":
            source, target = np.ones(size, np.uint8), np.zeros(size, np.uint8)
            return lambda: np.copyto(target, source)
        if task.case == "broadcast" and task.variant == "touched":
            return self._shared_read(size)
        raise Unsupported("memory is copied (copy) or read by all workers (broadcast, touched)")

    def close(self) -> None:
        """End the readers."""
        for reader in self._readers:
            if reader.stdin is not None:
                reader.stdin.close()
            reader.wait()
            if reader.stdout is not None:
                reader.stdout.close()
        self._readers.clear()
        if self._file is not None:
            self._file.unlink()
            self._file = None

    def _shared_read(self, size: int) -> Action:
        """The broadcast that cannot be beaten: nothing is sent but a byte, everybody reads what is there.

        The source is copied in once a call, as a sender must, and summed as its columns would be.
        """
        fd, name = tempfile.mkstemp(prefix="rpcrl-bench-", dir="/dev/shm")
        self._file = Path(name)
        os.posix_fallocate(fd, 0, size)
        shared = np.frombuffer(mmap.mmap(fd, size), np.uint8)
        os.close(fd)
        source = np.ones(size, np.uint8)
        command = [sys.executable, "-m", "rpcrl.bench.memory", name]
        self._readers = [
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) for _ in range(self._workers)
        ]

        def read_all() -> None:
            np.copyto(shared, source)
            for reader in self._readers:
                os.write(_fd(reader.stdin), b"r")
            for reader in self._readers:
                os.read(_fd(reader.stdout), 1)

        return read_all


def _fd(pipe: object) -> int:
    return int(pipe.fileno())  # type: ignore[attr-defined]


def _read_shared(name: str) -> None:
    with open(name, "rb") as file:
        memory = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    half = len(memory) // 2 // 8 * 8
    ids = np.frombuffer(memory, np.int64, half // 8)
    probs = np.frombuffer(memory, np.float32, half // 4, half)
    while os.read(0, 1):
        ids.sum()
        probs.sum()
        os.write(1, b"d")


def _start(setup: Setup) -> Driver:
    return MemoryDriver(setup)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        _read_shared(sys.argv[1])
    else:
        serve(_start)
