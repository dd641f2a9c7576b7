"""Does a slot hold what was sent for as long as anybody may read it, and not longer?"""

from __future__ import annotations

import errno
import gc
import logging
import os
import threading
from collections.abc import Callable

import numpy as np
import pytest
import torch

from rpcrl.errors import DecodeError
from rpcrl.shm.arena import IDLE_S, LOST_AFTER_S, MIN_SHARED_BYTES, TIDY_S, Arena, Loan
from rpcrl.shm.budget import Budget
from rpcrl.shm.buffers import Placed
from rpcrl.shm.leases import GRACE_S, LEASES_PER_BOARD, MAX_BOARDS
from tests.unit.shm.conftest import MIB, Run


def test_large_buffers_are_placed_and_small_ones_stay(run: Run) -> None:
    large, small = b"x" * MIN_SHARED_BYTES, b"y" * (MIN_SHARED_BYTES - 1)
    placed = run.arena.place([small, large])
    assert placed[0] is small
    assert isinstance(placed[1], Placed)
    assert bytes(placed[1].view) == large
    assert run.arena.shared_bytes == len(large)


def test_buffers_arrive_in_their_places_with_any_neighbours(run: Run) -> None:
    sizes = [70_001, 5, 3 * MIB + 7, 65_536, 100, 1 * MIB, 99_999]
    sent = [os.urandom(size) for size in sizes]
    placed = run.arena.place(sent)
    opened = run.reader().open(run.note(placed))
    assert sorted(opened) == [0, 2, 3, 5, 6]
    for position, lent in opened.items():
        memory = lent.take()
        assert bytes(memory) == sent[position]
        assert np.frombuffer(memory, np.uint8).ctypes.data % 64 == 0
    assert [placed[1], placed[4]] == [sent[1], sent[4]]


def test_p58_what_was_sent_does_not_follow_its_source(run: Run) -> None:
    source = np.arange(8 * MIB // 8)
    before = source.copy()
    placed = run.arena.place([memoryview(source).cast("B")])
    note = run.note(placed)
    source[:] = -1  # the receiver has not even looked yet
    received = run.reader().open(note)[0].take()
    assert np.array_equal(np.frombuffer(received, np.int64), before)


def test_p58_a_stalled_reader_keeps_its_content_while_the_sender_goes_on(run: Run) -> None:
    note = run.note(run.arena.place([b"old" * MIB]))
    for _ in range(5):
        run.send(b"new" * MIB)
    assert bytes(run.reader().open(note)[0].take()) == b"old" * MIB


def test_a_payload_for_many_receivers_is_written_once_and_each_gets_its_own(run: Run) -> None:
    placed = run.arena.place([b"a" * MIB])
    memories = [run.reader().open(run.note(placed, f"w{rank}"))[0].take() for rank in range(4)]
    assert run.arena.shared_bytes == MIB
    assert run.arena.num_slots == 1
    memories[0][:] = b"b" * MIB
    memories[1][0] = ord("c")
    assert bytes(memories[1][:2]) == b"ca"
    assert bytes(memories[2]) == bytes(memories[3]) == b"a" * MIB
    assert isinstance(placed[0], Placed)
    assert bytes(placed[0].view) == b"a" * MIB


def test_a_slot_waits_for_every_receiver_and_for_its_sender(run: Run) -> None:
    placed = run.arena.place([b"a" * MIB])
    first, second = (run.reader().open(run.note(placed, name))[0].take() for name in ("w0", "w1"))
    assert not _is_free(run)
    first.release()
    del first
    assert not _is_free(run)
    del second
    assert not _is_free(run)  # the sender may still send it
    del placed
    assert _is_free(run)


VIEWS: dict[str, Callable[[torch.Tensor], object]] = {
    "tensor": lambda tensor: tensor,
    "slice": lambda tensor: tensor[3:5, 2],
    "transposed": lambda tensor: tensor.t()[1:],
    "other dtype": lambda tensor: tensor.view(torch.int16),
    "array": lambda tensor: tensor.numpy(),
    "slice of array": lambda tensor: tensor.numpy()[3:, 1],
    "storage": lambda tensor: tensor.untyped_storage(),
    "tensor on the storage": lambda tensor: torch.empty(0).set_(tensor.untyped_storage()),
    "parameter": lambda tensor: torch.nn.Parameter(tensor),
    "memoryview": lambda tensor: memoryview(tensor.numpy()),
}


@pytest.mark.parametrize("kind", VIEWS)
def test_a_lease_lasts_as_long_as_the_last_view_of_a_tensor(run: Run, kind: str) -> None:
    (lent,) = run.send(np.arange(1 << 18, dtype=np.float32).data.cast("B"))
    tensor = torch.frombuffer(lent.take(), dtype=torch.float32).reshape(512, 512)
    kept = VIEWS[kind](tensor)
    del tensor
    gc.collect()
    assert not _is_free(run)
    del kept
    assert _is_free(run)


def test_a_lease_ends_with_a_message_that_nobody_decodes(run: Run) -> None:
    lent = run.send(b"a" * MIB)
    assert not _is_free(run)
    del lent
    assert _is_free(run)


def test_free_slots_are_used_again(run: Run) -> None:
    for size in (MIB, MIB - 5, 900_000, MIB):
        run.send(bytes(size))
    assert run.arena.num_slots == 1
    run.send(bytes(300_000))  # a slot more than twice as large would be a waste
    assert run.arena.num_slots == 2


def test_a_message_that_was_not_sent_takes_no_lease(run: Run) -> None:
    placed = run.arena.place([b"a" * MIB])
    loan = Loan(run.arena, "w0")
    assert loan.note(placed) is not None
    assert run.arena.num_leased() == 1
    loan.cancel()
    assert run.arena.num_leased() == 0


def test_the_leases_of_a_receiver_end_with_it_and_no_others(run: Run) -> None:
    placed = run.arena.place([b"a" * MIB])
    kept = [run.reader().open(run.note(placed, name)) for name in ("w0", "w1", "w0")]
    run.arena.end_leases("w0")
    assert run.arena.num_leased() == 1
    assert kept


def test_a_finalizer_may_run_while_its_thread_holds_the_lock(run: Run) -> None:
    placed = run.arena.place([b"a" * MIB])
    opened = run.reader().open(run.note(placed))
    done = threading.Event()

    def let_go() -> None:
        nonlocal placed, opened
        with run.arena._lock:  # as when the collector runs inside of place
            del placed, opened
        done.set()

    thread = threading.Thread(target=let_go)
    thread.start()
    thread.join(10.0)
    assert done.is_set()
    assert _is_free(run)


def test_thousands_of_leases_at_once_use_no_descriptors_and_all_come_back(make_run: Callable[..., Run]) -> None:
    run = make_run(1 << 30)
    reader = run.reader()
    before = len(os.listdir("/proc/self/fd"))
    kept = [run.send(bytes([number % 251]) * MIN_SHARED_BYTES, reader=reader) for number in range(3_000)]
    assert len(os.listdir("/proc/self/fd")) == before
    assert run.arena.num_leased() == 3_000
    for number, (lent,) in enumerate(kept):
        assert set(bytes(lent.take()[:: 1 << 12])) == {number % 251}
    kept.clear()
    assert run.arena.num_leased() == 0
    run.send(bytes(MIN_SHARED_BYTES))
    assert run.arena.num_slots == 3_000


def test_more_leases_than_one_board_has(run: Run) -> None:
    placed = run.arena.place([b"a" * MIN_SHARED_BYTES])
    reader = run.reader()
    kept = [reader.open(run.note(placed)) for _ in range(LEASES_PER_BOARD + 1)]
    assert sum(name[-2] == "b" for name in run.files()) == 2
    assert bytes(kept[-1][0].take()) == b"a" * MIN_SHARED_BYTES


def test_without_places_for_leases_buffers_travel_in_the_message(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rpcrl.shm.arena.MAX_BOARDS", 1)
    placed = run.arena.place([b"a" * MIN_SHARED_BYTES])
    for _ in range(LEASES_PER_BOARD):
        assert Loan(run.arena, "w0").note(placed) is not None
    assert Loan(run.arena, "w0").note(placed) is None
    assert MAX_BOARDS > 1


# -- too little room -------------------------------------------------------------------------------------------------


def test_a_full_arena_falls_back_warns_once_and_recovers(
    make_run: Callable[..., Run], caplog: pytest.LogCaptureFixture
) -> None:
    run = make_run(5 * MIB // 2)
    other = Arena(Budget(run.run_id), run.run_id, "other")
    try:
        kept = [run.send(b"a" * MIB)]
        kept.append(run.send(b"b" * MIB))
        with caplog.at_level(logging.WARNING):
            for arena in (run.arena, other, run.arena):
                assert arena.place([b"c" * MIB]) == (b"c" * MIB,)
        warnings = [record.getMessage() for record in caplog.records]
        assert len(warnings) == 1
        for part in ("1.0 MiB", "2.1 MiB of its 2.5 MiB", f"Controller(shared_memory_bytes={5 * MIB // 2})"):
            assert part in warnings[0]
        assert run.arena.refused_bytes == 2 * MIB
        assert run.budget.used_bytes <= run.budget.limit_bytes
        kept.clear()
        assert bytes(run.send(b"d" * MIB)[0].take()) == b"d" * MIB
    finally:
        other._budget.close()


def test_a_full_file_system_is_a_fall_back_and_no_signal(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    refused = []

    def refuse(fd: int, offset: int, size: int) -> None:
        refused.append(size)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    assert run.arena.place([b"a" * MIB]) == (b"a" * MIB,)
    assert refused
    assert run.budget.used_bytes == 0
    assert [name for name in run.files() if "budget" not in name] == []


def test_zero_bytes_switch_it_off(make_run: Callable[..., Run]) -> None:
    run = make_run(0)
    assert run.arena.place([b"a" * MIB]) == (b"a" * MIB,)
    assert run.arena.num_slots == 0


def test_free_slots_of_one_size_make_room_for_another(make_run: Callable[..., Run]) -> None:
    run = make_run(5 * MIB)
    kept = [run.send(bytes(MIB)) for _ in range(4)]
    kept.clear()
    assert run.arena.num_leased() == 0
    assert isinstance(run.arena.place([bytes(4 * MIB)])[0], Placed)


def test_a_process_that_is_refused_gets_what_others_keep_for_later(make_run: Callable[..., Run]) -> None:
    run = make_run(5 * MIB)
    budget = Budget(run.run_id)
    other = Arena(budget, run.run_id, "other")
    try:
        run.send(bytes(4 * MIB))
        assert other.place([bytes(4 * MIB)]) == (bytes(4 * MIB),)
        run.clock.now_s += TIDY_S
        run.arena.tidy()
        assert isinstance(other.place([bytes(4 * MIB)])[0], Placed)
    finally:
        budget.close()


def test_slots_that_nobody_uses_go_back_to_the_system(run: Run) -> None:
    run.send(bytes(MIB))
    kept = run.send(bytes(2 * MIB))
    run.arena.tidy()
    run.clock.now_s += IDLE_S - 1
    run.arena.tidy()
    assert run.arena.num_slots == 2
    run.clock.now_s += 2
    run.arena.tidy()
    assert run.arena.num_slots == 1
    assert len(run.files()) == 3  # the budget, a board, and the segment that is out
    assert kept


# -- lost messages ---------------------------------------------------------------------------------------------------


def test_a_lease_of_a_lost_message_is_revoked_and_its_place_not_used_again(run: Run) -> None:
    placed = run.arena.place([b"a" * MIB])
    note = run.note(placed)
    run.clock.now_s += 10 * LOST_AFTER_S
    assert run.arena.num_leased() == 1  # the sender still has it, and would send it again
    del placed
    assert run.arena.num_leased() == 1
    run.clock.now_s += GRACE_S
    assert run.arena.num_leased() == 0
    assert _is_free(run)
    with pytest.raises(DecodeError, match="came so late"):
        run.reader().open(note)  # it was only stuck somewhere
    again = run.note(run.arena.place([b"b" * MIB]))
    assert _place(again) != _place(note)


def test_a_receiver_that_comes_while_it_is_given_up_is_heard(run: Run) -> None:
    placed = run.arena.place([b"a" * MIB])
    early, late = run.note(placed), run.note(placed)
    del placed
    held = run.reader().open(early)
    run.clock.now_s += LOST_AFTER_S
    assert run.arena.num_leased() == 2  # the late one is revoked, but may be on its way
    with pytest.raises(DecodeError):
        run.reader().open(late)
    run.clock.now_s += GRACE_S
    assert run.arena.num_leased() == 1
    run.clock.now_s += 100 * LOST_AFTER_S
    assert run.arena.num_leased() == 1  # what is held is never taken away
    assert bytes(held[0].take()) == b"a" * MIB


def _is_free(run: Run) -> bool:
    """Tell whether the arena's only slot is free."""
    run.arena.num_leased()
    return len(run.arena._free) == run.arena.num_slots == 1


def _place(note: list[object]) -> int:
    segments = note[1]
    assert isinstance(segments, list)
    return int(segments[0][1])
