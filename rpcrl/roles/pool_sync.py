"""How does the driver bring the trainer's weights to a rollout that lives in other processes?

In two phases. First everything is agreed by plain calls: both sides say what they would use, every trainer rank says
what it would send, every rollout rank that it would take exactly that. Then, with a group made if there is none, the
bytes flow. Whatever fails, on whichever side, ends the other side too, within a bound; the group is thrown away and the
next sync makes a new one under another name.
"""

from __future__ import annotations

import itertools
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rpcrl.errors import CallTimeoutError, ClosedError, RemoteError, RpcrlError, WeightSyncError, WorkerLostError
from rpcrl.logs import get_logger
from rpcrl.runtime.future import Future, as_completed

__all__ = ["WeightSync"]

log = get_logger(__name__)

PART_BYTES = {"gloo": 8 * 2**20}
"""Most bytes that go over at once, by transport; elsewhere, and below this, it is the size of a bucket.

gloo's bytes pass through the processor: while they are in its cache, packing, summing and unpacking cost little.
"""

END_S = 5.0
"""How much longer than the sync's own timeout the end of a cancelled call is waited for."""


class WeightSync:
    """The way of weights from one worker group to another; for any thread, one sync at a time.

    ``trainer`` is a group (or a view) of ``rpcrl.roles.weight_sync.WeightSender``, ``rollout`` one of
    ``WeightReceiver``. ``timeout_s`` bounds each phase of a sync, and should be the members' ``sync_timeout_s``.
    """

    def __init__(self, trainer: Any, rollout: Any, *, bucket_bytes: int, timeout_s: float) -> None:
        self._sides = {"trainer": trainer, "rollout": rollout}
        self._most_bytes = self._bucket_bytes = bucket_bytes
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._names = _new_names()
        self._group: str | None = None
        self._number = 0
        self._closed = False

    @property
    def group_name(self) -> str | None:
        """Name of the sync group that is there now; None before the first sync, and after one that failed."""
        return self._group

    def update_weights(self, version: int) -> list[int]:
        """Give every rollout rank the trainer's weights, as ``version``; returns each rank's version.

        Syncs that are started at once run one after the other. Raises WeightSyncError naming the side, rank and cause,
        or WorkerLostError; no rank of either side waits for another one any more then.
        """
        with self._lock:
            if self._closed:
                raise ClosedError("this weight sync was closed")
            self._number += 1
            wait_s = 0.0  # until a collective has begun nobody waits for anybody
            try:
                digest = self._agree()
                wait_s = END_S
                if self._group is None:
                    self._make_group()
                return self._transfer(version, digest)
            except BaseException:
                self._discard(wait_s)
                raise

    def close(self) -> None:
        """Leave the group, on both sides. Closing twice does nothing."""
        with self._lock:
            self._closed = True
            self._discard(END_S)

    # -- first phase: by calls only ------------------------------------------------------------------------------------

    def _agree(self) -> str:
        answers = self._both("say what it uses", lambda side: side.sync_capabilities.submit(), ("trainer", "rollout"))
        self._same_capabilities(answers)
        transport = answers["trainer"][0]["transport"]
        self._bucket_bytes = min(self._most_bytes, PART_BYTES.get(transport, self._most_bytes))
        offers = self._both("plan", lambda side: side.sync_offer.submit(self._bucket_bytes), ("trainer",))["trainer"]
        for rank, offer in enumerate(offers):
            if offer["digest"] != offers[0]["digest"]:
                raise WeightSyncError(
                    f"trainer rank {rank} and rank 0 would send other weights: {_differs(offers, rank)}"
                )
        expected = self._both(
            "get ready", lambda side: side.sync_expect.submit(offers[0]["specs"], self._bucket_bytes), ("rollout",)
        )["rollout"]
        for rank, digest in enumerate(expected):
            if digest != offers[0]["digest"]:
                raise WeightSyncError(
                    f"rollout rank {rank} would take the weights by another plan ({digest[:12]}…) than trainer rank 0 "
                    f"sends them by ({offers[0]['digest'][:12]}…): do all workers run the same version of rpcrl?"
                )
        return str(offers[0]["digest"])

    @staticmethod
    def _same_capabilities(answers: Mapping[str, list[Mapping[str, str]]]) -> None:
        wanted = answers["trainer"][0]
        for side, ranks in answers.items():
            for rank, found in enumerate(ranks):
                if found != wanted:
                    raise WeightSyncError(
                        f"trainer rank 0 would send by backend {wanted['backend']!r} over {wanted['transport']}, "
                        f"{side} rank {rank} by backend {found['backend']!r} over {found['transport']}: give both the "
                        "same rollout.checkpoint_engine.backend and kind of device"
                    )

    # -- second phase: collectives -------------------------------------------------------------------------------------

    def _make_group(self) -> None:
        self._group = name = next(self._names)
        address = self._both("open a sync group", lambda side: side.sync_listen.submit(name), ("trainer",))["trainer"]
        world_size = 1 + self._sides["rollout"].world_size
        self._both(
            "join the sync group",
            lambda side: side.sync_join.submit(name, address, 0 if side is self._sides["trainer"] else 1, world_size),
            ("trainer", "rollout"),
            collective=True,
        )

    def _transfer(self, version: int, digest: str) -> list[int]:
        name, number, trainer = self._group, self._number, self._sides["trainer"]
        versions: list[int] = self._both(
            "move the weights",
            lambda side: (
                side.sync_send.submit(name, self._bucket_bytes, number)
                if side is trainer
                else side.sync_receive.submit(name, digest, number, version)
            ),
            ("trainer", "rollout"),
            collective=True,
        )["rollout"]
        wrong = {rank: found for rank, found in enumerate(versions) if found != version}
        if wrong:
            raise WeightSyncError(f"after the sync of version {version} rollout ranks have other versions: {wrong}")
        self._check(version)
        return versions

    def _check(self, version: int) -> None:
        """Have the rollout compare its model with the trainer's, where it can and is told to."""
        tokens = self._both("name a text", lambda side: side.sync_canary_tokens.submit(), ("rollout",))["rollout"][0]
        if not tokens:
            return
        scores = self._both("score it", lambda side: side.sync_score.submit(tokens), ("trainer",))["trainer"][0]
        self._both("check it", lambda side: side.sync_check.submit(tokens, scores, version), ("rollout",))

    # -- calls of both sides -------------------------------------------------------------------------------------------

    def _both(
        self, doing: str, submit: Callable[[Any], Future[Any]], sides: tuple[str, ...], *, collective: bool = False
    ) -> dict[str, Any]:
        """Call the sides at once and return their results; the first failure cancels all that runs.

        ``collective``: each part of these calls has a bound of its own, so that together they may take as long as they
        move on; and who runs has to be told to stop, because it waits for the others.
        """
        calls = {name: submit(self._sides[name]) for name in sides}
        by_future = {id(future): name for name, future in calls.items()}
        try:
            for future in as_completed(calls.values(), None if collective else self._timeout_s):
                error = future.exception()
                if error is not None:
                    raise self._failure(doing, by_future[id(future)], error, calls, collective)
        except CallTimeoutError:
            late = [f"{name}: {future!r}" for name, future in calls.items() if not future.done()]
            why = f"not everybody was able to {doing} within {self._timeout_s:g} s: {'; '.join(late)}"
            self._cancel(calls, why, collective)
            raise WeightSyncError(f"weight sync {self._number}: {why}") from None
        except BaseException as interrupt:
            self._cancel(calls, f"{type(interrupt).__name__} on the driver", collective)
            raise
        return {name: future.result() for name, future in calls.items()}

    def _failure(
        self, doing: str, side: str, error: BaseException, calls: Mapping[str, Future[Any]], collective: bool
    ) -> BaseException:
        """End what runs, and return what is to be raised: the death of a worker, or the story of the first failure."""
        if isinstance(error, RemoteError):
            why = f"{side} rank {error.rank} raised {error.type_name}: {error.message}"
        else:
            why = f"the {side} failed: {type(error).__name__}"
        self._cancel(calls, why, collective)
        # A failure has followers: what a cancelled or deserted rank raises. A death is the likely cause of all of them.
        for future in calls.values():
            if future.done() and isinstance(lost := future.exception(), WorkerLostError):
                return lost
        if not isinstance(error, RpcrlError):
            return error
        story = WeightSyncError(f"weight sync {self._number} could not {doing}: {why}")
        story.__cause__ = error
        return story

    def _cancel(self, calls: Mapping[str, Future[Any]], why: str, collective: bool) -> None:
        """Have everything that runs or waits in these calls end, within a bound."""
        if collective:
            for side in self._sides.values():
                _tried(side.sync_cancel.submit, self._group, why)
        deadline_s = time.monotonic() + self._timeout_s + END_S
        for future in calls.values():
            if not collective:
                future.cancel()  # whoever has not begun never will
                continue
            try:
                future.exception(max(0.0, deadline_s - time.monotonic()))
            except CallTimeoutError as late:
                log.warning("%s", late)
                future.cancel()

    def _discard(self, wait_s: float) -> None:
        """Throw the group away; a rank that is busy leaves it when it is not."""
        name, self._group = self._group, None
        if name is None:
            return
        for side in self._sides.values():
            future = _tried(side.sync_close.submit, name)
            if future is not None and wait_s:
                _tried(future.result, wait_s)


def _new_names() -> Iterator[str]:
    """Yield names that no sync group has had, also not one of another sync between the same ranks."""
    whose = uuid.uuid4().hex[:8]
    return (f"weights-{whose}-{number}" for number in itertools.count(1))


def _tried(call: Callable[..., Any], *args: Any) -> Any:
    """Call something whose failure changes nothing: the other side is gone, or ends by itself."""
    try:
        return call(*args)
    except RpcrlError as error:
        log.debug("while a weight sync ended: %s", error)
        return None


def _differs(offers: list[Mapping[str, Any]], rank: int) -> str:
    """Say where the order of a rank's tensors differs from rank 0's."""
    one, other = offers[0]["order"], offers[rank]["order"]
    for index, (first, second) in enumerate(itertools.zip_longest(one, other)):
        if first != second:
            return f"tensor {index} is {first!r} on rank 0 and {second!r} on rank {rank}"
    return "the same names, with other dtypes or shapes"
