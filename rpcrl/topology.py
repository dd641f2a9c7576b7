"""Who sits where? Ranks, nodes, slots and shares: arithmetic only, no process and no clock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction

from rpcrl.errors import DispatchError, UsageError

__all__ = [
    "DEVICES",
    "Placement",
    "ResourcePool",
    "ResourcePoolManager",
    "parse_visible_devices",
    "pick_device",
]

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
    node: int = 0
    """Index of the node among all nodes of the pool that this one is a window of; ``node_rank`` counts the group's."""


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
    _node_of: Sequence[int] = field(default=(), repr=False)
    _whole: ResourcePool | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if isinstance(self.process_on_nodes, int):
            raise UsageError(
                f"ResourcePool({self.process_on_nodes}) needs the processes on each node as a list, e.g. "
                f"ResourcePool([{self.process_on_nodes}]) for one node"
            )
        nodes = tuple(self.process_on_nodes)
        object.__setattr__(self, "process_on_nodes", nodes)
        object.__setattr__(self, "_slot_offset", tuple(self._slot_offset) or (0,) * len(nodes))
        object.__setattr__(self, "_node_of", tuple(self._node_of) or tuple(range(len(nodes))))
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
                node = self._node_of[node_rank]
                seats.append(Placement(len(seats), self.world_size, node_rank, local_rank, count, slot, node))
        return seats

    @property
    def whole(self) -> ResourcePool:
        """The pool that this one is a window of; itself if it is none."""
        return self._whole or self

    def split(self, sizes: int | Sequence[int]) -> list[ResourcePool]:
        """Cut the pool into windows of consecutive slots: equal ones of ``sizes`` slots, or one for each size.

        A window may reach over nodes; windows share devices with the pool they are cut from. Raises UsageError when
        the sizes do not add up to the pool.
        """
        parts = [sizes] * (self.world_size // max(sizes, 1)) if isinstance(sizes, int) else list(sizes)
        if not parts or min(parts) < 1 or sum(parts) != self.world_size:
            raise UsageError(
                f"pool {self.name!r} has {self.world_size} slots; they cannot be split into {sizes!r}: the windows "
                f"have {sum(parts)} slots together"
            )
        slots = [(entry, slot) for entry, count in enumerate(self.process_on_nodes) for slot in range(count)]
        starts = [sum(parts[:index]) for index in range(len(parts))]
        return [
            self._window(slots[start : start + size], f"{self.name}[{start}:{start + size}]")
            for start, size in zip(starts, parts, strict=True)
        ]

    def _window(self, slots: Sequence[tuple[int, int]], name: str) -> ResourcePool:
        entries = sorted({entry for entry, _ in slots})
        first_slot = {entry: min(slot for owner, slot in slots if owner == entry) for entry in entries}
        return replace(
            self,
            process_on_nodes=[sum(owner == entry for owner, _ in slots) for entry in entries],
            name=name,
            _slot_offset=[self._slot_offset[entry] + first_slot[entry] for entry in entries],
            _node_of=[self._node_of[entry] for entry in entries],
            _whole=self.whole,
        )

    def merge(self, other: ResourcePool) -> ResourcePool:
        """Return one pool over the slots of both, this one's ranks first.

        Windows of one pool are put together over its nodes; two pools become pools side by side, the other's nodes
        after this one's. Raises UsageError when devices or shares differ.
        """
        mine, others = (self.device, self.max_colocate_count), (other.device, other.max_colocate_count)
        if mine != others:
            raise UsageError(
                f"pools {self.name!r} and {other.name!r} cannot be merged: (device, max_colocate_count) is {mine} and "
                f"{others}"
            )
        one_whole = self.whole is other.whole
        shift = 0 if one_whole else max(self._node_of) + 1
        return replace(
            self,
            process_on_nodes=[*self.process_on_nodes, *other.process_on_nodes],
            name=f"{self.name}+{other.name}",
            _slot_offset=[*self._slot_offset, *other._slot_offset],
            _node_of=[*self._node_of, *(node + shift for node in other._node_of)],
            _whole=self.whole if one_whole else None,
        )


@dataclass(frozen=True)
class ResourcePoolManager:
    """Named pools, and which role runs on which.

    ``resource_pool_spec``: pool → processes on each node, e.g. ``{"global_pool": [8], "rollout_pool": [4]}``;
    ``mapping``: role → pool. ``devices_on_nodes``, if given, are the devices that each node has, and every gap is
    reported at once. Pools of real devices take a node's slots one after the other.

    Raises UsageError for roles without a pool and for pools that the nodes have no room for.
    """

    resource_pool_spec: Mapping[str, Sequence[int]]
    mapping: Mapping[str, str]
    max_colocate_count: int = 3
    device: str | None = "cpu"
    devices_on_nodes: Sequence[int] | None = None
    pools: Mapping[str, ResourcePool] = field(init=False)

    def __post_init__(self) -> None:
        used: dict[int, int] = {}
        pools: dict[str, ResourcePool] = {}
        for name, counts in self.resource_pool_spec.items():
            offsets = [used.get(node, 0) for node in range(len(counts))]
            pools[name] = ResourcePool(counts, self.max_colocate_count, self.device, name, offsets)
            used |= {node: offset + count for node, (offset, count) in enumerate(zip(offsets, counts, strict=True))}
        problems = [
            f"role {role!r} is mapped to pool {pool!r}, which is not among {', '.join(map(repr, pools)) or 'no pools'}"
            for role, pool in self.mapping.items()
            if pool not in pools
        ]
        there = dict(enumerate(self.devices_on_nodes)) if self.devices_on_nodes is not None else used
        problems += [
            f"node {node} has {there.get(node, 0)} devices, but the pools ask for {count} there: "
            + ", ".join(
                f"{name} {counts[node]}" for name, counts in self.resource_pool_spec.items() if node < len(counts)
            )
            for node, count in used.items()
            if count > there.get(node, 0)
        ]
        if problems:
            raise UsageError("the pools do not fit:\n  " + "\n  ".join(problems))
        object.__setattr__(self, "pools", pools)

    def get_resource_pool(self, role: str) -> ResourcePool:
        """Return the pool of a role. Raises UsageError if the role is mapped to none."""
        if role not in self.mapping:
            raise UsageError(f"role {role!r} is mapped to no pool; mapped are: {', '.join(self.mapping) or 'none'}")
        return self.pools[self.mapping[role]]


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
