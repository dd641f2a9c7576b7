"""Samples handed out to workers, and made one batch: rows, groups, failures, ends of workers (no processes here)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from rpcrl.agents.loop import NO_VERSION, AgentLoopOutput
from rpcrl.agents.manager import AgentLoopManager
from rpcrl.agents.rows import RowShape, rows_of
from rpcrl.agents.tasks import AgentTask, TaskResult
from rpcrl.batch.data_proto import DataProto
from rpcrl.config.agent import Agent
from rpcrl.errors import AgentTaskError, BatchError, CallTimeoutError, WorkerLostError
from rpcrl.trainer import steps
from rpcrl.trainer.group_sampler import GroupSampler
from rpcrl.trainer.prompt_queue import PromptQueue
from rpcrl.trainer.replay_buffer import ReplayBuffer
from tests.unit.agents.test_llm import LOSS

P, R, PAD = 4, 6, 0


def output(response: Sequence[int], mask: Sequence[int] | None = None, **changes: Any) -> AgentLoopOutput:
    mask = [1] * len(response) if mask is None else mask
    values: dict[str, Any] = {
        "prompt_ids": [7, 8],
        "response_ids": response,
        "response_mask": mask,
        "response_logprobs": [-0.25 * bit for bit in mask],
        "response_versions": [5 if bit else NO_VERSION for bit in mask],
    }
    return AgentLoopOutput(**{**values, **changes})


class Answer:
    """What a submitted call gives."""

    def __init__(self, value: Any) -> None:
        self.value = value
        self.cancelled = False

    def add_done_callback(self, callback: Any) -> None:
        callback(self)

    def result(self, timeout_s: float) -> Any:
        assert 0 < timeout_s < 3_600
        if isinstance(self.value, Exception):
            raise self.value
        return self.value

    def cancel(self) -> None:
        self.cancelled = True


class FakeWorker:
    """A group of one agent-loop worker; ``make(task)`` is its result, or an error ends it."""

    name = "agent_loop_0"

    def __init__(self, make: Any) -> None:
        self.make = make
        self.groups: list[list[AgentTask]] = []
        self.run_group = self

    def submit(self, tasks: list[AgentTask]) -> Answer:
        self.groups.append(tasks)
        if isinstance(self.make, Exception):
            return Answer(self.make)
        return Answer([self.make(task) for task in tasks])


def plain(task: AgentTask) -> TaskResult:
    return TaskResult([output([task.sample_index + 1] * 2, prompt_ids=task.token_ids)])


def manager(*makes: Any, **settings: Any) -> tuple[AgentLoopManager, list[FakeWorker]]:
    workers = [FakeWorker(make) for make in makes]
    config = Agent(default_agent_loop="single_turn_agent", **settings)
    return AgentLoopManager(workers, config, pad_token_id=PAD), workers


def prompts(count: int = 3, **columns: Any) -> DataProto:
    ids = torch.tensor([[PAD, PAD, 7, row] for row in range(count)])
    mask = torch.tensor([[0, 0, 1, 1]] * count)
    uids = [f"0-{row}" for row in range(count)]
    others = {"raw_prompt": [f"7 {row}" for row in range(count)], "ground_truth": ["1"] * count}
    return DataProto.from_dict(
        tensors={"input_ids": ids, "attention_mask": mask}, non_tensors={"uid": uids, **others, **columns}
    )


def sampling(n: int = 2) -> steps.Sampling:
    return steps.Sampling(n=n, do_sample=True, temperature=0.5, top_p=1.0, top_k=-1, response_length=R, seed=3)


def test_rows_have_the_columns_of_an_engine_and_masks_of_their_own():
    rows = rows_of(
        [[output([11, 12, 900, 13], [1, 1, 0, 1])], [output([21], prompt_ids=[1, 2, 3, 4])]], RowShape(P, R, PAD)
    )
    tensors = {name: rows.batch[name].tolist() for name in rows.batch.keys()}  # noqa: SIM118
    assert tensors["prompts"] == [[0, 0, 7, 8], [1, 2, 3, 4]]
    assert tensors["responses"] == [[11, 12, 900, 13, 0, 0], [21, 0, 0, 0, 0, 0]]
    assert tensors["response_mask"] == [[1, 1, 0, 1, 0, 0], [1, 0, 0, 0, 0, 0]]
    assert tensors["attention_mask"] == [[0, 0, 1, 1, 1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 0, 0, 0, 0, 0]]
    assert tensors["input_ids"][0] == [0, 0, 7, 8, 11, 12, 900, 13, 0, 0]
    assert tensors["position_ids"] == [[0, 0, 0, 1, 2, 3, 4, 5, 6, 7], [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]]
    assert tensors["rollout_log_probs"][0] == [-0.25, -0.25, 0.0, -0.25, 0.0, 0.0]
    assert tensors["weight_versions"][0] == [5, 5, -1, 5, -1, -1]
    assert rows.non_tensor_batch["min_weight_version"].tolist() == [5, 5]
    assert rows.non_tensor_batch["finish_reason"].tolist() == ["stop", "stop"]


def test_scores_and_fields_that_only_some_rows_have_are_refused():
    shape = RowShape(P, R, PAD)
    with pytest.raises(BatchError, match="1 of 2 outputs of agent loops have a reward_score"):
        rows_of([[output([1], reward_score=1.0)], [output([1])]], shape)
    with pytest.raises(BatchError, match="1 of 2 outputs of agent loops lack the extra field 'tool'"):
        rows_of([[output([1], extra_fields={"tool": 3})], [output([1])]], shape)
    with pytest.raises(BatchError, match="the extra field 'uid', which is a column of rpcrl's own"):
        rows_of([[output([1], extra_fields={"uid": "p"})]], shape)
    failed = output([], num_turns=0, finish_reason="failed")
    rows = rows_of([[output([1], reward_score=1.0, extra_fields={"tool": 3})], [failed]], shape)
    assert rows.non_tensor_batch["reward_score"].tolist() == [1.0, 0.0]
    assert rows.non_tensor_batch["tool"].tolist() == [3, None]


def test_the_step_gives_a_prompts_samples_to_one_worker_with_all_columns():
    made, workers = manager(plain, plain)
    batch = steps.generate(made, prompts(sampling_params=[None, {"temperature": 2.0}, None]), sampling(), step=9)
    assert [[(task.uid, task.sample_index) for task in group] for group in workers[0].groups] == [
        [("0-0", 0), ("0-0", 1)],
        [("0-2", 0), ("0-2", 1)],
    ]
    [[first, _]] = workers[1].groups
    assert (first.token_ids, first.seed, first.step, first.validate) == ([7, 1], 3, 9, False)
    assert (first.sampling.temperature, workers[0].groups[0][0].sampling.temperature) == (2.0, 0.5)
    assert first.columns == {"raw_prompt": "7 1", "ground_truth": "1"}
    assert first.max_response_length == R
    assert batch.non_tensor_batch["uid"].tolist() == ["0-0", "0-0", "0-1", "0-1", "0-2", "0-2"]
    assert batch.non_tensor_batch["sample_index"].tolist() == [0, 1] * 3
    assert batch.batch["responses"][:, 0].tolist() == [1, 2] * 3
    assert batch.meta_info == {"weight_version": 5, "temperature": 0.5}
    again = steps.generate(made, prompts(), sampling(), step=9, validate=True)
    assert workers[1].groups[-1][0].validate
    assert "request_row" not in again.non_tensor_batch


def test_another_loop_for_a_row():
    made, workers = manager(plain)
    steps.generate(made, prompts(agent_name=[None, "mine.py:Loop", None]), sampling(1), step=1)
    assert [group[0].loop for group in workers[0].groups] == ["single_turn_agent", "mine.py:Loop", "single_turn_agent"]


def test_several_outputs_of_a_sample_are_rows_of_its_group():
    def make(task: AgentTask) -> TaskResult:
        return TaskResult([output([number + 1]) for number in range(1 + (task.uid == "0-1"))])

    batch = steps.generate(manager(make)[0], prompts(), sampling(), step=1)
    columns = {name: values.tolist() for name, values in batch.non_tensor_batch.items()}
    assert columns["uid"] == ["0-0", "0-0", "0-1", "0-1", "0-1", "0-1", "0-2", "0-2"]
    assert columns["sample_index"] == [0, 1, 0, 0, 1, 1, 0, 1]
    assert columns["output_index"] == [0, 0, 0, 1, 0, 1, 0, 0]
    assert columns["ground_truth"] == ["1"] * 8


def fails(task: AgentTask) -> TaskResult:
    if task.uid == "0-1" and task.sample_index == 1:
        return TaskResult((), "KeyError: 'no such tool'", attempts=2)
    return plain(task)


def test_samples_that_failed_end_the_step_by_name_or_count_as_empty():
    with pytest.raises(AgentTaskError) as caught:
        steps.generate(manager(fails)[0], prompts(), sampling(), step=1)
    told = str(caught.value)
    assert "1 of 6 samples of agent loops failed 2 times" in told
    assert "sample 1 of prompt 0-1 (single_turn_agent): KeyError: 'no such tool'" in told
    batch = steps.generate(manager(fails, on_failed_task="empty")[0], prompts(), sampling(), step=1)
    assert len(batch) == 6, "never fewer rows"
    assert batch.non_tensor_batch["finish_reason"].tolist() == ["stop", "stop", "stop", "failed", "stop", "stop"]
    assert batch.batch["response_mask"].sum(-1).tolist() == [2, 2, 2, 0, 2, 2]


def test_the_prompts_of_a_worker_that_ended_go_to_the_others():
    made, workers = manager(LOSS, plain, plain)
    batch = steps.generate(made, prompts(), sampling(), step=1)
    assert len(batch) == 6
    assert [len(worker.groups) for worker in workers] == [1, 1, 2]
    steps.generate(made, prompts(), sampling(), step=2)
    assert len(workers[0].groups) == 1, "it gets nothing more"
    with pytest.raises(WorkerLostError, match="SIGKILL"):
        steps.generate(manager(LOSS, LOSS)[0], prompts(), sampling(), step=1)


def test_p11_a_worker_that_never_answers_is_named_with_its_samples():
    made, _ = manager(CallTimeoutError("no reply"), task_timeout_s=2.0, max_attempts=3)
    with pytest.raises(AgentTaskError) as caught:
        steps.generate(made, prompts(), sampling(), step=1)
    told = str(caught.value)
    assert "2 samples have no end after 36 s (3 attempts of rollout.agent.task_timeout_s=2, and 30)" in told
    assert "sample 0 of prompt 0-0, sample 1 of prompt 0-0" in told
    assert "agent_loop_0 lives and does not answer" in told


def test_a_request_without_names_is_refused():
    request = prompts().select(non_tensor_batch_keys=["raw_prompt"])
    with pytest.raises(BatchError, match="need the non-tensor columns uid, sample_index"):
        manager(plain)[0].generate_sequences(
            DataProto(request.batch, request.non_tensor_batch, {**sampling().meta_info(1)})
        )


# -- as the asynchronous modes use it


def group_sampler(made: AgentLoopManager, *, most_failures: int = 8) -> tuple[GroupSampler, ReplayBuffer]:
    class Loader:
        given = 0

        def next_batch(self) -> DataProto:
            self.given += 1
            batch = prompts(1, data_source=["task"])
            batch.non_tensor_batch["uid"][:] = [f"0-{self.given - 1}"]
            return batch

    buffer = ReplayBuffer(max_staleness=1, strategy="wait")
    sampler = GroupSampler(
        made, PromptQueue(Loader()), buffer, sampling(), task_timeout_s=60.0, most_failures=most_failures
    )  # fmt: skip
    return sampler, buffer


def take(sampler: GroupSampler, count: int, limit: int) -> dict[str, list[Any]]:
    batch = sampler.take(count, version=5, later=0, limit=limit)
    return {name: values.tolist() for name, values in batch.non_tensor_batch.items()}


def test_prompts_in_flight_are_made_by_agent_loops_with_all_columns():
    def make(task: AgentTask) -> TaskResult:
        assert task.columns["ground_truth"] == "1"
        return TaskResult([output([number + 1]) for number in range(1 + (task.uid == "0-1"))])

    made, workers = manager(make, make)
    for number, worker in enumerate(workers):
        worker.name = f"agent_loop_{number}"
    sampler, _ = group_sampler(made)
    columns = take(sampler, 2, 2)
    assert columns["uid"] == ["0-0", "0-0", "0-1", "0-1", "0-1", "0-1"]
    assert columns["output_index"] == [0, 0, 0, 1, 0, 1]
    assert columns["ground_truth"] == ["1"] * 6


def test_a_group_that_failed_is_dropped_and_another_prompt_takes_its_place():
    sampler, buffer = group_sampler(manager(fails)[0])
    assert list(dict.fromkeys(take(sampler, 2, 3)["uid"])) == ["0-0", "0-2"]
    assert buffer.dropped == {("failed", "task"): 1}
    with pytest.raises(AgentTaskError, match="1 of 2 samples"):
        group_sampler(manager(fails)[0], most_failures=1)[0].take(2, version=5, later=0, limit=3)


def test_a_group_without_a_token_is_none_also_where_failures_count_as_empty():
    def nothing(task: AgentTask) -> TaskResult:
        return TaskResult((), "KeyError: 'no such tool'", attempts=2) if task.uid == "0-0" else fails(task)

    sampler, buffer = group_sampler(manager(nothing, on_failed_task="empty")[0])
    columns = take(sampler, 2, 3)
    assert columns["uid"] == ["0-1", "0-1", "0-2", "0-2"]
    assert columns["finish_reason"] == ["stop", "failed", "stop", "stop"]
    assert columns["min_weight_version"] == [5, 5, 5, 5], "the empty one is as new as the others"
    assert buffer.dropped == {("failed", "task"): 1}


def test_prompts_in_flight_at_a_worker_that_ended_go_to_the_others():
    made, workers = manager(LOSS, plain)
    workers[0].name, workers[1].name = "agent_loop_0", "agent_loop_1"
    sampler, _ = group_sampler(made)
    assert list(dict.fromkeys(take(sampler, 3, 3)["uid"])) == ["0-0", "0-1", "0-2"]
    assert list(made.live()) == ["agent_loop_1"]
    with pytest.raises(WorkerLostError, match="SIGKILL"):
        group_sampler(manager(LOSS)[0])[0].take(1, version=5, later=0, limit=1)
