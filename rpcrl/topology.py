"""Who sits where? Ranks, nodes, slots and shares: arithmetic only, no process and no clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction

from rpcrl.errors import DispatchError, UsageError

__all__ = ["DEVICES", "Placement", "ResourcePool", "parse_visible_devices", "pick_device"]

DEVICES = ("cpu", "cuda")


@dataclass(frozen=True)
class Placement:
    """The seat of one worker: its rank in the group and its slot on a node."""

    rank: int
    world_size: int
    node_rank: int
    local_rank: int
    local_world_size: int
    device_slot: int | None
    """Index into the node's device list; None for a worker without a device."""


@dataclass(frozen=True)
class ResourcePool:
    """Slots for worker processes, node by node, that groups are started on.

    ``ResourcePool([2, 2])`` names two nodes of two slots each; both may be virtual nodes of one host.
    A slot is one device. Up to ``max_colocate_count`` groups may share it, and a worker accounts for
    ``1 / max_colocate_count`` of it. ``device=None`` makes a pool of plain CPU processes without a device.

    Raises UsageError for an empty pool, a slot count below 1 or an unknown device.
    """

    process_on_nodes: Sequence[int] = (1,)
    max_colocate_count: int = 3
    device: str | None = "cpu"
    name: str = "global_pool"
    _slot_offset: Sequence[int] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        nodes = tuple(self.process_on_nodes)
        object.__setattr__(self, "process_on_nodes", nodes)
        object.__setattr__(self, "_slot_offset", tuple(self._slot_offset) or (0,) * len(nodes))
        if not nodes or any(isinstance(count, bool) or not isinstance(count, int) or count < 1 for count in nodes):
            raise UsageError(
                f"ResourcePool(process_on_nodes={list(nodes)!r}) needs at least one node and at least one "
                "process on each, e.g. ResourcePool([4]) or ResourcePool([8, 8])"
            )
        if self.max_colocate_count < 1:
            raise UsageError(f"ResourcePool(max_colocate_count={self.max_colocate_count}) must be 1 or more")
        if self.device is not None and self.device not in DEVICES:
            raise UsageError(f"ResourcePool(device={self.device!r}) must be one of {', '.join(DEVICES)} or None")

    @property
    def world_size(self) -> int:
        """Number of slots over all nodes."""
        return sum(self.process_on_nodes)

    @property
    def worker_share(self) -> Fraction:
        """Part of a device that one worker accounts for."""
        return Fraction(1, self.max_colocate_count)

    def placements(self) -> list[Placement]:
        """Return the seats of a group on this pool, in rank order: node by node, then slot by slot."""
        seats: list[Placement] = []
        for node_rank, count in enumerate(self.process_on_nodes):
            for local_rank in range(count):
                slot = None if self.device is None else self._slot_offset[node_rank] + local_rank
                seats.append(Placement(len(seats), self.world_size, node_rank, local_rank, count, slot))
        return seats


def parse_visible_devices(value: str) -> list[str]:
    """Return the device ids that a visible-devices variable names: indices, UUIDs or MIG ids.

    As in CUDA, an empty value means no device, and the list ends before the first ``-1``.
    """
    devices: list[str] = []
    for part in value.split(","):
        device = part.strip()
        if not device or device.startswith("-"):
            break
        devices.append(device)
    return devices


def pick_device(devices: Sequence[str], slot: int, *, source: str) -> str:
    """Return the id of the device in ``slot`` of a node's list.

    ``source`` says where the list comes from. Raises DispatchError naming the list, the slot and what to do.
    """
    if 0 <= slot < len(devices):
        return devices[slot]
    listed = ", ".join(devices) if devices else "none"
    raise DispatchError(
        f"local rank {slot} needs device number {slot + 1}, but this node has {len(devices)} "
        f"({listed}; from {source}). Use a pool of at most {len(devices)} slots on this node, make more "
        "devices visible, or set device=cpu"
    )
