"""Is there room for one more group on these devices? Each worker takes ``1 / max_colocate_count`` of its device.

A CPU pool counts virtual devices: they are its own, and another pool has others. Slots of CUDA pools are the node's
real devices: whoever names the same slot shares it, whatever the pool is called.
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Hashable
from dataclasses import dataclass
from fractions import Fraction

from rpcrl.errors import DispatchError
from rpcrl.topology import ResourcePool

__all__ = ["Admissions", "Bookings"]


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


class Admissions:
    """Gives each group a name and a place on its devices, and waits for groups that are about to free theirs.

    Thread-safe; ``ends`` takes no lock, because finalizers call it.
    """

    def __init__(self, *, patience_s: float) -> None:
        self._patience_s = patience_s
        self._bookings = Bookings()
        self._names: set[str] = set()
        """Of all groups so far: a name is never given twice, so each has logs of its own."""
        self._ending: set[str] = set()
        self._changed = threading.Condition()

    def admit(self, pool: ResourcePool, name: str) -> str:
        """Book a group on its pool and return its unique name. Raises DispatchError when there is no room for it."""
        deadline = time.monotonic() + self._patience_s
        collected = False
        with self._changed:
            while True:
                unique = self._unique(name)
                try:
                    self._bookings.admit(pool, unique)
                except DispatchError:
                    if not collected:
                        collected = True
                        gc.collect()  # a group that nobody holds, but that something in a circle refers to
                    elif not self._ending or time.monotonic() > deadline:
                        raise
                    else:
                        self._changed.wait(0.1)
                    continue
                self._names.add(unique)
                return unique

    def ends(self, name: str) -> None:
        """Take note that a group's end was asked for."""
        self._ending.add(name)

    def release(self, name: str) -> None:
        """Give a group's shares back: its processes are gone."""
        with self._changed:
            self._bookings.release(name)
            self._ending.discard(name)
            self._changed.notify_all()

    def _unique(self, name: str) -> str:
        unique, number = name, 1
        while unique in self._names:
            number += 1
            unique = f"{name}-{number}"
        return unique


def _devices(pool: ResourcePool) -> frozenset[Hashable]:
    if pool.device is None:
        return frozenset()
    owner: Hashable = "cuda" if pool.device == "cuda" else id(pool.whole)
    return frozenset((owner, seat.node, seat.device_slot) for seat in pool.placements())
