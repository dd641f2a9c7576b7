"""How are prompts kept in flight while the trainer works, and how does it get the groups that it trains on?

One task samples the n responses of one prompt on one replica. The end of a task is an event, put into a queue by
whoever hears of it; the driver's thread reads the queue when it needs groups and sleeps in it until there is news. It
alone touches the buffer.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from rpcrl.agents.balancer import Balancer, Placement
from rpcrl.batch.data_proto import DataProto
from rpcrl.errors import AgentTaskError, RemoteError, RpcrlError, WorkerLostError
from rpcrl.logs import get_logger
from rpcrl.trainer import steps

if TYPE_CHECKING:
    from rpcrl.trainer.group_filter import GroupFilter
    from rpcrl.trainer.prompt_queue import PromptQueue
    from rpcrl.trainer.replay_buffer import ReplayBuffer

__all__ = ["FixedReplicas", "GroupSampler", "Replicas"]

log = get_logger(__name__)

MOST_ATTEMPTS = 2
"""Deadlines that a task may pass before its prompt is dropped."""
LOOK_S = 60.0
"""Longest single wait for an event."""
NOISE_STEP = 0
"""A prompt's uid is its own in the whole run, so a task that is issued again draws the same noise."""


class Replicas(Protocol):
    """Where tasks run. All calls come from the driver's thread."""

    reads_prompts: bool
    """Whether ``sample`` wants all columns of a prompt."""

    def live(self) -> Mapping[str, Any]:
        """Return the replicas that take tasks now: name → handle of a worker with ``sample``."""
        ...

    def lost(self, name: str, error: WorkerLostError) -> None:
        """Hear that a replica has gone. Raises the error if the run cannot go on without it."""
        ...

    def served(self, name: str) -> None:
        """Hear that a replica has done a task."""
        ...

    def await_one(self) -> None:
        """Return when a replica is live again; raises if there will be none."""
        ...


class FixedReplicas:
    """The workers of one group, of which none can be spared."""

    reads_prompts = False

    def __init__(self, group: Any) -> None:
        self._workers = {f"rollout {worker.rank}": worker for worker in group.workers}

    def live(self) -> Mapping[str, Any]:
        """Return every worker."""
        return self._workers

    def lost(self, name: str, error: WorkerLostError) -> None:
        """Raise the error: with one rank its whole group is gone."""
        raise error

    def served(self, name: str) -> None:
        """Do nothing: nobody counts."""

    def await_one(self) -> None:
        """Return at once: they are there as long as the group is."""


@dataclass
class _Task:
    uid: str
    prompt: DataProto
    repeated: DataProto
    request: DataProto
    placement: Placement | None = None
    future: Any = None
    begun_s: float = 0.0
    attempts: int = 0


class GroupSampler:
    """Keeps tasks in flight and hands out their groups; for the driver's thread.

    ``task_timeout_s``: a task that takes longer is named and issued again, on another replica where there is one; the
    second time its prompt is dropped. ``most_failures``: so many tasks that fail in a row are the run's failure.
    ``group_filter`` scores groups, drops those that do not differ; more than ``most_filtered`` in a step end the run.
    """

    def __init__(
        self,
        replicas: Replicas,
        prompts: PromptQueue,
        buffer: ReplayBuffer,
        sampling: steps.Sampling,
        *,
        task_timeout_s: float,
        most_failures: int,
        group_filter: GroupFilter | None = None,
        most_filtered: int | None = None,
    ) -> None:
        self._replicas = replicas
        self._prompts = prompts
        self._buffer = buffer
        self._sampling = sampling
        self._task_timeout_s = task_timeout_s
        self._most_failures = most_failures
        self._filter = group_filter
        self._most_filtered = most_filtered
        self._balancer = Balancer()
        self._tasks: dict[str, _Task] = {}
        self._events: queue.SimpleQueue[tuple[_Task, Any]] = queue.SimpleQueue()
        self._failures = 0
        self.num_taken = 0
        """Groups that were handed out."""
        self.num_filtered = 0
        """Groups that the filter has dropped since ``begin_step``."""

    def unfinished(self) -> list[str]:
        """Return the prompts that were drawn and neither handed out nor dropped, in their order."""
        return [*self._buffer.uids(), *self._prompts.drawn]

    def begin_step(self) -> None:
        """Count what is filtered from here on."""
        self.num_filtered = 0

    def fill(self, limit: int, *, version: int) -> None:
        """Submit prompts until ``limit`` groups are handed out, finished or on their way."""
        while self.num_taken + len(self._buffer) < limit:
            prompt = self._prompts.next()
            uid = str(prompt.non_tensor_batch["uid"][0])
            self._buffer.submit(uid, data_source=str(prompt.non_tensor_batch["data_source"][0]), version=version)
            whole = self._replicas.reads_prompts
            task = _Task(uid, prompt, *steps.request_rows(prompt, self._sampling, step=NOISE_STEP, whole=whole))
            self._tasks[uid] = task
            self._issue(task)

    def take(self, count: int, *, version: int, later: int, limit: int) -> DataProto:
        """Return the rows of the next ``count`` groups, waiting for them; what was dropped is replaced up to ``limit``.

        ``version`` is the trainer's, ``later`` as in ``ReplayBuffer.take``. Raises the last failure when too many tasks
        fail, and the error of a replica without which the run cannot go on.
        """
        while True:
            self._hear_all()
            self._buffer.evict(version)
            self.fill(limit, version=version)
            if not self._buffer.missing(count, version=version, later=later):
                break
            self._hear_next()
        groups = self._buffer.take(count, version=version, later=later)
        self.num_taken += len(groups)
        return DataProto.concat([group.rows for group in groups])

    def restart_deadlines(self) -> None:
        """Count each task's time from now: they were not worked at meanwhile."""
        now = time.monotonic()
        for task in self._tasks.values():
            task.begun_s = now

    def close(self) -> None:
        """Give up what is in flight."""
        for task in self._tasks.values():
            if task.future is not None:
                task.future.cancel()

    # -- tasks ---------------------------------------------------------------------------------------------------------

    def _issue(self, task: _Task, *, avoid: str | None = None) -> None:
        """Have a replica sample a task, a new call each time."""
        while True:
            live = self._replicas.live()
            self._match(live)
            drained = avoid is not None and len(live) > 1 and avoid in live
            if drained and avoid is not None:
                self._balancer.drain(avoid)
            placement = self._balancer.acquire()
            if drained and avoid is not None:
                self._balancer.undrain(avoid)
            if placement is not None:
                break
            self._replicas.await_one()
        task.placement, task.begun_s = placement, time.monotonic()
        future = live[placement.replica].sample.submit(task.request)
        task.future = future
        future.add_done_callback(lambda done: self._events.put((task, done)))

    def _match(self, live: Mapping[str, Any]) -> None:
        for name in self._balancer.replicas:
            if name not in live:
                self._balancer.remove(name)
        for name in live:
            if name not in self._balancer.replicas:
                self._balancer.add(name)

    def _hear_all(self) -> None:
        while True:
            try:
                task, future = self._events.get_nowait()
            except queue.Empty:
                return
            self._ended(task, future)

    def _hear_next(self) -> None:
        """Wait for the next event or deadline, and deal with it."""
        first = min((task.begun_s for task in self._tasks.values()), default=time.monotonic())
        wait_s = max(0.0, first + self._task_timeout_s - time.monotonic())
        try:
            task, future = self._events.get(timeout=min(wait_s, LOOK_S))
        except queue.Empty:
            self._look_for_late()
            return
        self._ended(task, future)

    def _ended(self, task: _Task, future: Any) -> None:
        if task.future is not future or self._tasks.get(task.uid) is not task:
            return  # it was given up, and has been issued again since
        placement = task.placement
        if placement is not None:
            self._balancer.release(placement)
        try:
            sampled: DataProto = future.result(LOOK_S)
        except WorkerLostError as error:
            self._replicas.lost("" if placement is None else placement.replica, error)
            self._issue(task)
            return
        except (RemoteError, AgentTaskError) as error:
            self._failed(task, "failed", error)
            return
        aborted = "abort" in set(sampled.non_tensor_batch["finish_reason"])
        if aborted:
            self._failed(task, "aborted", None)
            return
        self._failures = 0
        if placement is not None:
            self._replicas.served(placement.replica)
        del self._tasks[task.uid]
        rows = steps.with_prompts(task.repeated, sampled, self._sampling)
        if self._filter is not None:
            scored = self._filter.kept(rows)
            if scored is None:
                self._filtered(task)
                return
            rows = scored
        self._buffer.finish(task.uid, rows, version=min(map(int, sampled.non_tensor_batch["min_weight_version"])))

    def _filtered(self, task: _Task) -> None:
        """Drop a prompt whose samples do not differ; raises BatchError when a step has cost too many of them."""
        self._buffer.fail(task.uid, "filtered")
        self.num_filtered += 1
        if self._filter is not None and self._most_filtered is not None and self.num_filtered > self._most_filtered:
            raise self._filter.exhausted(self.num_filtered)

    def _failed(self, task: _Task, reason: str, error: Exception | None) -> None:
        """Drop a task's prompt; another one takes its place with the next ``fill``."""
        del self._tasks[task.uid]
        self._buffer.fail(task.uid, reason)
        self._failures += 1
        log.warning("prompt %s was dropped (%s)%s", task.uid, reason, "" if error is None else f": {error}")
        if self._failures >= self._most_failures:
            raise error or RpcrlError(f"{self._failures} samplings in a row have {reason}; the last: prompt {task.uid}")

    def _look_for_late(self) -> None:
        now = time.monotonic()
        late = [task for task in self._tasks.values() if now - task.begun_s >= self._task_timeout_s]
        for task in late:
            where = "?" if task.placement is None else task.placement.replica
            task.attempts += 1
            log.warning(
                "prompt %s on replica %s has not been sampled within trainer.v1.sampler.task_timeout_s=%g (attempt %d)",
                task.uid,
                where,
                self._task_timeout_s,
                task.attempts,
            )
            if task.future is not None:
                task.future.cancel()
            if task.placement is not None:
                self._balancer.release(task.placement)
            if task.attempts < MOST_ATTEMPTS:
                self._issue(task, avoid=where)
                continue
            self._failed(
                task,
                "late",
                RpcrlError(
                    f"prompt {task.uid} was not sampled within trainer.v1.sampler.task_timeout_s="
                    f"{self._task_timeout_s:g} in {MOST_ATTEMPTS} attempts, the last on replica {where}; raise it, or "
                    "look for what keeps that replica: rpcrl logs"
                ),
            )
