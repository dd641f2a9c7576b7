"""Over what do weights get from one rank to many? A channel of its own, apart from every other process group.

Rank 0 of a channel sends, all others receive the same bytes in the same order. ``TorchChannel`` is a torch.distributed
process group (gloo, or nccl on GPUs) over a store of its own: it touches no default group, so trainer and rollout keep
theirs, or none. A user's own channel is a class at an import path; ``rpcrl.testing.sync_kit`` checks it.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor

from rpcrl.config.functions import load_function
from rpcrl.errors import UsageError, WeightSyncError

__all__ = ["TorchChannel", "WeightChannel", "new_channel"]


class WeightChannel(Protocol):
    """One rank's end; used by one thread at a time. Constructed with ``device`` (cpu or cuda) and ``timeout_s``."""

    transport: str
    """What the bytes go over, e.g. ``gloo``; both sides must say the same."""
    buffer_device: str
    """Where buffers must lie."""

    def listen(self, host: str) -> Mapping[str, Any]:
        """Open the channel, on rank 0 alone; returns where it is, in plain values that the other ranks are told."""
        ...

    def join(self, name: str, address: Mapping[str, Any], rank: int, world_size: int) -> None:
        """Meet the other ranks (collective), within the timeout; raises WeightSyncError naming who is missing."""
        ...

    def broadcast(self, buffer: Tensor) -> None:
        """Fill ``buffer`` (uint8) with rank 0's and return when that is done (collective), within the timeout."""
        ...

    def close(self) -> None:
        """Let go of everything; ranks that wait for this one fail. Closing twice does nothing."""
        ...


class TorchChannel:
    """A channel over a process group of torch.distributed that nobody else knows of."""

    def __init__(self, *, device: str, timeout_s: float, transport: str = "") -> None:
        self.transport = transport or ("nccl" if device == "cuda" else "gloo")
        if self.transport == "nccl" and device != "cuda":
            raise UsageError(
                f"weights cannot go over nccl between ranks with device={device!r}; take backend=broadcast"
            )
        self.buffer_device = "cuda" if self.transport == "nccl" else "cpu"
        self._timeout = timedelta(seconds=timeout_s)
        self._store: Any = None
        self._group: Any = None

    def listen(self, host: str) -> Mapping[str, Any]:
        """Open a store on a free port of ``host``; returns ``host`` and ``port``."""
        with socket.create_server((host, 0), backlog=4_096) as held:
            port = held.getsockname()[1]
            # The store takes the listening socket over: nobody else can have been given the port in between.
            self._store = dist.TCPStore(  # type: ignore[attr-defined]  # torch exports it on some platforms only
                host, port, None, True, timeout=self._timeout, wait_for_workers=False, master_listen_fd=held.detach()
            )
        return {"host": host, "port": port}

    def join(self, name: str, address: Mapping[str, Any], rank: int, world_size: int) -> None:
        """Meet the others at the store, then make the process group."""
        try:
            if self._store is None:
                self._store = dist.TCPStore(  # type: ignore[attr-defined]
                    str(address["host"]), int(address["port"]), None, False, timeout=self._timeout,
                    wait_for_workers=False,
                )  # fmt: skip
            store = dist.PrefixStore(name, self._store)  # type: ignore[attr-defined]
            store.set(f"joined/{rank}", "here")
            self._wait_for_all(store, name, world_size)
            self._group = self._new_group(store, rank, world_size)
        except (RuntimeError, ValueError) as error:  # torch's own are RuntimeErrors
            self.close()
            raise WeightSyncError(f"sync group {name}: rank {rank} of {world_size} did not get in: {error}") from error

    def _wait_for_all(self, store: Any, name: str, world_size: int) -> None:
        keys = [f"joined/{rank}" for rank in range(world_size)]
        try:
            store.wait(keys, self._timeout)
        except RuntimeError as error:
            missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
            raise WeightSyncError(
                f"sync group {name}: ranks {missing} of {world_size} (0 sends, the others are the rollout's) did not "
                f"come within {self._timeout.total_seconds():g} s"
            ) from error

    def _new_group(self, store: Any, rank: int, world_size: int) -> Any:
        if self.transport == "nccl":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = self._timeout
            return dist.ProcessGroupNCCL(store, rank, world_size, options)
        return dist.ProcessGroupGloo(store, rank, world_size, self._timeout)

    def broadcast(self, buffer: Tensor) -> None:
        """Fill ``buffer`` with rank 0's."""
        if self._group is None:
            raise WeightSyncError("the sync group is closed")
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        try:
            # With a timeout the wait is one for the bytes, with nccl too.
            self._group.broadcast([buffer], options).wait(self._timeout)
        except RuntimeError as error:
            raise WeightSyncError(f"a broadcast failed: {error}") from error

    def close(self) -> None:
        """Leave the process group and the store."""
        group, self._group, self._store = self._group, None, None
        if group is not None and self.transport == "nccl":
            group.abort()


_TRANSPORTS = {"broadcast": "", "nccl": "nccl"}


def new_channel(backend: str, *, device: str, timeout_s: float) -> WeightChannel:
    """Return a channel of a backend: ``broadcast``, ``nccl``, or a class at ``module:Class`` or ``file.py:Class``.

    Raises UsageError for a backend that is none of these, ConfigError for a path that leads nowhere.
    """
    if ":" in backend:
        kind: Any = load_function(backend, key="actor_rollout_ref.rollout.checkpoint_engine.backend")
        channel: WeightChannel = kind(device=device, timeout_s=timeout_s)
        return channel
    if backend not in _TRANSPORTS:
        known = ", ".join(_TRANSPORTS)
        raise UsageError(f"weights cannot go over {backend!r} from one pool to another; known: {known}, module:Class")
    return TorchChannel(device=device, timeout_s=timeout_s, transport=_TRANSPORTS[backend])
