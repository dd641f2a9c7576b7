"""Does a receiver refuse what is not there, and does it leave nothing wrong behind in a fork?"""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rpcrl.errors import DecodeError
from rpcrl.shm import reader as reader_module
from rpcrl.shm.files import segment_path
from rpcrl.shm.leases import HELD
from tests.unit.shm.conftest import MIB, Run


def test_a_buffer_is_handed_over_once(run: Run) -> None:
    (lent,) = run.send(b"a" * MIB)
    assert lent.num_bytes == MIB
    lent.take()
    with pytest.raises(DecodeError, match="decoded before"):
        lent.take()


def _with(change: Callable[[Any], object]) -> Callable[[Any], Any]:
    def make(note: Any) -> Any:
        changed = copy.deepcopy(note)
        result = change(changed)
        return changed if result is None else result

    return make


BROKEN: dict[str, Callable[[Any], Any]] = {
    "not a list": lambda note: {},
    "too short": lambda note: note[:2],
    "a path for a tag": _with(lambda note: note.__setitem__(0, "../../etc/passwd")),
    "another tag": _with(lambda note: note.__setitem__(0, "0" * 16)),
    "segment is text": _with(lambda note: note[1][0].__setitem__(0, "0")),
    "segment is negative": _with(lambda note: note[1][0].__setitem__(0, -1)),
    "segment is true": _with(lambda note: note[1][0].__setitem__(0, True)),
    "segment is not there": _with(lambda note: note[1][0].__setitem__(0, 77)),
    "place beyond all boards": _with(lambda note: note[1][0].__setitem__(1, 1 << 40)),
    "place on a board that is not there": _with(lambda note: note[1][0].__setitem__(1, 5000)),
    "another lease": _with(lambda note: note[1][0].__setitem__(2, 99)),
    "lease zero": _with(lambda note: note[1][0].__setitem__(2, 0)),
    "row too long": _with(lambda note: note[2][0].append(0)),
    "index beyond": _with(lambda note: note[2][0].__setitem__(1, 1)),
    "unaligned": _with(lambda note: note[2][0].__setitem__(2, 1)),
    "beyond the segment": _with(lambda note: note[2][0].__setitem__(3, 8 * MIB)),
    "far beyond": _with(lambda note: note[2][0].__setitem__(2, 1 << 62)),
    "empty": _with(lambda note: note[2][0].__setitem__(3, 0)),
    "unused segment": _with(lambda note: note[1].append([0, 1, 2])),
    "one buffer twice": _with(lambda note: note[2].append(list(note[2][0]))),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_note_that_is_wrong_is_a_decode_error(run: Run, kind: str) -> None:
    note = run.note(run.arena.place([b"a" * MIB]))
    with pytest.raises(DecodeError):
        run.reader().open(BROKEN[kind](note))
    assert bytes(run.reader().open(run.note(run.arena.place([b"b" * MIB])))[0].take()) == b"b" * MIB


def test_a_message_that_comes_twice_is_opened_once(run: Run) -> None:
    note = run.note(run.arena.place([b"a" * MIB]))
    reader = run.reader()
    first = reader.open(note)[0].take()
    with pytest.raises(DecodeError, match="came twice"):
        reader.open(note)
    assert run.arena.num_leased() == 1
    assert bytes(first) == b"a" * MIB
    del first
    with pytest.raises(DecodeError, match="came twice"):
        reader.open(note)


def test_a_link_is_not_followed(run: Run) -> None:
    placed = run.arena.place([b"a" * MIB])
    note = run.note(placed)
    path = Path(segment_path(run.run_id, run.arena.tag, 0))
    elsewhere = path.with_name(f"{path.name}-elsewhere")
    path.rename(elsewhere)
    path.symlink_to(elsewhere)
    with pytest.raises(DecodeError, match="not there"):
        run.reader().open(note)
    assert run.arena.num_leased() == 0  # it was told that nobody reads there


def test_a_receiver_without_room_for_mappings_copies(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = run.reader()
    run.send(b"a" * MIB, reader=reader)  # its board is mapped from now on
    refused = []
    monkeypatch.setattr(reader_module, "map_file", lambda fd, size, private: refused.append(size))
    (lent,) = run.send(b"b" * MIB, reader=reader)
    assert refused == [MIB]
    assert bytes(lent.take()) == b"b" * MIB
    assert run.arena.num_leased() == 0


FORK = """
import os, sys
from rpcrl.shm.arena import Arena, Loan
from rpcrl.shm.budget import Budget
from rpcrl.shm.reader import Reader

run_id = sys.argv[1]
arena = Arena(Budget(run_id, 1 << 24), run_id, "forking")
reader = Reader(run_id)
placed = arena.place([b"a" * (1 << 20)])
kept = reader.open(Loan(arena, "w0").note(placed))[0].take()
del placed
ready_in, ready_out = os.pipe()
go_in, go_out = os.pipe()
child = os.fork()
if child == 0:
    os.read(go_in, 1)
    same = bytes(kept) == b"a" * (1 << 20)
    del kept
    os._exit(0 if same else 1)
del kept
after_parent = arena.num_leased()
for _ in range(3):
    placed = arena.place([b"b" * (1 << 20)])  # would overwrite what the child still reads
    reader.open(Loan(arena, "w0").note(placed))
    del placed
os.write(go_out, b"g")
_, status = os.waitpid(child, 0)
placed = arena.place([b"c" * (1 << 20)])
opened = reader.open(Loan(arena, "w0").note(placed))
del placed, opened
print(after_parent, os.waitstatus_to_exitcode(status), arena.num_leased())
"""


def test_a_fork_keeps_what_it_took_along(run: Run) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", FORK, run.run_id], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["1", "0", "1"]
    assert os.getpid()


def test_a_lease_that_is_revoked_while_it_is_claimed_is_not_used(run: Run) -> None:
    note: Any = run.note(run.arena.place([b"a" * MIB]))
    place, number = note[1][0][1:]
    words = run.arena._boards[0]
    revoked = []

    class Slow:
        """The board, for a receiver that the sender overtakes between its first look and its claim."""

        def __getitem__(self, position: int) -> int:
            return words[position]

        def __setitem__(self, position: int, value: int) -> None:
            if not revoked:
                words[2 * place] |= 1
                revoked.append(value)
            words[position] = value

    reader = run.reader()
    reader._boards._boards[run.arena.tag, 0] = Slow()  # type: ignore[assignment]
    with pytest.raises(DecodeError, match="came so late"):
        reader.open(note)
    assert revoked == [number << 2 | HELD]
    assert run.arena.num_leased() == 0
