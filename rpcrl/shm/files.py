"""Which files in /dev/shm belong to a run, and to which process of it?

``rpcrl-RUN-TAG-NUMBER`` is a segment and ``rpcrl-RUN-TAG-bNUMBER`` a board of leases of the process whose tag it is;
``rpcrl-RUN-TAG-here`` says that this process takes shared memory; ``rpcrl-RUN-budget`` is common to the run. By the
names whoever survives removes what the others left.
"""

from __future__ import annotations

import ctypes
import hashlib
import mmap
import os
import re
import stat
from collections.abc import Callable

from rpcrl.leftovers import SHARED_MEMORY, shared_memory_prefix

__all__ = [
    "PAGE_BYTES",
    "board_path",
    "budget_path",
    "here_path",
    "is_tag",
    "map_file",
    "open_file",
    "owner_tag",
    "segment_path",
]

PAGE_BYTES = mmap.PAGESIZE
_TAG = re.compile(r"[0-9a-f]{16}")
_MAP_FIXED = 0x10


def owner_tag(identity: str) -> str:
    """Return the part of file names that stands for a process of the run."""
    return hashlib.sha256(identity.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def is_tag(text: object) -> bool:
    """Tell whether this can be an owner's tag; nothing else becomes part of a path."""
    return type(text) is str and _TAG.fullmatch(text) is not None


def segment_path(run_id: str, tag: str, number: int) -> str:
    """Return the path of one segment."""
    return f"{SHARED_MEMORY}/{shared_memory_prefix(run_id)}{tag}-{number}"


def board_path(run_id: str, tag: str, number: int) -> str:
    """Return the path of one board of leases."""
    return f"{SHARED_MEMORY}/{shared_memory_prefix(run_id)}{tag}-b{number}"


def budget_path(run_id: str) -> str:
    """Return the path of the account that all processes of a run keep together."""
    return f"{SHARED_MEMORY}/{shared_memory_prefix(run_id)}budget"


def open_file(path: str, num_bytes: int, *, writable: bool) -> int:
    """Open a file of another process of the run and return its descriptor.

    Raises OSError when it is not there, not a file of this user's, or shorter than ``num_bytes``: reading a mapping
    beyond the end of its file would be the end of this process.
    """
    fd = os.open(path, (os.O_RDWR if writable else os.O_RDONLY) | os.O_NOFOLLOW | os.O_CLOEXEC)
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_size < num_bytes:
        os.close(fd)
        raise OSError(f"{path} is not a file of user {os.geteuid()} with at least {num_bytes} bytes")
    return fd


def here_path(run_id: str, tag: str) -> str:
    """Return the path of the file by which a process says that it takes shared memory."""
    return f"{SHARED_MEMORY}/{shared_memory_prefix(run_id)}{tag}-here"


def _find_mmap() -> Callable[..., int | None]:
    function = ctypes.CDLL(None, use_errno=True).mmap
    function.restype = ctypes.c_void_p
    function.argtypes = [
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_long,
    ]
    return function


_mmap = _find_mmap()


def map_file(fd: int, num_bytes: int, *, private: bool) -> mmap.mmap | None:
    """Map the head of a file, readable and writable; ``private`` writes stay in this process. None if it is refused.

    The result keeps no descriptor (mmap.mmap would, for as long as the mapping lives, and thousands of them would use
    up the process's limit): the file is mapped over an anonymous mapping, which Python owns and unmaps.
    """
    try:
        memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError:
        return None
    start = ctypes.c_char.from_buffer(memory)
    address = ctypes.addressof(start)
    del start
    kind = mmap.MAP_PRIVATE if private else mmap.MAP_SHARED
    mapped = _mmap(address, num_bytes, mmap.PROT_READ | mmap.PROT_WRITE, kind | _MAP_FIXED, fd, 0)
    return memory if mapped == address else None
