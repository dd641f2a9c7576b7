"""What does the same cost with torch.distributed.rpc over TensorPipe? Worker processes, and `rpc_async` to each."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from typing import Any

import torch
from torch.distributed import rpc

from rpcrl.bench.driver import Action, Setup, Task, Unsupported, serve, shape_of

CALLS_IN_FLIGHT = 1_000
TIMEOUT_S = 120.0

Columns = dict[str, torch.Tensor]


def ping() -> None:
    return None


def echo(columns: Columns) -> Columns:
    return columns


def touch(columns: Columns) -> Columns:
    read(columns)
    return {name: column + 1 for name, column in columns.items()}


def hold(columns: Columns) -> int:
    return len(columns)


def read(columns: Columns) -> float:
    return float(sum(float(column.sum()) for column in columns.values()))


def join(rank: int, world_size: int, store: str) -> None:
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{store}", rpc_timeout=TIMEOUT_S)
    rpc.init_rpc(f"w{rank}", rank=rank, world_size=world_size, rpc_backend_options=options)


class TorchRpc:
    """The driver: rank 0 of a world of the workers and itself."""

    def __init__(self, setup: Setup) -> None:
        self.about = f"torch {torch.__version__}"
        self._folder = tempfile.TemporaryDirectory(prefix="trpc-")
        store, world = os.path.join(self._folder.name, "store"), setup.workers + 1
        # The workers find the functions under the name that they have here.
        code = "import sys, torch_rpc; torch_rpc.work(*sys.argv[1:])"
        self._processes = [
            subprocess.Popen([sys.executable, "-c", code, str(rank), str(world), store], stdout=2)
            for rank in range(1, world)
        ]
        join(0, world, store)
        self._names = [f"w{rank}" for rank in range(1, world)]

    def close(self) -> None:
        rpc.shutdown()
        for process in self._processes:
            process.wait(timeout=20)
        self._folder.cleanup()

    def prepare(self, task: Task) -> Action:
        if task.case == "ping":
            return lambda: self._all(ping, [() for _ in self._names])
        if task.case == "in_flight":
            return self._in_flight
        if task.case not in ("scatter_gather", "broadcast"):
            raise Unsupported("one world a process, and no results that stay" if task.case != "copy" else "not a call")
        rows, ids, probs = shape_of(task.mib)
        columns = {"ids": torch.randint(0, 50_000, (rows, ids)), "probs": torch.rand(rows, probs)}
        touched = task.variant == "touched"
        if task.case == "broadcast":
            return lambda: self._all(read if touched else hold, [(columns,) for _ in self._names])

        def scatter_gather() -> None:
            split = {name: column.tensor_split(len(self._names)) for name, column in columns.items()}
            parts = [({name: pieces[rank] for name, pieces in split.items()},) for rank in range(len(self._names))]
            replies = self._collect(touch if touched else echo, parts)
            whole = {name: torch.cat([reply[name] for reply in replies]) for name in columns}
            if touched:
                read(whole)

        return scatter_gather

    def _collect(self, function: Any, arguments: list[Any]) -> list[Any]:
        futures = [rpc.rpc_async(name, function, given) for name, given in zip(self._names, arguments, strict=True)]
        return [future.wait() for future in futures]

    def _all(self, function: Any, arguments: list[Any]) -> None:
        self._collect(function, arguments)

    def _in_flight(self) -> None:
        names = self._names
        for future in [rpc.rpc_async(names[number % len(names)], ping) for number in range(CALLS_IN_FLIGHT)]:
            future.wait()


def work(rank: str, world_size: str, store: str) -> None:
    join(int(rank), int(world_size), store)
    rpc.shutdown()


if __name__ == "__main__":
    from torch_rpc import TorchRpc as Named  # its functions have the module's name, as in the workers

    serve(Named)
