"""The ranks of a weight sync, which can also broadcast plain bytes over a torch.distributed group of their own."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch

from rpcrl import env
from rpcrl.dispatch.register import register
from rpcrl.engines.weight_channel import TorchChannel
from rpcrl.roles.actor import ActorWorker
from rpcrl.roles.rollout import RolloutWorker
from rpcrl.testing.sync_workers import Watched

TIMEOUT_S = 120.0


class _Raw(Watched):
    """A place in a group that nothing else goes over."""

    _raw: TorchChannel

    @register
    def raw_listen(self) -> dict[str, Any]:
        """Open the group's store; returns its address."""
        self._raw = TorchChannel(device="cpu", timeout_s=TIMEOUT_S)
        return dict(self._raw.listen(env.get("MASTER_ADDR") or "127.0.0.1"))

    @register
    def raw_join(self, address: Mapping[str, Any], rank: int, world_size: int, buffer_bytes: int) -> None:
        """Join the group as ``rank`` (the first of these workers), with a buffer whose pages are there."""
        if rank:
            self._raw = TorchChannel(device="cpu", timeout_s=TIMEOUT_S)
        self._raw.join("raw", address, rank + self.rank, world_size)  # type: ignore[attr-defined]
        self._buffer = torch.ones(buffer_bytes, dtype=torch.uint8)

    @register
    def raw_broadcast(self, num_bytes: int) -> float:
        """Broadcast so many bytes, as many at a time as the buffer has; returns the seconds."""
        began_s = time.perf_counter()
        for start in range(0, num_bytes, self._buffer.numel()):
            self._raw.broadcast(self._buffer[: num_bytes - start])
        return time.perf_counter() - began_s


class RawActor(_Raw, ActorWorker):
    """A trainer rank."""


class RawRollout(_Raw, RolloutWorker):
    """A rollout rank."""
