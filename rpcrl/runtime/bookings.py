"""Is there room for one more group on these devices? Each worker takes ``1 / max_colocate_count`` of its device.

A CPU pool counts virtual devices: they are its own, and another pool has others. Slots of CUDA pools are the node's
real devices: whoever names the same slot shares it, whatever the pool is called.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from fractions import Fraction

from rpcrl.errors import DispatchError
from rpcrl.topology import ResourcePool

__all__ = ["Bookings"]


@dataclass(frozen=True)
class _Booking:
    pool: ResourcePool
    """Kept, so that its identity stays its own."""
    devices: frozenset[Hashable]


class Bookings:
    """Which groups sit on which devices. Not thread-safe."""

    def __init__(self) -> None:
        self._by_group: dict[str, _Booking] = {}

    def admit(self, pool: ResourcePool, group: str) -> None:
        """Book a group on its pool. Raises DispatchError, with nothing booked, when a device has no share left."""
        devices = _devices(pool)
        for device in devices:
            sharing = [name for name, booking in self._by_group.items() if device in booking.devices]
            taken = sum((self._by_group[name].pool.worker_share for name in sharing), Fraction(0))
            if taken + pool.worker_share > 1:
                raise DispatchError(
                    f"pool {pool.name!r} has no room for group {group!r}: {len(sharing)} groups share its devices "
                    f"already ({', '.join(sharing)}) and hold {taken} of each; each worker of this pool takes "
                    f"{pool.worker_share} (max_colocate_count={pool.max_colocate_count}). Close a group, raise "
                    "max_colocate_count, use another pool, or put several roles into one group by a dict of roles"
                )
        self._by_group[group] = _Booking(pool, devices)

    def release(self, group: str) -> None:
        """Give a group's shares back."""
        self._by_group.pop(group, None)


def _devices(pool: ResourcePool) -> frozenset[Hashable]:
    if pool.device is None:
        return frozenset()
    owner: Hashable = "cuda" if pool.device == "cuda" else id(pool.whole)
    return frozenset((owner, seat.node, seat.device_slot) for seat in pool.placements())
