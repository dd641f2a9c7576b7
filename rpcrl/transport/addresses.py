"""Is this address usable, and who else could reach it?"""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path

from rpcrl.errors import TransportError, UsageError

__all__ = ["MAX_IPC_PATH_BYTES", "check_identity", "prepare_ipc_path", "split_address"]

MAX_IPC_PATH_BYTES = 107
"""What the kernel's address structure holds, less its final NUL."""
_SCHEMES = ("inproc", "ipc", "tcp")


def split_address(address: str) -> tuple[str, str]:
    """Return (scheme, rest). Raises UsageError for anything but inproc://name, ipc:///path, tcp://host:port."""
    scheme, separator, rest = address.partition("://")
    if not separator or scheme not in _SCHEMES or not rest:
        raise UsageError(f"{address!r} is no address; use inproc://name, ipc:///absolute/path or tcp://host:port")
    if scheme == "ipc":
        size = len(os.fsencode(rest))
        if not rest.startswith("/"):
            raise UsageError(f"{address!r}: the path of an ipc address must be absolute")
        if size > MAX_IPC_PATH_BYTES:
            raise UsageError(
                f"{address!r}: the path has {size} bytes and the kernel takes at most {MAX_IPC_PATH_BYTES};"
                " use a shorter run directory, e.g. under /tmp"
            )
    if scheme == "tcp" and not rest.rpartition(":")[2].isdigit():
        raise UsageError(f"{address!r} has no port; use tcp://host:port, port 0 for any free one")
    return scheme, rest


def check_identity(identity: str) -> bytes:
    """Return an identity as bytes. Raises UsageError unless it has 1 to 200 bytes and only printable characters."""
    data = identity.encode("utf-8", "replace")
    if not 1 <= len(data) <= 200 or not identity.isprintable():
        raise UsageError(f"{identity[:80]!r} is no identity: 1 to 200 bytes of printable characters are needed")
    return data


def prepare_ipc_path(path: Path) -> None:
    """Make sure that only this user can reach a socket at ``path``.

    Creates the directory with mode 0700 if it is missing. Raises TransportError when others could enter it, or when
    another live process serves that path; a file that a dead one left is removed.
    """
    directory = path.parent
    if not directory.exists():
        directory.parent.mkdir(parents=True, exist_ok=True)
        directory.mkdir(mode=0o700, exist_ok=True)
    info = directory.stat()
    if info.st_uid != os.geteuid() or info.st_mode & 0o077:
        raise TransportError(
            f"{directory} has mode {stat.S_IMODE(info.st_mode):04o} and owner {info.st_uid}: others could reach the"
            f" sockets in it. It must belong to user {os.geteuid()} with mode 0700: chmod 700 {directory}"
        )
    if not path.is_socket():
        if path.exists():
            raise TransportError(f"{path} exists and is not a socket; choose another path")
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            path.unlink(missing_ok=True)
            return
    raise TransportError(f"another live process listens on {path}; choose another path")
