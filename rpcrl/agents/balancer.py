"""Which replica takes the next request? Arithmetic only: no clock, no thread, no socket.

A replica is known by a name and, each time it is added, gets a registration of its own. Whoever holds a request holds
that registration: when the replica has gone and come back meanwhile, the release of the old one changes nothing of the
new one. Counts are therefore those of requests that are open, whatever has happened between.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from rpcrl.errors import UsageError

__all__ = ["Balancer", "Placement", "Policy"]

Policy = Literal["least_in_flight", "deterministic"]

CONVERSATIONS = 10_000
"""Conversations whose replica is remembered; the one that was silent for longest is forgotten first."""


@dataclass(frozen=True)
class Placement:
    """One request on one registration of a replica; give it back with ``release``."""

    replica: str
    registration: int
    """Unique among all registrations of a balancer."""


@dataclass
class _Replica:
    registration: int
    order: int
    """Place among equals: that of the name's first registration."""
    in_flight: int = 0
    draining: bool = False


class Balancer:
    """Places requests on replicas and counts those that are open.

    ``least_in_flight``: a conversation stays where it was (its cache is there); others go to the replica with the
    fewest open requests, the one added first among equals. ``deterministic``: the replica is a function of the
    conversation and of the names that are there, whatever else runs; a request without one is refused.
    ``first`` turns the order among equals, so that several balancers over the same replicas do not all begin with the
    same one. Not thread-safe: it belongs to one event loop.
    """

    def __init__(
        self,
        replicas: Iterable[str] = (),
        *,
        policy: Policy = "least_in_flight",
        conversations: int = CONVERSATIONS,
        first: int = 0,
    ) -> None:
        if conversations < 1:
            raise UsageError(f"Balancer(conversations={conversations}) must be 1 or more")
        self._policy = policy
        self._limit = conversations
        self._first = first
        self._replicas: dict[str, _Replica] = {}
        self._order: dict[str, int] = {}
        self._sticky: OrderedDict[str, Placement] = OrderedDict()
        self._registrations = 0
        self._leaving: dict[int, int] = {}
        """Registrations that have been removed with requests open → how many."""
        for name in replicas:
            self.add(name)

    # -- replicas ------------------------------------------------------------------------------------------------------

    @property
    def replicas(self) -> tuple[str, ...]:
        """Names of the replicas that take requests, in the order in which they were first added."""
        taking = [name for name, replica in self._replicas.items() if not replica.draining]
        return tuple(sorted(taking, key=lambda name: self._order[name]))

    def add(self, name: str) -> int:
        """Take a replica in, with no request open; returns its registration.

        Raises UsageError for a name that is there: remove the old one first, then its releases go to the old one.
        """
        if name in self._replicas:
            raise UsageError(f"replica {name!r} is there already (registration {self._replicas[name].registration})")
        self._registrations += 1
        order = self._order.setdefault(name, len(self._order))
        self._replicas[name] = _Replica(self._registrations, order)
        return self._registrations

    def remove(self, name: str, registration: int | None = None) -> bool:
        """Forget a replica and who talks to it; its open requests are released as before, and count for nobody else.

        With ``registration`` only that one is removed: who reports a loss late does not remove what came after it.
        Returns whether something was removed.
        """
        replica = self._replicas.get(name)
        if replica is None or registration not in (None, replica.registration):
            return False
        del self._replicas[name]
        if replica.in_flight:
            self._leaving[replica.registration] = replica.in_flight
        self._forget_conversations(replica.registration)
        return True

    def drain(self, name: str) -> None:
        """Give a replica no new request; those that are open go on. Raises UsageError for an unknown name."""
        self._known(name).draining = True
        self._forget_conversations(self._replicas[name].registration)

    def undrain(self, name: str) -> None:
        """Give a replica requests again. Raises UsageError for an unknown name."""
        self._known(name).draining = False

    def in_flight(self, name: str) -> int:
        """Return the open requests of a replica's present registration; 0 for one that is not there."""
        return self._replicas[name].in_flight if name in self._replicas else 0

    @property
    def num_leaving(self) -> int:
        """Open requests on registrations that were removed."""
        return sum(self._leaving.values())

    @property
    def num_conversations(self) -> int:
        """Conversations whose replica is remembered."""
        return len(self._sticky)

    # -- requests ------------------------------------------------------------------------------------------------------

    def acquire(self, conversation: str | None = None) -> Placement | None:
        """Place a request and count it; None while no replica takes any.

        Raises UsageError for a request without a conversation where the placement is deterministic.
        """
        if self._policy == "deterministic":
            name = self._hashed(conversation)
        else:
            name = self._stuck(conversation) or self._least()
        if name is None:
            return None
        replica = self._replicas[name]
        replica.in_flight += 1
        placement = Placement(name, replica.registration)
        if conversation is not None and self._policy == "least_in_flight":
            self._sticky[conversation] = placement
            self._sticky.move_to_end(conversation)
            while len(self._sticky) > self._limit:
                self._sticky.popitem(last=False)
        return placement

    def release(self, placement: Placement) -> None:
        """Count a request off the registration that it was placed on. Raises UsageError when it has none open."""
        replica = self._replicas.get(placement.replica)
        if replica is not None and replica.registration == placement.registration and replica.in_flight:
            replica.in_flight -= 1
        elif self._leaving.get(placement.registration):
            self._leaving[placement.registration] -= 1
            if not self._leaving[placement.registration]:
                del self._leaving[placement.registration]
        else:
            raise UsageError(
                f"release of {placement.replica!r} (registration {placement.registration}), which has no request open: "
                "each placement is released once"
            )

    def forget(self, conversation: str) -> None:
        """Let a conversation that has ended go; unknown ones are ignored."""
        self._sticky.pop(conversation, None)

    # -- inside --------------------------------------------------------------------------------------------------------

    def _known(self, name: str) -> _Replica:
        if name not in self._replicas:
            raise UsageError(f"no replica {name!r}; there are {', '.join(self._replicas) or 'none'}")
        return self._replicas[name]

    def _forget_conversations(self, registration: int) -> None:
        gone = [talk for talk, placement in self._sticky.items() if placement.registration == registration]
        for conversation in gone:
            del self._sticky[conversation]

    def _stuck(self, conversation: str | None) -> str | None:
        placement = None if conversation is None else self._sticky.get(conversation)
        return None if placement is None else placement.replica

    def _least(self) -> str | None:
        names = self.replicas
        turn = {name: (place - self._first) % len(names) for place, name in enumerate(names)}
        return min(names, key=lambda name: (self._replicas[name].in_flight, turn[name]), default=None)

    def _hashed(self, conversation: str | None) -> str | None:
        if conversation is None:
            raise UsageError("deterministic placement needs the name of a conversation for each request")
        names = sorted(self.replicas)
        if not names:
            return None
        digest = hashlib.blake2b(conversation.encode(), digest_size=8).digest()
        return names[int.from_bytes(digest, "big") % len(names)]
