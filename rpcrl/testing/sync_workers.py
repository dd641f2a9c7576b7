"""Which workers does the kit of weight syncs run? A trainer and a rollout without a model; weights made of a seed."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rpcrl.dispatch.register import register
from rpcrl.errors import UsageError
from rpcrl.roles.weight_sync import WeightReceiver, WeightSender

__all__ = ["KitRollout", "KitTrainer", "Watched", "expected_weights"]

LAYER = (256, 1_024)
"""Shape of a further tensor: 1 MiB."""
SHAPES = {"embed": (600, 64), "norm": (64,), "up.weight": (64, 96), "down.weight": (96, 64), "scale": (4,)}


def expected_weights(seed: int, *, layers: int = 0) -> dict[str, Tensor]:
    """Return the whole weights of a seed: a few small tensors, and ``layers`` of 1 MiB."""
    made = torch.Generator().manual_seed(seed)
    shapes = {**SHAPES, **{f"layers.{index}": LAYER for index in range(layers)}}
    whole = {name: torch.randn(shape, generator=made) for name, shape in shapes.items()}
    whole["scale"] = whole["scale"].to(torch.bfloat16)
    return whole


def _resident_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise UsageError(f"/proc/self/status has no {field}")


class Watched:
    """What a process uses, and which backend it would sync by."""

    _before_bytes = 0
    sync_backend: str

    @register
    def use_backend(self, backend: str) -> None:
        """Take part in syncs by this backend only."""
        self.sync_backend = backend

    @register
    def open_handles(self) -> tuple[int, int]:
        """Return the numbers of file descriptors and threads of this process."""
        return len(list(Path("/proc/self/fd").iterdir())), len(list(Path("/proc/self/task").iterdir()))

    @register
    def peak_begin(self) -> None:
        """Begin to watch the process's memory."""
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak is now what is resident
        self._before_bytes = _resident_bytes("VmRSS")

    @register
    def peak_end(self) -> int:
        """Return the bytes above those of ``peak_begin`` at the peak since then."""
        return _resident_bytes("VmHWM") - self._before_bytes


class KitTrainer(Watched, WeightSender):
    """A rank with its rows of every tensor; the whole ones exist for one bucket at a time.

    ``backend`` and ``timeout_s`` are those of the sync. ``swapped`` is a rank that has two tensors in another order.
    """

    def __init__(
        self, backend: str = "broadcast", timeout_s: float = 5.0, *, layers: int = 0, swapped: int | None = None
    ) -> None:
        super().__init__()
        self.sync_backend, self.sync_timeout_s = backend, timeout_s
        self._layers = layers
        self._swapped = swapped == self.rank
        if self.world_size > 1:
            self.init_process_group()
        self.train(0)

    @register
    def train(self, seed: int) -> None:
        """Have the weights of ``seed`` from now on."""
        whole = expected_weights(seed, layers=self._layers)
        names = list(whole)
        if self._swapped:
            names[1], names[2] = names[2], names[1]
        count = self.world_size
        self._rows = {name: whole[name].shape[0] for name in names}
        self._shards = {name: whole[name].chunk(count)[self.rank].clone() for name in names}

    @register
    def train_together(self) -> float:
        """Use the trainer's own process group; returns the sum of 1 over its ranks."""
        one = torch.ones(1)
        if self.world_size > 1:
            torch.distributed.all_reduce(one)
        return float(one)

    def weight_specs(self) -> Sequence[tuple[str, str, Sequence[int]]]:
        """Return name, dtype and whole shape of each tensor."""
        return [
            (name, str(shard.dtype).removeprefix("torch."), [self._rows[name], *shard.shape[1:]])
            for name, shard in self._shards.items()
        ]

    def weight_buckets(self, bucket_bytes: int) -> Iterator[list[tuple[str, Tensor]]]:
        """Yield each whole tensor alone."""
        for name, shard in self._shards.items():
            if self.world_size == 1:
                yield [(name, shard)]
                continue
            parts = [torch.empty_like(shard) for _ in range(self.world_size)]
            torch.distributed.all_gather(parts, shard)
            yield [(name, torch.cat(parts))]


class KitEngine:
    """Takes weights, and can be told to fail at it."""

    def __init__(self, layers: int) -> None:
        self.weights = {name: torch.zeros_like(tensor) for name, tensor in expected_weights(0, layers=layers).items()}
        self.weight_version = 0
        self.awake = frozenset({"weights", "kv_cache"})
        self.fail_after: int | None = None
        self.deadly = False

    def check_weights(self, shapes: Any) -> None:
        """Raise UsageError unless these are the engine's tensors."""
        mine = {name: tuple(tensor.shape) for name, tensor in self.weights.items()}
        if {name: tuple(shape) for name, shape in shapes.items()} != mine:
            raise UsageError(f"these weights do not fit: {dict(shapes)}, the engine has {mine}")

    def update_weights(self, buckets: Iterable[Iterable[tuple[str, Tensor]]], *, version: int) -> None:
        """Copy what comes; raises ValueError after ``fail_after`` buckets, once."""
        for count, bucket in enumerate(buckets):
            if self.fail_after is not None and count >= self.fail_after:
                self.fail_after = None
                if self.deadly:
                    os.kill(os.getpid(), signal.SIGKILL)
                raise ValueError(f"no more after {count} buckets")
            for name, tensor in bucket:
                self.weights[name].copy_(tensor)
        self.weight_version = version


class KitRollout(Watched, WeightReceiver):
    """A rank that takes weights and shows them."""

    sync_source = "trainer"

    def __init__(self, backend: str = "broadcast", timeout_s: float = 5.0, *, layers: int = 0) -> None:
        super().__init__()
        self.sync_backend, self.sync_timeout_s = backend, timeout_s
        self._engine: Any = KitEngine(layers)
        self._free = threading.Event()
        self._calls: list[str] = []

    @register
    def sync_capabilities(self) -> dict[str, str]:
        """Say what this rank would take part with, and note that it was asked."""
        self._calls.append("asked")
        return super().sync_capabilities()

    @register
    def sync_receive(self, name: str, digest: str, number: int, version: int) -> int:
        """Take weights, and note it."""
        self._calls.append("received")
        return super().sync_receive(name, digest, number, version)

    @register
    def calls_of_syncs(self) -> list[str]:
        """Return what was noted since the last time: ``asked`` and ``received``, in their order."""
        calls, self._calls = self._calls, []
        return calls

    @register
    def read(self) -> dict[str, Tensor]:
        """Return copies of the weights that are here."""
        return {name: tensor.clone() for name, tensor in self._engine.weights.items()}

    @register
    def fail_once(self, rank: int, after_buckets: int) -> None:
        """Have the next update of ``rank`` raise ValueError after so many buckets."""
        if rank == self.rank:
            self._engine.fail_after = after_buckets

    @register
    def die_at(self, rank: int, after_buckets: int) -> None:
        """Have the next update of ``rank`` kill its process after so many buckets."""
        if rank == self.rank:
            self._engine.fail_after, self._engine.deadly = after_buckets, True

    @register
    def be_busy(self, rank: int) -> None:
        """Occupy ``rank`` until ``be_free`` is called."""
        if rank == self.rank and not self._free.wait(120):
            raise UsageError("nobody called be_free")
        self._free.clear()

    @register(concurrent=True)
    async def be_free(self, rank: int) -> None:
        """End what ``be_busy`` does there."""
        if rank == self.rank:
            self._free.set()

    @register
    def has_default_group(self) -> bool:
        """Tell whether the process has a default process group."""
        return torch.distributed.is_initialized()
