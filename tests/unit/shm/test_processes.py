"""Does the arena stay right when real processes hold its leases, share its budget, and are killed?"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rpcrl.leftovers import (
    create_run_dir,
    find_stale_shared_memory,
    remove_run_dir,
    remove_shared_memory,
    sweep_stale_runs,
)
from rpcrl.shm.arena import Arena
from rpcrl.shm.budget import Budget
from tests.unit.shm.conftest import MIB, Run

RECEIVER = """
import hashlib, json, sys
from rpcrl.shm.reader import Reader

reader, kept = Reader(sys.argv[1]), {}
for line in sys.stdin:
    order, value = json.loads(line)
    if order == "open":
        kept[value[1][0][0]] = reader.open(value)[0].take()
        answer = "opened"
    elif order == "look":
        answer = hashlib.sha256(kept[value]).hexdigest()
    elif order == "write":
        kept[value][:] = bytes(len(kept[value]))
        answer = "written"
    else:
        del kept[value]
        answer = "dropped"
    print(json.dumps(answer), flush=True)
"""

SENDER = """
import sys
from rpcrl.shm.arena import Arena
from rpcrl.shm.budget import Budget

budget = Budget(sys.argv[1])
kept = Arena(budget, sys.argv[1], "mortal").place([bytes(4 << 20)])
if sys.argv[2] == "locked":
    import fcntl
    fcntl.flock(budget._fd, fcntl.LOCK_EX)
print(budget.used_bytes, flush=True)
sys.stdin.read()
"""


class Receiver:
    """A process that opens what it is told to."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def ask(self, order: str, value: object) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps([order, value]) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())


@contextmanager
def _python(code: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", code, *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def test_three_processes_share_one_payload_and_each_owns_it(run: Run) -> None:
    content = os.urandom(2 * MIB)
    digest = hashlib.sha256(content).hexdigest()
    placed = run.arena.place([content])
    with _python(RECEIVER, run.run_id) as first, _python(RECEIVER, run.run_id) as second:
        receivers = [Receiver(first), Receiver(second)]
        notes = [run.note(placed, f"w{rank}") for rank in range(2)]
        del placed
        for receiver, note in zip(receivers, notes, strict=True):
            assert receiver.ask("open", note) == "opened"
        assert receivers[0].ask("write", 0) == "written"
        for _ in range(3):
            run.send(bytes(2 * MIB))  # never into the slot that is out
        assert receivers[1].ask("look", 0) == digest
        assert receivers[0].ask("look", 0) != digest
        assert run.arena.num_leased() == 2
        receivers[0].ask("drop", 0)
        assert run.arena.num_leased() == 1
        second.send_signal(signal.SIGKILL)
        second.wait(10)
        assert run.arena.num_leased() == 1  # a death is told by who saw it
        run.arena.end_leases("w1")
        assert run.arena.num_leased() == 0


def test_a_killed_sender_leaves_a_budget_that_can_be_counted_anew(run: Run) -> None:
    with _python(SENDER, run.run_id, "free") as process:
        assert process.stdout is not None
        used = int(process.stdout.readline())
        assert used >= 4 * MIB
        process.kill()
        process.wait(10)
    assert run.budget.used_bytes == used
    placed = run.arena.place([bytes(MIB)])
    run.budget.remove_all_of("mortal")
    assert run.budget.used_bytes == MIB
    assert len(run.files()) == 2
    assert placed


def test_a_process_that_dies_with_the_lock_does_not_stop_the_others(run: Run) -> None:
    with _python(SENDER, run.run_id, "locked") as process:
        assert process.stdout is not None
        assert process.stdout.readline()
        process.kill()
        process.wait(10)
    run.budget.remove_all_of("mortal")
    assert run.arena.place([bytes(MIB)]) != (bytes(MIB),)


def test_what_a_run_has_in_memory_goes_with_its_directory(run: Run, tmp_path: Any) -> None:
    run.send(bytes(MIB))
    directory = create_run_dir(run.run_id, tmp_path / "run")
    budget = Budget(f"{run.run_id}0", MIB)
    try:
        assert run.files()
        assert remove_run_dir(directory)
        assert run.files() == []
        assert os.path.exists(f"/dev/shm/rpcrl-{run.run_id}0-budget")  # another run, whose id begins alike
    finally:
        budget.close()
        os.unlink(f"/dev/shm/rpcrl-{run.run_id}0-budget")


ABANDON = """
import os, sys
from rpcrl.shm.exchange import Exchange

exchange = Exchange(sys.argv[1], "driver", 1 << 24, owns_run=sys.argv[2] == "driver")
placed = exchange.arena.place([bytes(1 << 20)])
print("placed", flush=True)
sys.stdin.read()
"""


def test_files_of_a_dead_driver_are_found_without_its_directory(run: Run, tmp_path: Path) -> None:
    run_ids = {who: f"{run.run_id}-{who}" for who in ("driver", "somebody")}
    try:
        with (
            _python(ABANDON, run_ids["driver"], "driver") as first,
            _python(ABANDON, run_ids["somebody"], "") as second,
        ):
            for process in (first, second):
                assert process.stdout is not None
                assert process.stdout.readline() == "placed\n"
            assert not set(run_ids.values()) & set(find_stale_shared_memory())
            for process in (first, second):
                process.kill()
                process.wait(10)
        # Any run that starts on this machine removes them as well, and may be faster.
        found = set(run_ids.values()) & set(find_stale_shared_memory())
        assert found == {run_ids["driver"]} or not list(Path("/dev/shm").glob(f"rpcrl-{run_ids['driver']}-*"))
        sweep_stale_runs(tmp_path)
        assert not list(Path("/dev/shm").glob(f"rpcrl-{run_ids['driver']}-*"))
        assert list(Path("/dev/shm").glob(f"rpcrl-{run_ids['somebody']}-*"))
    finally:
        for run_id in run_ids.values():
            remove_shared_memory(run_id)


def test_two_senders_keep_one_limit(run: Run) -> None:
    budget = Budget(run.run_id, 1)
    try:
        assert budget.limit_bytes == 256 * MIB  # set by the first
        other = Arena(budget, run.run_id, "other")
        mine = run.arena.place([bytes(150 * MIB)])
        assert other.place([bytes(150 * MIB)]) == (bytes(150 * MIB),)
        assert mine
    finally:
        budget.close()
