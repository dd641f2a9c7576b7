"""What does it cost to hand a buffer to another process, next to one memcpy and to bare ZeroMQ in the same run?

The buffer is put into the arena, a note goes to a process on the host by a Unix socket, that process maps it and
answers. ``untouched``: it only maps. ``touched``: it reads every byte, as it does of what ZeroMQ brings; the memcpy is
followed by one read of the copy. No codec, no call: for those see ``rpcrl bench dispatch``.
"""

from __future__ import annotations

import json
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import zmq
from report import options, report

import rpcrl
from rpcrl.bench.measure import Case, Row, measure, timed
from rpcrl.leftovers import remove_shared_memory
from rpcrl.shm.arena import Arena, Loan
from rpcrl.shm.budget import Budget
from rpcrl.shm.reader import Reader

READY_MS = 20_000


def _receive(address: str, run_id: str) -> None:
    """Be the other process: take notes and buffers, and answer each."""
    context = zmq.Context()
    socket = context.socket(zmq.PAIR)
    socket.connect(address)
    socket.send(b"ready")
    reader = Reader(run_id)
    while True:
        kind, content = socket.recv_multipart(copy=False)
        if kind.bytes == b"stop":
            break
        if kind.bytes.startswith(b"note"):
            memory = reader.open(json.loads(content.bytes))[0].take()
        else:
            memory = content.buffer
        if kind.bytes.endswith(b"touch"):
            np.frombuffer(memory, dtype=np.float32).sum()
        del memory, content
        socket.send(b"")
    socket.close()
    context.term()


class Pair:
    """This process and the other one."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="bs-")
        self._run_id = f"bench-{secrets.token_hex(6)}"
        self._budget = Budget(self._run_id)
        self._arena = Arena(self._budget, self._run_id, "sender")
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PAIR)
        address = f"ipc://{self._folder.name}/s"
        self._socket.bind(address)
        self._process = subprocess.Popen([sys.executable, str(Path(__file__).resolve()), address, self._run_id])
        if not self._socket.poll(READY_MS):
            self.close()
            raise TimeoutError("the other process did not come up")
        self._socket.recv()

    def __enter__(self) -> Pair:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def by_arena(self, data: np.ndarray, *, touch: bool) -> None:
        """Hand over by shared memory."""
        placed = self._arena.place([data.data.cast("B")])
        note = Loan(self._arena, "receiver").note(placed)
        if note is None:
            raise MemoryError("the arena had no room: /dev/shm is too small for this benchmark")
        self._exchange(b"note touch" if touch else b"note", json.dumps(note).encode())

    def by_socket(self, data: np.ndarray, *, touch: bool) -> None:
        """Hand over by ZeroMQ, without a copy on either side."""
        self._exchange(b"data touch" if touch else b"data", data)

    def _exchange(self, kind: bytes, content: object) -> None:
        self._socket.send_multipart([kind, content], copy=False)
        self._socket.recv()

    def close(self) -> None:
        """End the other process and remove everything."""
        self._socket.send_multipart([b"stop", b""])
        self._process.wait(timeout=10)
        self._socket.close()
        self._context.term()
        self._budget.close()
        remove_shared_memory(self._run_id)
        self._folder.cleanup()


def measure_sizes(sizes_mib: list[int], *, rounds: int, budget_s: float) -> list[Row]:
    """Return the rows of all systems, size by size."""
    rows: list[Row] = []
    with Pair() as pair:
        for mib in sizes_mib:
            data = np.random.default_rng(0).random(mib * 2**18, dtype=np.float32)
            copy = np.empty_like(data)

            def memcpy(touch: bool, data: np.ndarray = data, copy: np.ndarray = copy) -> None:
                np.copyto(copy, data)
                if touch:
                    copy.sum()

            systems: dict[str, tuple[str, Callable[[bool], object]]] = {
                "memcpy": ("copy", memcpy),
                "raw_zmq": ("hand over", lambda touch, d=data: pair.by_socket(d, touch=touch)),
                "rpcrl": ("hand over", lambda touch, d=data: pair.by_arena(d, touch=touch)),
            }
            cases = [
                Case(system, case, timed(lambda w=work, t=touch: w(t)), variant, workers=1, mib=float(mib))
                for variant, touch in (("untouched", False), ("touched", True))
                for system, (case, work) in systems.items()
            ]
            rows += measure(cases, rounds=rounds, budget_s=budget_s)
    return rows


def main() -> None:
    chosen = options(__doc__ or "")
    rows = (
        measure_sizes([1], rounds=10, budget_s=5.0)
        if chosen.quick
        else measure_sizes([1, 16, 64], rounds=60, budget_s=15.0)
    )
    report(f"bench_shared_memory: rpcrl {rpcrl.__version__} against one memcpy and raw ZeroMQ", rows, chosen.json)


if __name__ == "__main__":
    if len(sys.argv) == 3 and not sys.argv[1].startswith("-"):
        _receive(*sys.argv[1:])
    else:
        main()
