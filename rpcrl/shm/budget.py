"""How much shared memory may all processes of a run on one host use together, and how much do they?

One file of a few words, changed under ``flock``, which the kernel releases when its holder dies. A segment's file gets
its length while the lock is held, so the lengths of the run's files are the truth that ``recount`` goes back to when
a process has died.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from rpcrl.leftovers import (
    BUDGET_OWNER_AT,
    SHARED_MEMORY,
    machine_number,
    remove_shared_memory,
    shared_memory_prefix,
    start_ticks,
)
from rpcrl.shm.files import PAGE_BYTES, budget_path, map_file, owner_tag

__all__ = ["Budget", "free_bytes"]

_DEFAULT_SHARE = 0.5
"""Of what is free: others on the host (data loaders, NCCL) want some as well."""
_LIMIT, _USED, _PRESSURE, _WARNED = range(4)
_OWNER = BUDGET_OWNER_AT // 8


def free_bytes() -> int:
    """Return what is free in /dev/shm now. Raises OSError where there is none."""
    status = os.statvfs(SHARED_MEMORY)
    return status.f_bavail * status.f_frsize


def _default_limit() -> int:
    return int(free_bytes() * _DEFAULT_SHARE)


class Budget:
    """The account of one run on this host; the first process that opens it sets the limit. For any thread.

    ``limit_bytes``: None is half of what is free now. ``owns_run``: the run ends with this process.
    Raises OSError where there is no usable /dev/shm.
    """

    def __init__(self, run_id: str, limit_bytes: int | None = None, *, owns_run: bool = False) -> None:
        self._run_id = run_id
        self._thread_lock = threading.Lock()  # flock does not keep threads apart
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        self._fd = os.open(budget_path(run_id), flags, 0o600)
        try:
            with self._locked():
                status = os.fstat(self._fd)
                if status.st_uid != os.geteuid():
                    raise OSError(errno.EPERM, f"{budget_path(run_id)} is not a file of user {os.geteuid()}")
                new = status.st_size == 0
                if new:
                    os.posix_fallocate(self._fd, 0, PAGE_BYTES)
                mapping = map_file(self._fd, PAGE_BYTES, private=False)
                if mapping is None:
                    raise OSError(errno.ENOMEM, f"cannot map {budget_path(run_id)}")
                self._words = memoryview(mapping).cast("Q")
                if new:
                    if owns_run:
                        owner = (os.getpid(), start_ticks(os.getpid()) or 0, machine_number())
                        self._words[_OWNER : _OWNER + 3] = memoryview(struct.pack("=3Q", *owner)).cast("Q")
                    self._words[_LIMIT] = _default_limit() if limit_bytes is None else limit_bytes
        except BaseException:
            os.close(self._fd)
            raise

    @property
    def limit_bytes(self) -> int:
        """What the run may use."""
        return self._words[_LIMIT]

    @property
    def used_bytes(self) -> int:
        """What the run uses now: the lengths of all its segments and boards."""
        return self._words[_USED]

    @property
    def pressure(self) -> int:
        """Rises whenever somebody was refused: a process that sees another figure gives back what it does not use."""
        return self._words[_PRESSURE]

    def create(self, path: str, num_bytes: int) -> int | None:
        """Make a file of ``num_bytes`` whose pages are there, and return its descriptor.

        None when the run's limit or /dev/shm leaves no room: reserving the pages here is what keeps a full file
        system an error that can be handled, and not a SIGBUS at some later write.
        """
        with self._locked():
            if self._words[_USED] + num_bytes > self._words[_LIMIT]:
                return None
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            os.ftruncate(fd, num_bytes)
            self._words[_USED] += num_bytes
        try:
            os.posix_fallocate(fd, 0, num_bytes)
        except OSError as error:
            os.close(fd)
            self.remove(path, num_bytes)
            if error.errno in (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT):
                return None
            raise
        return fd

    def remove(self, path: str, num_bytes: int) -> None:
        """Remove one of this process's files."""
        with self._locked():
            try:
                os.unlink(path)
            except FileNotFoundError:
                return  # the whole run was cleared away
            self._words[_USED] -= min(num_bytes, self._words[_USED])

    def remove_all_of(self, identity: str) -> None:
        """Remove the files of a process that has ended, and count anew."""
        with self._locked():
            remove_shared_memory(self._run_id, owner_tag(identity))
            self._words[_USED] = self._count()

    def ask_for_room(self) -> None:
        """Ask every process of the run to give back what it keeps for later."""
        with self._locked():
            self._words[_PRESSURE] += 1

    def is_first_warning(self) -> bool:
        """Tell whether nobody in the run has warned yet; from now on somebody has."""
        with self._locked():
            self._words[_WARNED] += 1
            return self._words[_WARNED] == 1

    def close(self) -> None:
        """Close the account's descriptor; the file stays, other processes use it."""
        with self._thread_lock:
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1

    def _count(self) -> int:
        prefix, total = shared_memory_prefix(self._run_id), 0
        with os.scandir(SHARED_MEMORY) as entries:
            for entry in entries:
                if entry.name.startswith(prefix) and not entry.name.endswith(("budget", "-here", ".new")):
                    try:
                        total += entry.stat(follow_symlinks=False).st_size
                    except FileNotFoundError:
                        continue
        return total

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with self._thread_lock:
            if self._fd < 0:
                raise OSError(errno.EBADF, "the account of shared memory is closed")
            fcntl.flock(self._fd, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.flock(self._fd, fcntl.LOCK_UN)
