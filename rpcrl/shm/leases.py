"""How do sender and receiver agree, without a message, on when a slot may be used again?

Each sender keeps *boards*: files that its receivers map too. A lease is two words on a board. The first belongs to
the sender and holds the lease's number, which is never given twice; the second belongs to the receiver:

    sent (the second word says nothing of this lease) → HELD → RETURNED

A receiver writes HELD when it gets the message, and RETURNED when the last view of its mapping is gone. That is one
store, so it is safe in a finalizer, which may run in any thread at any time. The sender looks at the words when it
wants memory. A lease also ends when its holder has exited.

A message may be lost with its connection; its lease would stay *sent* for ever. So the sender may *revoke* a lease that
stays sent: it sets a bit in its word, and looks again after a pause of ``GRACE_S``. The receiver writes HELD first
and looks at the sender's word afterwards. So one of the two sees the other: either the sender finds HELD and waits for
RETURNED, or the receiver finds the bit, and drops the message as one that was lost. The place of a revoked lease is
never used again, because its receiver may still write to it, whenever it wakes up.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from rpcrl.errors import DecodeError
from rpcrl.shm.files import board_path, map_file, open_file

__all__ = ["BOARD_BYTES", "GRACE_S", "HELD", "LEASES_PER_BOARD", "MAX_BOARDS", "RETURNED", "BoardReader", "Ticket"]

LEASES_PER_BOARD = 4_096
BOARD_BYTES = LEASES_PER_BOARD * 16
MAX_BOARDS = 16
"""65,536 leases of one sender at once: a process may not have more mappings than that either (vm.max_map_count)."""
GRACE_S = 1.0
"""Longer than any store takes to be seen by another core, by many orders of magnitude."""

HELD = 1
RETURNED = 2


@dataclass(slots=True)
class Ticket:
    """A receiver's side of one lease: where to write that it is over."""

    words: memoryview
    position: int
    over: int

    def end(self) -> None:
        """Say that nothing of this process reads the slot any more."""
        self.words[self.position] = self.over


class BoardReader:
    """The boards of other processes, mapped when first needed. Belongs to one thread."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._boards: dict[tuple[str, int], memoryview] = {}

    def claim(self, tag: str, index: int, number: int) -> Ticket:
        """Become the holder of a lease. Raises DecodeError if it was revoked, or its sender is gone."""
        words = self._words(tag, index // LEASES_PER_BOARD)
        position = index % LEASES_PER_BOARD * 2
        if words[position + 1] >> 2 == number:
            raise DecodeError("a message came twice: its shared memory belongs to the first")
        if words[position] == number << 1:
            words[position + 1] = number << 2 | HELD
            if words[position] == number << 1:
                return Ticket(words, position + 1, number << 2 | RETURNED)
            words[position + 1] = number << 2 | RETURNED
        raise DecodeError("a message came so late that its sender had given it up: its shared memory was taken back")

    def forget(self, tag: str) -> None:
        """Unmap the boards of a process that has ended."""
        for key in [key for key in self._boards if key[0] == tag]:
            del self._boards[key]

    def _words(self, tag: str, number: int) -> memoryview:
        words = self._boards.get((tag, number))
        if words is None:
            path = board_path(self._run_id, tag, number)
            try:
                fd = open_file(path, BOARD_BYTES, writable=True)
            except OSError as error:
                raise DecodeError(f"a message refers to shared memory that is not there: {error}") from error
            try:
                mapping = map_file(fd, BOARD_BYTES, private=False)
            finally:
                os.close(fd)
            if mapping is None:
                raise DecodeError(f"cannot map {path}: this process has too many mappings (vm.max_map_count)")
            words = self._boards[tag, number] = memoryview(mapping).cast("Q")
        return words
