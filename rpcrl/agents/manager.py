"""Who hands samples out to agent-loop workers? The driver, prompt by prompt, in the place of a rollout group."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rpcrl.agents.loop import AgentLoopOutput
from rpcrl.agents.rows import RowShape, rows_of
from rpcrl.agents.tasks import AGENT_NAME, SAMPLING_PARAMS, AgentTask, TaskResult, row_sampling
from rpcrl.engines.sampling_settings import SamplingSettings
from rpcrl.errors import AgentLostError, AgentTaskError, BatchError, CallTimeoutError, WorkerLostError
from rpcrl.logs import get_logger
from rpcrl.runtime.future import wait_all

if TYPE_CHECKING:
    from rpcrl.batch.data_proto import DataProto
    from rpcrl.config.agent import Agent
    from rpcrl.errors import WorkerExit

__all__ = ["AgentLoopManager"]

log = get_logger(__name__)

GRACE_S = 30.0
"""What a worker may take beyond the deadlines of its tasks before it is given up."""
CONTROL_S = 60.0
"""How long workers may take to hear of a replica."""
SHOWN = 5
"""Failed samples that an error tells about in full."""


@dataclass
class _Given:
    """One prompt's samples, at a worker."""

    rows: range
    """Rows of the request."""
    tasks: list[AgentTask]
    worker: Any
    future: Any
    given_s: float


class AgentLoopManager:
    """Agent-loop workers, called as a rollout group is: ``generate_sequences``.

    ``workers`` are groups of one worker each, so that the end of one is not the end of the others: its prompts go to
    them. The workers have been connected to replicas.
    """

    reads_prompts = True
    """``steps.generate`` gives it all columns of the prompts."""

    def __init__(self, workers: Sequence[Any], config: Agent, *, pad_token_id: int) -> None:
        self._workers = list(workers)
        self._all = list(workers)
        self._config = config
        self._pad_token_id = pad_token_id
        self._turn = 0

    @property
    def world_size(self) -> int:
        """Number of worker processes."""
        return len(self._all)

    def close(self) -> list[WorkerExit]:
        """End the workers' processes; returns their ends."""
        return [exit for group in self._all for exit in group.close()]

    def generate_sequences(self, request: DataProto) -> DataProto:
        """Make one sample a row; returns at least one row for each, those of a request row side by side.

        In: what ``RolloutEngine.generate`` takes, the prompts' non-tensor columns, and optionally ``agent_name`` and
        ``sampling_params``; meta_info ``validate``. Rows of a prompt stand side by side. Out: ``rows_of``; meta_info
        ``weight_version`` (the newest that sampled), ``num_failed_tasks``, ``num_retried_tasks``.
        Raises AgentTaskError naming every sample that could not be made (unless they count as empty), WorkerLostError
        when no agent-loop worker or no replica is left.
        """
        tasks = list(_tasks_of(request, self._config))
        results: list[TaskResult | None] = [None] * len(tasks)
        waiting = deque(self._give(rows, tasks[rows.start : rows.stop]) for rows in _groups(tasks))
        while waiting:
            given = waiting.popleft()
            outcome = self._outcome(given)
            if outcome is None:
                waiting.append(self._give(given.rows, given.tasks))
            else:
                results[given.rows.start : given.rows.stop] = outcome
        return self._batch(request, tasks, [result for result in results if result is not None])

    # -- where the asynchronous modes ask for one prompt at a time -----------------------------------------------------

    def live(self) -> Mapping[str, Any]:
        """Return the workers that take prompts now, by name; each has ``sample``, as a rollout worker has."""
        return {worker.name: _Samples(self, worker) for worker in self._workers}

    def lost(self, name: str, error: WorkerLostError) -> None:
        """Hear that a worker has gone. Raises the error when none is left."""
        self._workers = [worker for worker in self._workers if worker.name != name]
        if not self._workers:
            raise error

    def served(self, name: str) -> None:
        """Do nothing: nobody counts a worker's tasks here."""

    def await_one(self) -> None:
        """Return at once: there is one as long as ``lost`` has not raised."""

    def add_replica(self, name: str, handle: Any) -> None:
        """Have all workers send requests to one more replica, or to one that came back."""
        wait_all([worker.add_replica.submit(name, handle) for worker in self._workers], timeout_s=CONTROL_S)

    def remove_replica(self, name: str) -> None:
        """Have no worker send further requests to a replica."""
        wait_all([worker.remove_replica.submit(name) for worker in self._workers], timeout_s=CONTROL_S)

    # -- inside --------------------------------------------------------------------------------------------------------

    def _give(self, rows: range, tasks: list[AgentTask]) -> _Given:
        worker = self._workers[self._turn % len(self._workers)]
        self._turn += 1
        return _Given(rows, tasks, worker, worker.run_group.submit(tasks), time.monotonic())

    def _outcome(self, given: _Given) -> list[TaskResult] | None:
        """Wait for a prompt's samples; None when their worker is gone and there are others."""
        bound_s = self._config.task_timeout_s * self._config.max_attempts + GRACE_S
        try:
            results: list[TaskResult] = given.future.result(max(given.given_s + bound_s - time.monotonic(), 0.001))
        except CallTimeoutError as error:
            given.future.cancel()
            names = ", ".join(task.name for task in given.tasks[:SHOWN])
            raise AgentTaskError(
                f"{len(given.tasks)} samples have no end after {bound_s:g} s ({self._config.max_attempts} attempts of "
                f"rollout.agent.task_timeout_s={self._config.task_timeout_s:g}, and {GRACE_S:g}): {names}. Worker "
                f"{given.worker.name} lives and does not answer: a loop that computes or waits without await holds up "
                "all others of its process"
            ) from error
        except (WorkerLostError, AgentLostError) as error:
            if given.worker in self._workers:
                self._workers.remove(given.worker)
            if not self._workers:
                raise
            log.warning("%s; its samples are made by others, %d are left", error, len(self._workers))
            return None
        return results

    def _batch(self, request: DataProto, tasks: Sequence[AgentTask], results: Sequence[TaskResult]) -> DataProto:
        failed = [(task, result) for task, result in zip(tasks, results, strict=True) if not result.outputs]
        if failed and self._config.on_failed_task == "raise":
            raise AgentTaskError(_story(failed, len(tasks), self._config.max_attempts))
        outputs = [result.outputs or [_nothing(task)] for task, result in zip(tasks, results, strict=True)]
        ids: Any = request.batch
        shape = RowShape(ids["input_ids"].shape[1], int(request.meta_info["response_length"]), self._pad_token_id)
        rows = rows_of(outputs, shape)
        versions = rows.non_tensor_batch["max_weight_version"].tolist()
        meta = {
            "weight_version": max(versions, default=-1),
            "num_failed_tasks": len(failed),
            "num_retried_tasks": sum(result.attempts > 1 for result in results),
        }
        return type(rows)(batch=rows.batch, non_tensor_batch=rows.non_tensor_batch, meta_info=meta)


class _Samples:
    """The method ``sample`` of one agent-loop worker, for batches."""

    def __init__(self, manager: AgentLoopManager, worker: Any) -> None:
        self._manager = manager
        self._worker = worker

    @property
    def sample(self) -> _Samples:
        """The method itself."""
        return self

    def submit(self, request: DataProto) -> _PendingRows:
        """Start the samples of a request; what it takes and gives is that of ``generate_sequences``."""
        tasks = list(_tasks_of(request, self._manager._config))
        return _PendingRows(self._manager, request, tasks, self._worker.run_group.submit(tasks))


class _PendingRows:
    """Rows on their way, as a Future: ``result`` makes a batch of what the worker tells."""

    def __init__(self, manager: AgentLoopManager, request: DataProto, tasks: Sequence[AgentTask], future: Any) -> None:
        self._manager = manager
        self._request = request
        self._tasks = tasks
        self._future = future

    def add_done_callback(self, callback: Callable[[Any], Any]) -> None:
        """Call ``callback(self)`` when the worker has answered or is gone."""
        self._future.add_done_callback(lambda _: callback(self))

    def cancel(self) -> bool:
        """Give the samples up."""
        return bool(self._future.cancel())

    def result(self, timeout_s: float | None = None) -> DataProto:
        """Return the rows; raises AgentTaskError for samples that were not made, or when none has a token."""
        results: list[TaskResult] = self._future.result(timeout_s)
        if not any(result.outputs for result in results):
            failed = list(zip(self._tasks, results, strict=True))
            raise AgentTaskError(_story(failed, len(failed), self._manager._config.max_attempts))
        return self._manager._batch(self._request, self._tasks, results)


def _tasks_of(request: DataProto, config: Agent) -> Iterator[AgentTask]:
    """Yield one task a row."""
    tensors: Any = request.batch
    columns, meta = request.non_tensor_batch, request.meta_info
    missing = [name for name in ("uid", "sample_index") if name not in columns]
    if missing:
        raise BatchError(f"agent loops need the non-tensor columns {', '.join(missing)}")
    defaults = SamplingSettings(
        bool(meta["do_sample"]), float(meta["temperature"]), int(meta["top_k"]), float(meta["top_p"])
    )
    passed_on = [name for name in columns if name not in ("uid", "sample_index", AGENT_NAME, SAMPLING_PARAMS)]
    for row in range(len(request)):
        uid = str(columns["uid"][row])
        given = columns[SAMPLING_PARAMS][row] if SAMPLING_PARAMS in columns else None
        name = columns[AGENT_NAME][row] if AGENT_NAME in columns else None
        yield AgentTask(
            uid=uid,
            sample_index=int(columns["sample_index"][row]),
            token_ids=tensors["input_ids"][row][tensors["attention_mask"][row].bool()].tolist(),
            loop=str(name or config.default_agent_loop),
            sampling=row_sampling(defaults, given, where=f"prompt {uid}"),
            max_response_length=int(meta["response_length"]),
            seed=int(meta["seed"]),
            step=int(meta["global_steps"]),
            validate=bool(meta.get("validate", False)),
            columns={name: columns[name][row] for name in passed_on},
        )


def _groups(tasks: Sequence[AgentTask]) -> Iterator[range]:
    """Yield the rows of each prompt: neighbours with the same uid."""
    start = 0
    for row in range(1, len(tasks) + 1):
        if row == len(tasks) or tasks[row].uid != tasks[start].uid:
            yield range(start, row)
            start = row


def _nothing(task: AgentTask) -> AgentLoopOutput:
    """Return the output of a sample that was not made: a response without a token."""
    return AgentLoopOutput(task.token_ids, [], [], [], [], num_turns=0, finish_reason="failed")


def _story(failed: Sequence[tuple[AgentTask, TaskResult]], total: int, attempts: int) -> str:
    told = "\n".join(f"- {task.name} ({task.loop}): {result.failure}" for task, result in failed[:SHOWN])
    others = ", ".join(task.name for task, _ in failed[SHOWN:])
    return (
        f"{len(failed)} of {total} samples of agent loops failed {attempts} times (rollout.agent.max_attempts):\n{told}"
        + (f"\n- and {others}" if others else "")
        + "\nfix: mend the loop; or set rollout.agent.on_failed_task=empty to count such samples as empty responses"
    )
