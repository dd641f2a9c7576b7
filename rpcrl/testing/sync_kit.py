"""Do a trainer's weights reach a rollout as they are, whatever they go over?

A test suite makes a ``SyncHarness`` per backend and runs every function of ``CHECKS`` on it. Each check raises
AssertionError when a promise is broken. ``rpcrl`` runs them on ``naive`` (one group, in place), ``broadcast`` (two
groups) and a channel of a user's own.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, Self

import torch

from rpcrl.roles.pool_sync import WeightSync
from rpcrl.runtime.controller import Controller
from rpcrl.runtime.worker_group import ClassWithInitArgs, WorkerGroup
from rpcrl.testing.sync_workers import KitRollout, KitTrainer, expected_weights
from rpcrl.topology import ResourcePool

__all__ = ["CHECKS", "SyncHarness"]

TIMEOUT_S = 5.0
ROUND_TRIPS = 30


class SyncHarness:
    """A trainer of ``trainers`` ranks and a rollout of ``rollouts``; with ``naive`` they are one group."""

    def __init__(
        self,
        controller: Controller,
        backend: str,
        *,
        trainers: int = 1,
        rollouts: int = 2,
        bucket_bytes: int = 4_096,
        layers: int = 0,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        self.backend = backend
        self._layers = layers
        options = {"timeout_s": timeout_s, "layers": layers}
        sender, receiver = (ClassWithInitArgs(kind, backend, **options) for kind in (KitTrainer, KitRollout))
        pool = ResourcePool([trainers], name="trainer_pool")
        self.sync: Any
        if backend == "naive":
            group: WorkerGroup[Any] = WorkerGroup(pool, {"trainer": sender, "rollout": receiver}, controller=controller)
            self.groups = [group]
            views = group.spawn()
            self.trainer, self.rollout = views["trainer"], views["rollout"]
            self.sync = self.rollout
            return
        rollout_pool = ResourcePool([rollouts], name="rollout_pool")
        with ThreadPoolExecutor(1) as beside:
            starting = beside.submit(WorkerGroup[Any], rollout_pool, receiver, controller=controller)
            self.trainer = WorkerGroup(pool, sender, controller=controller)
            self.rollout = starting.result()
        self.groups = [self.trainer, self.rollout]
        self.sync = WeightSync(self.trainer, self.rollout, bucket_bytes=bucket_bytes, timeout_s=timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        if self.backend != "naive":
            self.sync.close()
        for group in self.groups:
            group.close()

    def has(self, seed: int, *, version: int) -> None:
        """Raise AssertionError unless every rollout rank has exactly the weights of ``seed``, as ``version``."""
        wanted = expected_weights(seed, layers=self._layers)
        versions = self.rollout.weight_version()
        if set(versions) != {version}:
            raise AssertionError(f"the ranks have versions {versions}, not {version}")
        for rank, found in enumerate(self.rollout.read()):
            if list(found) != list(wanted):
                raise AssertionError(f"rank {rank} has {list(found)}, not {list(wanted)}")
            for name, tensor in wanted.items():
                if found[name].dtype != tensor.dtype or not torch.equal(found[name], tensor):
                    raise AssertionError(f"rank {rank}: {name} is not the trainer's")


def every_rank_gets_every_tensor(harness: SyncHarness) -> None:
    """Names, dtypes, shapes and bits are the trainer's on every rank; the version is readable there."""
    harness.trainer.train(1)
    harness.sync.update_weights(7)
    harness.has(1, version=7)


def syncs_follow_one_another(harness: SyncHarness) -> None:
    """Each sync brings what the trainer has then; nothing of the one before is left."""
    for version in (11, 12, 13):
        harness.trainer.train(version)
        harness.sync.update_weights(version)
        harness.has(version, version=version)


def two_at_once_are_serialised(harness: SyncHarness) -> None:
    """Two threads that start syncs at once both end well, one after the other, and all ranks have the same version."""
    harness.trainer.train(2)
    harness.rollout.calls_of_syncs()
    errors: list[BaseException] = []

    def one(version: int) -> None:
        try:
            harness.sync.update_weights(version)
        except BaseException as error:
            errors.append(error)

    busy = harness.rollout.be_busy.submit(0)
    threads = [threading.Thread(target=one, args=(version,)) for version in (21, 22)]
    for thread in threads:
        thread.start()
    for _ in range(ROUND_TRIPS):  # time for both to have begun, if nothing keeps the second one back
        if harness.backend != "naive":
            harness.trainer.train_together()
    harness.rollout.be_free(0)
    busy.result(60)
    for thread in threads:
        thread.join(60)
    if errors:
        raise AssertionError("a sync failed beside another one") from errors[0]
    versions = harness.rollout.weight_version()
    if len(set(versions)) != 1 or versions[0] not in (21, 22):
        raise AssertionError(f"the ranks have versions {versions}")
    harness.has(2, version=versions[0])
    wanted = [] if harness.backend == "naive" else ["asked", "received"] * 2
    for rank, calls in enumerate(harness.rollout.calls_of_syncs()):
        if calls != wanted:
            raise AssertionError(f"two syncs ran into each other on rank {rank}: {calls}")


def process_groups_are_left_alone(harness: SyncHarness) -> None:
    """The trainer's own process group works before and after; the rollout is given none."""
    world = float(harness.trainer.world_size)
    before = harness.rollout.has_default_group()
    harness.trainer.train(3)
    harness.sync.update_weights(31)
    if harness.trainer.train_together() != [world] * harness.trainer.world_size:
        raise AssertionError("the trainer's own process group does not work any more")
    if harness.rollout.has_default_group() != before:
        raise AssertionError("a sync made or ended a default process group of the rollout")


CHECKS = (
    every_rank_gets_every_tensor,
    syncs_follow_one_another,
    two_at_once_are_serialised,
    process_groups_are_left_alone,
)
