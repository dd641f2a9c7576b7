"""How does a receiver get at buffers in another process's arena, and how does the sender hear that it has done?

Every segment of a message is mapped once, copy-on-write: what arrives is the receiver's own, and nothing is copied
until it is written to. When the last view of a mapping is gone (array, tensor, slice, or a mere storage), the
mapping's finalizer ends the lease.

A fork copies the mappings into the child, which says nothing when it has done with them. So leases that are out while
this process forks are not returned by anybody; they end when the process exits.
"""

from __future__ import annotations

import os
import weakref

from rpcrl.errors import DecodeError
from rpcrl.shm.arena import ALIGN_BYTES
from rpcrl.shm.buffers import Lent
from rpcrl.shm.files import is_tag, map_file, open_file, owner_tag, segment_path
from rpcrl.shm.leases import LEASES_PER_BOARD, MAX_BOARDS, BoardReader, Ticket

__all__ = ["Reader"]

_forks = [0]


def _count_fork() -> None:
    _forks[0] += 1


os.register_at_fork(before=_count_fork, after_in_child=_count_fork)


def _end(ticket: Ticket, forks_then: int, forks: list[int] = _forks) -> None:
    """End a lease; runs as a finalizer, so it does one store and nothing else."""
    if forks[0] == forks_then:
        ticket.end()


class Reader:
    """What one process of a run receives from. Belongs to the thread that receives messages."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._boards = BoardReader(run_id)

    def open(self, note: object) -> dict[int, Lent]:
        """Return the buffers that a message has in shared memory, by their position in its list of buffers.

        The leases are this process's from here on; they end by themselves, whatever becomes of the message. Raises
        DecodeError when the note is not valid, or what it names is not there.
        """
        tag, segments, buffers = _checked(note)
        sizes = [0] * len(segments)
        for _, index, offset, num_bytes in buffers:
            sizes[index] = max(sizes[index], offset + num_bytes)
        memories = [self._map(tag, segment, size) for segment, size in zip(segments, sizes, strict=True)]
        return {
            position: Lent(memories[index][offset : offset + num_bytes])
            for position, index, offset, num_bytes in buffers
        }

    def forget(self, identity: str) -> None:
        """Forget a process that has ended."""
        self._boards.forget(owner_tag(identity))

    def _map(self, tag: str, source: list[int], num_bytes: int) -> memoryview:
        segment, place, number = source
        ticket = self._boards.claim(tag, place, number)
        path = segment_path(self._run_id, tag, segment)
        try:
            fd = open_file(path, num_bytes, writable=False)
        except OSError as error:
            ticket.end()
            raise DecodeError(f"a message refers to shared memory that is not there: {error}") from error
        try:
            mapping = map_file(fd, num_bytes, private=True)
            if mapping is None:  # too many mappings (vm.max_map_count): a copy does as well
                memory = memoryview(bytearray(num_bytes))
                _read(fd, memory)
                ticket.end()
                return memory
        except BaseException:
            ticket.end()
            raise
        finally:
            os.close(fd)
        weakref.finalize(mapping, _end, ticket, _forks[0]).atexit = False
        return memoryview(mapping)


def _read(fd: int, memory: memoryview) -> None:
    done = 0
    while done < len(memory):
        done += os.preadv(fd, [memory[done:]], done)


def _checked(note: object) -> tuple[str, list[list[int]], list[list[int]]]:
    """Return the parts of a note whose every number is in its bounds."""
    if type(note) is not list or len(note) != 3 or not is_tag(note[0]):
        raise DecodeError("a note of shared buffers is [tag, segments, buffers]")
    tag, segments, buffers = note
    if not _are_rows(segments, 3) or not _are_rows(buffers, 4):
        raise DecodeError("segments and buffers of a note are arrays of numbers that are not negative")
    if any(place >= LEASES_PER_BOARD * MAX_BOARDS or not 0 < number < 1 << 61 for _, place, number in segments):
        raise DecodeError("a note of shared buffers names a lease that cannot be")
    if any(
        index >= len(segments) or offset % ALIGN_BYTES or not 0 < size < 1 << 48 or offset >= 1 << 48
        for _, index, offset, size in buffers
    ):
        raise DecodeError("a note of shared buffers names a place that cannot be")
    if {index for _, index, _, _ in buffers} != set(range(len(segments))):
        raise DecodeError("a note of shared buffers names segments that none of them lies in")
    if len({position for position, _, _, _ in buffers}) != len(buffers):
        raise DecodeError("a note of shared buffers gives two places to one buffer")
    return tag, segments, buffers


def _are_rows(rows: object, width: int) -> bool:
    return type(rows) is list and all(
        type(row) is list and len(row) == width and all(type(value) is int and value >= 0 for value in row)
        for row in rows
    )
