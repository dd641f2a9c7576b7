"""Worker classes that the cluster and fault tests start for real."""

from __future__ import annotations

import asyncio
import ctypes
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from rpcrl import DataProto, Dispatch, Execute, Worker, mesh, register


class Toy(Worker):
    """Answers, sleeps, raises and dies on request."""

    def __init__(self, base: int = 0, *, label: str = "toy") -> None:
        self.base = base
        self.label = label
        self.count = 0

    @register
    def where(self) -> dict[str, Any]:
        return {
            "rank": self.rank,
            "world_size": self.world_size,
            "local_rank": self.local_rank,
            "local_world_size": self.local_world_size,
            "node_rank": self.node_rank,
            "pid": os.getpid(),
            "parent": os.getppid(),
            "label": self.label,
            "threads": os.environ["OMP_NUM_THREADS"],
            "argv": sys.argv,
            "environment": dict(os.environ),
        }

    @register
    def add(self, x: int, *, y: int = 0) -> int:
        return self.base + x + y

    @register(Dispatch.DP_COMPUTE)
    def one_each(self, x: int) -> tuple[int, int]:
        return self.rank, x

    @register(Dispatch.RANK_ZERO)
    def only_zero(self, x: int) -> tuple[int, int]:
        return self.rank, x

    @register(Dispatch.ALL_TO_ALL, Execute.RANK_ZERO)
    def zero_by_execution(self, x: list[int]) -> tuple[int, list[int]]:
        return self.rank, x

    @register(Dispatch.DP_COMPUTE_PROTO)
    def double(self, batch: DataProto) -> DataProto:
        batch.batch["x"] *= 2  # what arrives is this worker's own
        return batch

    @register(Dispatch.DP_COMPUTE_PROTO, uneven="uneven")
    def sizes(self, batch: DataProto) -> DataProto:
        count = len(batch)
        return DataProto.from_dict(non_tensors={"size": [count] * count, "rank": [self.rank] * count})

    @register(Dispatch.DP_COMPUTE_PROTO)
    def shorten(self, batch: DataProto) -> DataProto:
        return batch[:1]

    @register
    def inc(self) -> int:
        self.count += 1
        return self.count

    @register(blocking=False)
    def slow_inc(self, gate_path: str) -> int:
        self.count += 1
        wait_for(gate_path)
        return self.count

    @register(concurrent=True)
    async def has_heard(self) -> bool:
        """Answer beside whatever runs: every message that was sent before this call has arrived."""
        return True

    @register(timeout_s=0.3)
    def with_deadline(self, gate_path: str) -> str:
        wait_for(gate_path)
        return "late"

    @register
    def boom(self, rank: int, kind: str = "ValueError") -> int:
        if self.rank == rank:
            raise make_error(kind)
        return self.rank

    @register
    def boom_on(self, ranks: list[int], kinds: list[str] | None = None) -> int:
        if self.rank in ranks:
            raise make_error(kinds[self.rank] if kinds else "ValueError")
        return self.rank

    @register
    def die(self, rank: int, how: str, marker: str = "") -> int:
        if self.rank == rank:
            die(how)
        if marker:
            wait_for(marker)
        return self.rank

    @register
    def unencodable(self) -> Any:
        return threading.Lock()

    @register
    def echo(self, x: Any) -> Any:
        return x

    @register
    def spawn_child(self) -> int:
        child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
        return child.pid

    @register
    def all_reduce(self) -> float:
        import torch
        import torch.distributed as dist

        self.init_process_group()
        value = torch.ones(1) * (self.rank + 1)
        dist.all_reduce(value)
        return float(value)

    @register
    def flood(self, num_bytes: int) -> int:
        chunk = "x" * 65_536
        for _ in range(num_bytes // len(chunk)):
            sys.stdout.write(chunk)
        sys.stdout.write("\n")
        sys.stdout.flush()
        return num_bytes

    @register
    def say(self, line: str) -> None:
        print(line, flush=True)

    @register
    def complain(self, line: str) -> None:
        print(f"WARNING {line}", file=sys.stderr, flush=True)


class OpenToy(Worker):
    """Lets every public method be called by its name."""

    allow_unregistered = True
    attribute = 7

    def plain(self, x: int) -> int:
        return self.rank + x

    def _hidden(self) -> None: ...


class Meshed(Worker):
    """Two tensor parallel ranks for each dp rank (``tp``), and two stages of two by two (``pp``); 8 ranks."""

    def __init__(self) -> None:
        tp_rank, dp_rank, stage = self.rank % 2, self.rank // 2 % 2, self.rank // 4
        self.register_mesh("tp", self.rank // 2, is_collect=tp_rank == 0)
        self.register_mesh("pp", dp_rank, is_collect=stage == 1 and tp_rank == 0)
        if self.rank != 3:
            self.register_mesh("lame", 0, is_collect=self.rank == 0)
        self.saw: list[int] = []

    @register(mesh("tp"))
    def over_tp(self, batch: DataProto) -> DataProto:
        return DataProto.from_dict(non_tensors={"x": batch.non_tensor_batch["x"], "rank": [self.rank] * len(batch)})

    @register(mesh("pp"))
    def over_pp(self, *, batch: DataProto) -> DataProto:
        return DataProto.from_dict(non_tensors={"x": batch.non_tensor_batch["x"], "rank": [self.rank] * len(batch)})

    @register(mesh("lame"))
    def over_lame(self, batch: DataProto) -> DataProto:
        return batch

    @register(mesh("nowhere"))
    def over_nothing(self, batch: DataProto) -> DataProto:
        return batch

    @register(Dispatch.DP_COMPUTE_PROTO_WITH_FUNC)
    def apply(self, function: Callable[[DataProto], DataProto], batch: DataProto) -> DataProto:
        return function(batch)


def keep(batch: DataProto) -> DataProto:
    """A function that travels by its import path."""
    return batch


class Concurrent(Worker):
    """Async methods run side by side; an update waits for them."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.arrived = asyncio.Event()

    @register
    async def meet(self, name: str) -> str:
        """Return only when a second call of this method is inside too."""
        self.events.append(f"enter {name}")
        if name == "second":
            self.arrived.set()
        await asyncio.wait_for(self.arrived.wait(), 20)
        self.events.append(f"leave {name}")
        return name

    @register(concurrent=True)
    async def seen(self) -> list[str]:
        return list(self.events)

    @register
    def update(self) -> list[str]:
        self.events.append("update")
        return list(self.events)


class Child(Worker):
    """A role that looks at its neighbour in the same process."""

    def __init__(self, value: int) -> None:
        self.value = value

    @register
    def pid(self) -> int:
        return os.getpid()

    @register
    def neighbour(self, role: str) -> int:
        return int(self.colocated(role).value)


class FailsToBuild(Worker):
    def __init__(self, ranks: list[int]) -> None:
        if self.rank in ranks:
            raise RuntimeError("no such weights: /nowhere")


class HangsInBuild(Worker):
    def __init__(self, rank: int) -> None:
        if self.rank == rank:
            threading.Event().wait(60)


class StopsInBuild(Worker):
    def __init__(self, rank: int) -> None:
        if self.rank == rank:
            die("SIGSTOP")


class DiesInBuild(Worker):
    def __init__(self) -> None:
        os._exit(17)


class IgnoresSigterm(Worker):
    def __init__(self) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)

    @register
    def pid(self) -> int:
        return os.getpid()


class KeywordOnlyError(Exception):
    def __init__(self, *, code: int) -> None:
        super().__init__(f"code {code}")
        self.code = code


class LambdaError(Exception):
    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.hook = lambda: None


def make_error(kind: str) -> BaseException:
    if kind == "keyword_only":
        return KeywordOnlyError(code=7)
    if kind == "lambda":
        return LambdaError("holds a lambda")
    if kind == "huge":
        return RuntimeError("x" * 10_000_000)
    if kind == "nested":
        try:
            raise KeyError("the inner one")
        except KeyError as inner:
            error = RuntimeError("the outer one")
            error.__cause__ = inner
            return error
    if kind in ("SystemExit", "KeyboardInterrupt"):
        return SystemExit(3) if kind == "SystemExit" else KeyboardInterrupt("of the method's own")
    if kind == "AttributeError":
        return AttributeError("'NoneType' object has no attribute 'shape'")
    return ValueError("bad value on purpose")


def die(how: str) -> None:
    if how == "exit":
        os._exit(17)
    os.kill(os.getpid(), getattr(signal, how))
    threading.Event().wait(60)


def wait_for(path: str, within_s: float = 60.0) -> None:
    deadline = time.monotonic() + within_s
    while not os.path.exists(path):
        if time.monotonic() > deadline:
            raise TimeoutError(path)
        threading.Event().wait(0.005)


class Slow(Worker):
    """Takes its time, in ways that look like a death to a careless watcher."""

    @register
    def hold_the_lock(self, seconds: float) -> int:
        ctypes.PyDLL(None).usleep(int(seconds * 1e6))  # PyDLL keeps the interpreter lock
        return self.rank

    @register
    def rest(self, seconds: float) -> int:
        threading.Event().wait(seconds)
        return self.rank

    @register
    def size(self, data: bytes) -> int:
        return len(data)


class Meeting(Worker):
    """All ranks but the absent one wait in a gloo collective for it."""

    @register
    def join(self) -> int:
        """Make the process group, and all its connections."""
        import torch
        import torch.distributed as dist

        self.init_process_group()
        dist.all_reduce(torch.ones(1))
        return os.getpid()

    @register
    def reduce(self, folder: str, absent: int, how: str = "") -> float:
        """Reduce; the absent rank waits until the others are about to, then ends as ``how`` says, or never comes."""
        import torch
        import torch.distributed as dist

        if self.rank == absent:
            for rank in set(range(self.world_size)) - {absent}:
                wait_for(f"{folder}/{rank}")
            if how == "raise":
                raise ValueError("the reason why nobody else gets on")
            if how == "leave":
                dist.destroy_process_group()
                wait_for(f"{folder}/go")
                die("exit")
            if how == "ignore":
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                open(f"{folder}/{absent}", "w").close()
                wait_for(f"{folder}/never")
            die(how)
        with open(f"{folder}/{self.rank}", "w"):
            pass
        value = torch.ones(1)
        dist.all_reduce(value)
        return float(value)


class Hungry(Worker):
    """Asks for more memory than it may have, or takes it and keeps it."""

    held = b""

    @register
    def hold(self, rank: int, num_bytes: int) -> tuple[int, int]:
        if self.rank == rank:
            self.held = b"x" * num_bytes
        return os.getpid(), len(self.held)

    @register
    def die(self, rank: int) -> None:
        if self.rank == rank:
            die("SIGKILL")

    @register
    def eat(self, rank: int, num_bytes: int) -> int:
        if self.rank != rank:
            return 0
        limits = resource.getrlimit(resource.RLIMIT_AS)
        with open("/proc/self/statm") as statm:
            used_bytes = int(statm.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used_bytes + num_bytes // 2, limits[1]))
        try:
            return len(bytes(num_bytes))
        finally:
            resource.setrlimit(resource.RLIMIT_AS, limits)


class Stubborn(Worker):
    """Notes that it is there, and that it has been told to end, and does not end."""

    def __init__(self, folder: str, *, hang: bool) -> None:
        self.folder = folder
        signal.signal(signal.SIGTERM, lambda *_: open(f"{folder}/told", "w").close())
        if hang:
            self.wait()

    @register
    def wait(self) -> None:
        open(f"{self.folder}/there", "w").close()
        wait_for(f"{self.folder}/never")
