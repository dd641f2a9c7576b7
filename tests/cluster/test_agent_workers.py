"""Agent-loop workers as real processes: replicas and workers are killed, and no sample is missing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rpcrl import Controller, DataProto, ResourcePool, WorkerGroup
from rpcrl.agents import manager as agent_manager
from rpcrl.agents.manager import AgentLoopManager
from rpcrl.agents.tasks import AgentTask
from rpcrl.agents.worker import AgentLoopWorker
from rpcrl.config.agent import Agent
from rpcrl.engines.sampling_settings import SamplingSettings
from rpcrl.errors import AgentTaskError, WorkerLostError
from rpcrl.tasks.sort_digits import base_checkpoint
from rpcrl.testing.transport_harness import wait_until
from rpcrl.trainer import steps
from tests.cluster.agent_workers import CountingReplica

pytestmark = pytest.mark.cluster

LONE = ResourcePool([1], device=None)


def agent_worker(config: Agent, number: int = 0) -> WorkerGroup[Any]:
    model = {"model_path": str(base_checkpoint()), "max_prompt_length": 2, "max_response_length": 3}
    return WorkerGroup(LONE, AgentLoopWorker, config, number=number, **model)


def replicas_of(*groups: WorkerGroup[Any]) -> dict[str, Any]:
    return {f"replica-{number}": group.workers[0] for number, group in enumerate(groups)}


SAMPLING = steps.Sampling(n=2, do_sample=True, temperature=1.0, top_p=1.0, top_k=-1, response_length=3, seed=0)


def prompts(count: int) -> DataProto:
    ids, mask = torch.tensor([[7, 10]] * count), torch.ones(count, 2, dtype=torch.int64)
    return DataProto.from_dict(
        tensors={"input_ids": ids, "attention_mask": mask},
        non_tensors={"uid": [f"0-{row}" for row in range(count)], "raw_prompt": [""] * count},
    )


def test_requests_of_a_killed_replica_are_answered_by_another(ipc: Controller):
    config = Agent(default_agent_loop="single_turn_agent", max_attempts=1, task_timeout_s=100.0)
    first, second = WorkerGroup(LONE, CountingReplica, 1), WorkerGroup(LONE, CountingReplica, 2)
    worker = agent_worker(config)
    worker.connect(replicas_of(first, second), None)
    tasks = [
        AgentTask("p", index, [5, 10], "single_turn_agent", SamplingSettings(), 3, 0, 1, False, {"raw_prompt": ""})
        for index in range(6)
    ]
    running = worker.run_group.submit(tasks)
    wait_until(lambda: first.num_requests() == [3] and second.num_requests() == [3], "each replica has its half")
    with pytest.raises(WorkerLostError, match="SIGKILL"):
        first.die()
    wait_until(lambda: second.num_requests() == [6], "the other one is asked for what was lost")
    second.release()
    results = running.result(60)
    assert [list(result.outputs[0].response_ids) for result in results] == [[11, 12, 13]] * 6
    assert [list(result.outputs[0].response_versions) for result in results] == [[2, 2, 2]] * 6
    assert [result.attempts for result in results] == [1] * 6, "no task was begun anew"


def test_samples_of_a_killed_agent_worker_are_made_by_the_others(ipc: Controller, tmp_path: Path):
    marker = tmp_path / "killed"
    loop = "tests.cluster.agent_workers:EndsItself"
    config = Agent(default_agent_loop=loop, agent_loop_kwargs={"marker": str(marker)})
    replica = WorkerGroup(LONE, CountingReplica, 1)
    replica.release()
    workers = [agent_worker(config, number) for number in range(2)]
    for worker in workers:
        worker.connect(replicas_of(replica), None)
    manager = AgentLoopManager(workers, config, pad_token_id=0)
    count = 6
    batch = steps.generate(manager, prompts(count), SAMPLING, step=1)
    assert marker.exists(), "a process did end"
    assert batch.batch["responses"].tolist() == [[11, 12, 13]] * 12
    assert batch.non_tensor_batch["uid"].tolist() == [f"0-{row}" for row in range(count) for _ in range(2)]
    assert [exit.signal for exit in workers[1].close()] == ["SIGKILL"]
    assert len(manager.close()) == 2


def test_p11_a_loop_that_blocks_its_process_is_named_with_its_samples(ipc: Controller, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(agent_manager, "GRACE_S", 0.5)
    config = Agent(
        default_agent_loop="tests.cluster.agent_workers:Blocks", task_timeout_s=0.5, max_attempts=1
    )  # fmt: skip
    replica = WorkerGroup(LONE, CountingReplica, 1)
    worker = agent_worker(config)
    worker.connect(replicas_of(replica), None)
    with pytest.raises(AgentTaskError) as caught:
        steps.generate(AgentLoopManager([worker], config, pad_token_id=0), prompts(1), SAMPLING, step=1)
    told = str(caught.value)
    assert "2 samples have no end after 1 s" in told
    assert "sample 0 of prompt 0-0, sample 1 of prompt 0-0" in told
    assert f"{worker.name} lives and does not answer" in told
