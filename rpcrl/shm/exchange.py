"""How does a process of a run share memory with others, and with whom?

A process that takes shared memory says so by a small file in /dev/shm that is named for it and holds the boot id. Who
can read that file sees the same memory: the same kernel, the same mount, whatever the hosts are called. Nobody else
can, so nothing has to be negotiated, and a container with a /dev/shm of its own is served by its socket.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

from rpcrl.errors import DecodeError
from rpcrl.logs import get_logger
from rpcrl.shm.arena import Arena, Loan
from rpcrl.shm.budget import Budget
from rpcrl.shm.buffers import Buffer, Placed
from rpcrl.shm.files import here_path, open_file, owner_tag
from rpcrl.shm.reader import Reader

__all__ = ["Exchange", "open_exchange"]

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

TIDY_S = 1.0

logger = get_logger(__name__)


class Exchange:
    """One process's part in the shared memory of a run: what it sends from and what it receives. For any thread.

    Raises OSError where there is no usable /dev/shm.
    """

    def __init__(self, run_id: str, identity: str, limit_bytes: int | None = None, *, owns_run: bool = False) -> None:
        self._run_id = run_id
        self._boot_id = _BOOT_ID.read_bytes()
        self._budget = Budget(run_id, limit_bytes, owns_run=owns_run)
        self.arena = Arena(self._budget, run_id, identity)
        self._reader = Reader(run_id)
        self._near: dict[str, bool] = {}
        """Peers that see this memory; the others are looked for again, they may not have started yet."""
        self._tidy_at = 0.0
        if self._budget.limit_bytes > 0:
            self._announce(owner_tag(identity))

    def _announce(self, tag: str) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        path = here_path(self._run_id, tag)
        fd = os.open(f"{path}.new", flags, 0o600)
        try:
            os.write(fd, self._boot_id)
        finally:
            os.close(fd)
        os.rename(f"{path}.new", path)

    def is_near(self, peer: str) -> bool:
        """Tell whether a peer shares memory with this process."""
        near = self._near.get(peer, False)
        if not near:
            try:
                fd = open_file(here_path(self._run_id, owner_tag(peer)), len(self._boot_id), writable=False)
            except OSError:
                return False
            with os.fdopen(fd, "rb") as file:
                near = file.read() == self._boot_id
            if near:
                self._near[peer] = True
        return near

    def place(self, buffers: Sequence[Buffer], receivers: Sequence[str]) -> tuple[Buffer, ...]:
        """Return the buffers, the large ones copied into shared memory if a receiver sees it; see ``Arena.place``."""
        if any(self.is_near(peer) for peer in receivers):
            return self.arena.place(buffers)
        return tuple(buffers)

    def lend(self, peer: str, buffers: Sequence[Buffer]) -> tuple[list[object], Loan] | None:
        """Return what to tell ``peer`` about the buffers that are placed, and the leases; None: send the bytes."""
        if not any(isinstance(buffer, Placed) for buffer in buffers) or not self.is_near(peer):
            return None
        loan = Loan(self.arena, peer)
        note = loan.note(buffers)
        return None if note is None else (note, loan)

    def merge(self, note: object, buffers: Sequence[Buffer]) -> list[Buffer]:
        """Return the complete list of a message's buffers, from its note and those that came in the message.

        Raises DecodeError.
        """
        opened = self._reader.open(note)
        total = len(opened) + len(buffers)
        if any(position >= total for position in opened):
            raise DecodeError(f"a note of shared buffers names a position beyond the message's {total} buffers")
        others = iter(buffers)
        return [opened[position] if position in opened else next(others) for position in range(total)]

    def gone(self, peer: str, *, remove: bool) -> None:
        """End what a process held that has exited; ``remove`` its files too (one of the survivors does)."""
        self.arena.end_leases(peer)
        self._reader.forget(peer)
        self._near.pop(peer, None)
        if remove:
            try:
                self._budget.remove_all_of(peer)
            except OSError as error:
                logger.debug("the shared memory of %s: %s", peer, error)

    def tidy(self) -> None:
        """Give back what is not used, and what peers held that have exited; cheap to call often."""
        now = time.monotonic()
        if now < self._tidy_at:
            return
        self._tidy_at = now + TIDY_S
        for peer in list(self._near):
            # Whoever removes the files of a process knows its end: that is the news for everybody else.
            if not os.path.exists(here_path(self._run_id, owner_tag(peer))):
                self.gone(peer, remove=False)
        self.arena.tidy()

    def close(self) -> None:
        """Place nothing more. The files go with the run, or when the end of this process is known."""
        self.arena.close()
        self._budget.close()


def open_exchange(
    run_id: str, identity: str, limit_bytes: int | None = None, *, owns_run: bool = False
) -> Exchange | None:
    """Return the process's exchange; None, with a warning, where shared memory cannot be used."""
    if limit_bytes == 0:
        return None
    try:
        return Exchange(run_id, identity, limit_bytes, owns_run=owns_run)
    except OSError as error:
        logger.warning(
            "no shared memory (%s): large buffers go through sockets, which costs several times as much. "
            "Controller(shared_memory_bytes=0) switches it off without this warning",
            error,
        )
        return None
