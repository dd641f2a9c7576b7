"""Where does a sender put large buffers, and when may it use the place again?

An arena is one process's pool of *slots*: files in /dev/shm that it keeps mapped and uses again and again, because new
pages cost several times what copying into warm ones does. ``place`` copies buffers in, once, whatever the number of
receivers. Each receiver of the message gets a lease (see ``leases``). A slot is free again when the sender has let go
of it (no open call and no kept reply refers to it) and no lease is out.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import weakref
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from rpcrl.logs import get_logger
from rpcrl.shm.budget import Budget, free_bytes
from rpcrl.shm.buffers import Buffer, Hold, Lent, Placed
from rpcrl.shm.files import PAGE_BYTES, board_path, map_file, owner_tag, segment_path
from rpcrl.shm.leases import BOARD_BYTES, GRACE_S, HELD, LEASES_PER_BOARD, MAX_BOARDS, RETURNED
from rpcrl.traffic import count

__all__ = ["ALIGN_BYTES", "MIN_SHARED_BYTES", "Arena", "Loan"]

MIN_SHARED_BYTES = 64 << 10
"""Smaller buffers cost less in the message itself."""
OWN_SLOT_BYTES = 1 << 20
"""Buffers from this size on have a slot each, so that one that is kept does not keep its neighbours; smaller ones of
one message share a slot, so that a batch of many columns costs few mappings."""
ALIGN_BYTES = 64
MAX_SLOTS = 16_384
"""A process may have 65,530 mappings (vm.max_map_count), and each slot is one."""
IDLE_S = 30.0
"""A slot that nobody has used for this long is given back to the system."""
LOST_AFTER_S = 60.0
"""A lease whose message was not received for this long, and will not be sent again, is revoked."""
TIDY_S = 1.0
LEASES_A_LOOK = 64
"""Each ``place`` looks at so many leases in turn, so that none pays for thousands."""

logger = get_logger(__name__)


@dataclass(eq=False, slots=True)
class _Slot:
    number: int
    path: str
    num_bytes: int
    memory: memoryview
    num_leases: int = 0
    held: bool = True
    free_since: float = 0.0


@dataclass(eq=False, slots=True)
class _Lease:
    index: int
    number: int
    slot: _Slot
    holder: str
    lent_at: float
    revoked_at: float | None = None


class Arena:
    """The shared memory that one process of a run sends from. For any thread.

    ``identity`` is the name under which the controller knows the process.
    """

    def __init__(
        self, budget: Budget, run_id: str, identity: str, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._budget = budget
        self._run_id = run_id
        self._clock = clock
        self.tag = owner_tag(identity)
        self._lock = threading.Lock()
        self._slots: dict[int, _Slot] = {}
        self._free: list[tuple[int, int]] = []
        """(size, number) of the free slots, sorted."""
        self._let_go: deque[_Slot] = deque()
        """Filled by finalizers, which may run in any thread at any time, also in one that has the lock."""
        self._leases: deque[_Lease] = deque()
        self._boards: list[memoryview] = []
        self._places: list[int] = []
        """Places on the boards that no lease has."""
        self._next_slot = 0
        self._next_lease = 1
        self._pressure = budget.pressure
        self._tidy_at = 0.0
        self._closed = False
        self.shared_bytes = 0
        """Bytes copied in so far."""
        self.refused_bytes = 0
        """Bytes so far that found no room and went through the socket."""

    # -- putting buffers in ------------------------------------------------------------------------------------------

    def place(self, buffers: Sequence[Buffer]) -> tuple[Buffer, ...]:
        """Return the buffers with the large ones copied into shared memory; where there is no room they stay.

        When this returns, the memory that was copied may be changed.
        """
        placed = list(buffers)
        for group in _grouped(buffers):
            offsets, num_bytes = [], 0
            for _, view in group:
                offsets.append(num_bytes)
                num_bytes += -(-view.nbytes // ALIGN_BYTES) * ALIGN_BYTES
            slot = self._take_slot(num_bytes)
            if slot is None:
                self._refuse(num_bytes)
                continue
            hold = Hold()
            weakref.finalize(hold, self._let_go.append, slot).atexit = False
            for (position, view), offset in zip(group, offsets, strict=True):
                part = slot.memory[offset : offset + view.nbytes]
                _copy(part, view)
                placed[position] = Placed(slot.number, offset, part.toreadonly(), hold)
                self.shared_bytes += view.nbytes
            count(shared_bytes=sum(view.nbytes for _, view in group))
        return tuple(placed)

    def _take_slot(self, num_bytes: int) -> _Slot | None:
        size = _size_class(num_bytes)
        now = self._clock()
        with self._lock:
            if self._closed:
                return None
            self._settle(now, LEASES_A_LOOK)
            slot = self._pop_free(size)
            if slot is None:
                self._settle(now, len(self._leases))
                slot = self._pop_free(size)
            if now >= self._tidy_at:
                self._tidy(now)
        return slot or self._new_slot(size)

    def _pop_free(self, size: int) -> _Slot | None:
        at = bisect_left(self._free, (size, -1))
        if at == len(self._free) or self._free[at][0] > 2 * size:
            return None
        slot = self._slots[self._free.pop(at)[1]]
        slot.held = True
        return slot

    def _new_slot(self, size: int) -> _Slot | None:
        with self._lock:
            if len(self._slots) >= MAX_SLOTS:
                return None
            number = self._next_slot
            self._next_slot += 1
        path = segment_path(self._run_id, self.tag, number)
        memory = self._new_file(path, size)
        if memory is None:
            with self._lock:
                given_back = self._drop_free(lambda _: True)
            memory = self._new_file(path, size) if given_back else None
        if memory is None:
            self._budget.ask_for_room()
            return None
        slot = _Slot(number, path, size, memory)
        with self._lock:
            if self._closed:
                return None  # whoever closed it removes the run's files
            self._slots[number] = slot
        return slot

    def _new_file(self, path: str, size: int) -> memoryview | None:
        try:
            fd = self._budget.create(path, size)
        except OSError as error:  # no descriptors left, no such folder any more: the socket takes the buffers
            logger.debug("%s: %s", path, error)
            return None
        if fd is None:
            return None
        try:
            mapping = map_file(fd, size, private=False)
        finally:
            os.close(fd)
        if mapping is None:
            self._budget.remove(path, size)
            return None
        return memoryview(mapping)

    def _refuse(self, num_bytes: int) -> None:
        self.refused_bytes += num_bytes
        if not self._closed and self._budget.is_first_warning():
            limit, used = self._budget.limit_bytes, self._budget.used_bytes
            logger.warning(
                "no shared memory for a buffer of %.1f MiB: the run has %.1f MiB of its %.1f MiB in use "
                "(Controller(shared_memory_bytes=%d)), and /dev/shm has %.1f MiB free. Such buffers go through sockets "
                "now, which works and costs several times as much. Keep fewer received tensors (or clones), raise "
                "the limit, or give /dev/shm more (docker run --shm-size=…). This is said once a run",
                *(value / 2**20 for value in (num_bytes, used, limit)),
                limit,
                free_bytes() / 2**20,
            )

    # -- leases ------------------------------------------------------------------------------------------------------

    def _lend(self, numbers: Iterable[int], holder: str) -> list[_Lease] | None:
        """Draw one lease per slot; None, and none is drawn, when there are no more places."""
        with self._lock:
            wanted = list(numbers)
            if len(self._places) < len(wanted):
                self._settle(self._clock(), len(self._leases))
            while len(self._places) < len(wanted) and self._add_board():
                pass
            if self._closed or len(self._places) < len(wanted):
                return None
            now = self._clock()
            leases = []
            for number in wanted:
                lease = _Lease(self._places.pop(), self._next_lease, self._slots[number], holder, now)
                self._next_lease += 1
                words, position = self._word(lease)
                words[position] = lease.number << 1
                lease.slot.num_leases += 1
                self._leases.append(lease)
                leases.append(lease)
            return leases

    def _add_board(self) -> bool:
        number = len(self._boards)
        if number == MAX_BOARDS:
            return False
        memory = self._new_file(board_path(self._run_id, self.tag, number), BOARD_BYTES)
        if memory is None:
            return False
        self._boards.append(memory.cast("Q"))
        first = number * LEASES_PER_BOARD
        self._places += range(first + LEASES_PER_BOARD - 1, first - 1, -1)
        return True

    def _word(self, lease: _Lease) -> tuple[memoryview, int]:
        board, place = divmod(lease.index, LEASES_PER_BOARD)
        return self._boards[board], 2 * place

    def _end(self, leases: Iterable[_Lease]) -> None:
        """End leases in place of their holder, which never had them or is gone."""
        for lease in leases:
            words, position = self._word(lease)
            words[position + 1] = lease.number << 2 | RETURNED

    def end_leases(self, holder: str) -> None:
        """End all leases of a process that has exited."""
        with self._lock:
            self._end(lease for lease in self._leases if lease.holder == holder)

    def _settle(self, now: float, num_leases: int) -> None:
        """Take note of what was let go, and of the leases among the next ``num_leases`` that are over."""
        while self._let_go:
            slot = self._let_go.popleft()
            slot.held = False
            self._free_if_unused(slot, now)
        for _ in range(min(num_leases, len(self._leases))):
            lease = self._leases.popleft()
            if self._is_over(lease, now):
                lease.slot.num_leases -= 1
                self._free_if_unused(lease.slot, now)
            else:
                self._leases.append(lease)

    def _is_over(self, lease: _Lease, now: float) -> bool:
        words, position = self._word(lease)
        state = words[position + 1]
        if state == lease.number << 2 | RETURNED:
            self._places.append(lease.index)
            return True
        if state == lease.number << 2 | HELD or lease.slot.held:
            return False
        if lease.revoked_at is not None:
            return now - lease.revoked_at >= GRACE_S  # and its place is never used again
        if now - lease.lent_at >= LOST_AFTER_S:
            words[position] = lease.number << 1 | 1
            lease.revoked_at = now
        return False

    def _free_if_unused(self, slot: _Slot, now: float) -> None:
        if not slot.held and slot.num_leases == 0 and slot.number in self._slots:
            slot.free_since = now
            insort(self._free, (slot.num_bytes, slot.number))

    # -- giving back -------------------------------------------------------------------------------------------------

    def tidy(self) -> None:
        """Give back what was not used for a while, or all that is free when another process was refused."""
        now = self._clock()
        with self._lock:
            if not self._closed and now >= self._tidy_at:
                self._settle(now, len(self._leases))
                self._tidy(now)

    def _tidy(self, now: float) -> None:
        self._tidy_at = now + TIDY_S
        wanted = self._budget.pressure != self._pressure
        self._pressure = self._budget.pressure
        self._drop_free(lambda slot: wanted or now - slot.free_since >= IDLE_S)

    def _drop_free(self, unwanted: Callable[[_Slot], bool]) -> bool:
        dropped = [entry for entry in self._free if unwanted(self._slots[entry[1]])]
        for entry in dropped:
            self._free.remove(entry)
            slot = self._slots.pop(entry[1])
            self._budget.remove(slot.path, slot.num_bytes)
        return bool(dropped)

    def close(self) -> None:
        """Take no more buffers. The files stay: receivers may be about to open them, and go with the run or when the
        end of this process is known."""
        with self._lock:
            self._closed = True
            self._slots.clear()
            self._free.clear()
            self._let_go.clear()

    @property
    def num_slots(self) -> int:
        """Slots that exist, free or not."""
        return len(self._slots)

    def num_leased(self) -> int:
        """Leases that are out now."""
        with self._lock:
            self._settle(self._clock(), len(self._leases))
            return len(self._leases)


class Loan:
    """The leases that one message to one receiver needs: drawn when its frames are made, undone if it was not sent."""

    def __init__(self, arena: Arena, holder: str) -> None:
        self._arena = arena
        self._holder = holder
        self._leases: list[_Lease] = []

    def note(self, buffers: Sequence[Buffer]) -> list[object] | None:
        """Return what the message says about its buffers in shared memory; None when all travel in the message.

        ``[tag, [[segment, place, number], …], [[position, index of the segment in this note, offset, size], …]]``
        """
        places = [(position, each) for position, each in enumerate(buffers) if isinstance(each, Placed)]
        if not places:
            return None
        order = {number: index for index, number in enumerate(dict.fromkeys(each.slot for _, each in places))}
        leases = self._arena._lend(order, self._holder)
        if leases is None:
            return None
        self._leases += leases
        segments = [[number, lease.index, lease.number] for number, lease in zip(order, leases, strict=True)]
        return [
            self._arena.tag,
            segments,
            [[position, order[each.slot], each.offset, each.view.nbytes] for position, each in places],
        ]

    def cancel(self) -> None:
        """The message was not sent: nobody will ever hold these leases."""
        self._arena._end(self._leases)
        self._leases = []


def _grouped(buffers: Sequence[Buffer]) -> list[list[tuple[int, memoryview]]]:
    """Return which buffers go into a slot together, each with its position."""
    groups: list[list[tuple[int, memoryview]]] = []
    together: list[tuple[int, memoryview]] = []
    for position, buffer in enumerate(buffers):
        if isinstance(buffer, Placed | Lent):
            continue
        view = memoryview(buffer)
        if view.nbytes >= OWN_SLOT_BYTES:
            groups.append([(position, view.cast("B"))])
        elif view.nbytes >= MIN_SHARED_BYTES:
            together.append((position, view.cast("B")))
    return [*groups, together] if together else groups


def _size_class(num_bytes: int) -> int:
    """Return the size of the slot for so many bytes: four sizes per doubling, whole pages."""
    step = max(PAGE_BYTES, 1 << max(0, num_bytes.bit_length() - 3))
    return -(-num_bytes // step) * step


def _copy(target: memoryview, source: memoryview) -> None:
    """Copy bytes; where numpy is loaded, without holding the interpreter's lock."""
    numpy = sys.modules.get("numpy")
    if numpy is None:
        target[:] = source
    else:
        numpy.copyto(numpy.frombuffer(target, numpy.uint8), numpy.frombuffer(source, numpy.uint8))
