"""What becomes of a run when one of its rollout replicas dies? That replica is started again, the others go on.

Each replica is a group of its own, so that a death breaks no other, with a weight sync of its own. A replica takes
tasks when it has weights: a new one gets them with the next sync, or at once when it is the only one.
"""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rpcrl.batch.data_proto import DataProto
from rpcrl.errors import RpcrlError, WorkerLostError
from rpcrl.logs import get_logger

if TYPE_CHECKING:
    from rpcrl.errors import WorkerExit
    from rpcrl.roles.pool_sync import WeightSync
    from rpcrl.runtime.future import Future

__all__ = ["ReplicaSet", "ReplicaSync"]

log = get_logger(__name__)

MOST_DEATHS = 3
"""Deaths in a row, without a task done in between, after which a replica is not started again."""
LOOK_S = 60.0
"""Longest single wait for a replica that starts."""


@dataclass
class _Place:
    """Where a replica runs, again and again."""

    index: int
    group: Any = None
    """None while there is no replica."""
    sync: WeightSync | None = None
    has_weights: bool = False
    """Whether it has been given any."""
    starting: concurrent.futures.Future[Any] | None = None
    deaths: int = 0
    """Since a task was done here."""


class ReplicaSet:
    """The rollout of a run as replicas that may be lost; for the driver's thread.

    ``start(index)`` starts the replica of a place, in any thread, and returns its group; ``sync_to(group)`` makes the
    way of the trainer's weights to it.
    """

    reads_prompts = False

    def __init__(
        self, groups: Sequence[Any], start: Callable[[int], Any], sync_to: Callable[[Any], WeightSync]
    ) -> None:
        self._start = start
        self._sync_to = sync_to
        self._places = [_Place(index, group, sync_to(group)) for index, group in enumerate(groups)]
        self._starters = concurrent.futures.ThreadPoolExecutor(len(groups), thread_name_prefix="replica-start")
        self._exits: list[WorkerExit] = []
        self._version: int | None = None
        self.num_lost = 0
        """Replicas that were lost so far."""

    @property
    def world_size(self) -> int:
        """Number of processes when all replicas are there."""
        return sum(1 if place.group is None else int(place.group.world_size) for place in self._places)

    def groups(self) -> list[Any]:
        """Return the groups of the replicas that are there."""
        return [place.group for place in self._places if place.group is not None]

    # -- tasks: rpcrl.trainer.group_sampler.Replicas -------------------------------------------------------------------

    def live(self) -> Mapping[str, Any]:
        """Return the replicas that have weights: name → handle of the worker that takes requests."""
        return {place.group.name: place.group.workers[0] for place in self._ready()}

    def lost(self, name: str, error: WorkerLostError) -> None:
        """Have a replica that has gone started again; raises the error when it has died too often, or is no replica's.

        A name that is known no more is ignored: others have said it before.
        """
        place = next((place for place in self._places if place.group is not None and place.group.name == name), None)
        if place is None:
            return
        self.num_lost += 1
        place.deaths += 1
        log.warning("replica %s was lost: %s", name, str(error).splitlines()[0])
        if place.deaths > MOST_DEATHS:
            raise error
        group, sync = place.group, place.sync
        place.group, place.sync, place.has_weights = None, None, False
        place.starting = self._starters.submit(self._again, place.index, group, sync)

    def served(self, name: str) -> None:
        """Hear that a replica has done a task: it is well."""
        for place in self._places:
            if place.group is not None and place.group.name == name:
                place.deaths = 0

    def await_one(self) -> None:
        """Return when a replica has weights; starts that fail are tried again until one has failed too often."""
        while not self._ready():
            waited = [place.starting for place in self._places if place.starting is not None]
            if not waited:
                self._give_weights()
                continue
            concurrent.futures.wait(waited, LOOK_S, concurrent.futures.FIRST_COMPLETED)
            self._adopt()
            self._give_weights()

    def _ready(self) -> list[_Place]:
        return [place for place in self._places if place.group is not None and place.has_weights]

    def _again(self, index: int, group: Any, sync: WeightSync | None) -> Any:
        """End what is left of a replica and start it anew; in a thread of its own."""
        if sync is not None:
            sync.close()
        self._exits += group.close()
        return self._start(index)

    def _adopt(self) -> None:
        """Take in the replicas that have started."""
        for place in self._places:
            starting = place.starting
            if starting is None or not starting.done():
                continue
            place.starting = None
            error = starting.exception()
            if error is None:
                place.group = starting.result()
                place.sync = self._sync_to(place.group)
                log.warning("replica %s has started in its place", place.group.name)
                continue
            place.deaths += 1
            log.warning("a replica could not be started again: %s", error)
            if place.deaths > MOST_DEATHS or not isinstance(error, RpcrlError):
                raise error
            place.starting = self._starters.submit(self._start, place.index)

    # -- weights -------------------------------------------------------------------------------------------------------

    def update_weights(self, version: int) -> None:
        """Give every replica the trainer's weights as ``version``; one that is lost meanwhile gets them later.

        Raises what the sync raises when it is the trainer that failed.
        """
        self._version = version
        self._adopt()
        self._give_weights(everybody=True)
        if not self._ready():
            self.await_one()

    def _give_weights(self, *, everybody: bool = False) -> None:
        for place in self._places:
            if place.group is None or place.sync is None or self._version is None:
                continue
            if place.has_weights and not everybody:
                continue
            try:
                place.sync.update_weights(self._version)
            except WorkerLostError as error:
                if not self._is_of(place, error):
                    raise
                self.lost(place.group.name, error)
            else:
                place.has_weights = True

    def close_syncs(self) -> None:
        """Leave the sync groups of all replicas."""
        for place in self._places:
            if place.sync is not None:
                place.sync.close()

    @staticmethod
    def _is_of(place: _Place, error: WorkerLostError) -> bool:
        return any(end.group == place.group.name for end in error.exits)

    # -- calls of all replicas -----------------------------------------------------------------------------------------

    def pause_generation(self) -> None:
        """Take the requests out of every engine."""
        self._all(lambda group: group.pause_generation.submit())

    def resume_generation(self) -> None:
        """Go on with the requests of every replica."""
        self._all(lambda group: group.resume_generation.submit())

    def _all(self, submit: Callable[[Any], Future[Any]]) -> None:
        calls = [(place, submit(place.group)) for place in self._ready()]
        for place, call in calls:
            try:
                call.result()
            except WorkerLostError as error:
                self.lost(place.group.name, error)

    def generate_sequences(self, prompts: DataProto) -> DataProto:
        """Sample one response per row, over the replicas; what a lost one has not sampled others do."""
        self.await_one()
        todo = dict(enumerate(prompts.chunk(min(len(self._ready()), len(prompts)), uneven=True)))
        parts: dict[int, DataProto] = {}
        while todo:
            self.await_one()
            ready = self._ready()
            calls = []
            for turn, (number, part) in enumerate(todo.items()):
                place = ready[turn % len(ready)]
                calls.append((number, place, place.group.generate_sequences.submit(part)))
            for number, place, call in calls:
                try:
                    parts[number] = call.result()
                except WorkerLostError as error:
                    if place.group is not None:
                        self.lost(place.group.name, error)
                else:
                    del todo[number]
        return DataProto.concat([parts[number] for number in sorted(parts)])

    def engine_account(self) -> dict[str, object]:
        """Return what samples in a replica that is there, as ``RolloutWorker.engine_account`` does."""
        while True:
            self.await_one()
            place = self._ready()[0]
            try:
                account: dict[str, object] = place.group.engine_account()
            except WorkerLostError as error:
                self.lost(place.group.name, error)
            else:
                return account

    def close(self) -> list[WorkerExit]:
        """End all replicas; returns the ends of all that ever were."""
        for place in self._places:
            if place.starting is not None:
                concurrent.futures.wait([place.starting], LOOK_S)
                if place.starting.done() and place.starting.exception() is None:
                    place.group = place.starting.result()
                place.starting = None
            if place.group is not None:
                self._exits += place.group.close()
        self._starters.shutdown(wait=False)
        return self._exits


class ReplicaSync:
    """The way of the weights to a set of replicas, as ``rpcrl.roles.pool_sync.WeightSync`` is that to a group."""

    def __init__(self, replicas: ReplicaSet) -> None:
        self._replicas = replicas

    def update_weights(self, version: int) -> None:
        """See ``ReplicaSet.update_weights``."""
        self._replicas.update_weights(version)

    def close(self) -> None:
        """Leave the sync groups."""
        self._replicas.close_syncs()
