"""Requests that outlive aborts and lost replicas, over replicas that a test controls (no language model)."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from rpcrl.agents.balancer import Balancer
from rpcrl.agents.llm import Llm, LlmClient
from rpcrl.engines.requests import SampleRequest
from rpcrl.engines.sampling_settings import SamplingSettings
from rpcrl.errors import UsageError, WorkerExit, WorkerLostError
from tests.unit.agents.byte_llm import FakeReplica

LOSS = WorkerLostError(
    (WorkerExit("rollout-0", "rollout", 0, ("rollout",), "h", 5, None, "SIGKILL", 1, False, (), "log"),),
    during="rollout.generate_one",
)


def within(work: Coroutine[Any, Any, Any], timeout_s: float = 30.0) -> Any:
    return asyncio.run(asyncio.wait_for(work, timeout_s))


async def client_of(**replicas: FakeReplica) -> LlmClient:
    client = LlmClient(Balancer(), name="test")
    for name, replica in replicas.items():
        await client.add_replica(name, replica)
    return client


def request(length: int = 5, **changes: Any) -> SampleRequest:
    return SampleRequest(**{"request_id": "", "prompt_ids": [10], "max_new_tokens": length, **changes})


def test_an_aborted_request_goes_on_with_its_tokens_and_their_versions():
    async def work() -> None:
        replica = FakeReplica(abort_after=2)
        client = await client_of(a=replica)
        output = await client.generate(request(5), conversation="talk")
        assert list(output.token_ids) == [11, 12, 13, 14, 15]
        assert list(output.versions) == [0, 0, 1, 1, 2], "each token keeps the version that sampled it"
        assert output.finish_reason == "length"
        assert [list(seen.prior_ids) for seen in replica.requests] == [[], [11, 12], [11, 12, 13, 14]]
        assert len({seen.request_id for seen in replica.requests}) == 3, "each go has an id of its own"
        assert (client.num_resumed, client.num_reissued) == (2, 0)
        assert client.balancer.in_flight("a") == 0

    within(work())


def test_requests_of_a_lost_replica_are_asked_for_again_on_another_with_what_they_had():
    async def work() -> None:
        first, second = FakeReplica(), FakeReplica(version=7)
        client = await client_of(a=first, b=second)
        first.loss = LOSS
        outputs = await asyncio.gather(*(client.generate(request(3, prior_ids=[11], prior_log_probs=[-1.0],
                                         prior_versions=[4])) for _ in range(4)))  # fmt: skip
        assert all(list(output.token_ids) == [11, 12, 13] for output in outputs)
        assert all(list(output.versions) == [4, 7, 7] for output in outputs)
        assert len(first.requests) == 2
        assert client.num_reissued == 2
        assert client.balancer.replicas == ("b",)
        assert client.balancer.num_leaving == 0

    within(work())


def test_without_a_replica_the_loss_is_told_or_one_is_waited_for():
    async def work() -> None:
        dead = FakeReplica()
        dead.loss = LOSS
        client = await client_of(a=dead)
        with pytest.raises(WorkerLostError, match="SIGKILL"):
            await client.generate(request())
        patient = LlmClient(Balancer(), name="patient", wait_for_replica_s=60.0)
        waiting = asyncio.create_task(patient.generate(request(2)))
        await asyncio.sleep(0)
        await patient.add_replica("a", FakeReplica())
        assert list((await waiting).token_ids) == [11, 12]
        nobody = LlmClient(Balancer(), name="nobody", wait_for_replica_s=0.01)
        with pytest.raises(UsageError, match=r"none was added within 0.01 s"):
            await nobody.generate(request())

    within(work())


def test_a_replica_that_comes_back_is_not_charged_with_old_requests():
    async def work() -> None:
        old, new = FakeReplica(), FakeReplica()
        old.hold = asyncio.Event()
        client = await client_of(a=old)
        hanging = asyncio.create_task(client.generate(request(2)))
        await old.arrived.wait()
        await client.remove_replica("a")
        await client.add_replica("a", new)
        assert client.balancer.in_flight("a") == 0
        old.loss = LOSS
        old.hold.set()
        assert list((await hanging).token_ids) == [11, 12], "asked for again, at the new one"
        assert len(new.requests) == 1
        assert client.balancer.replicas == ("a",), "the late loss has not removed the new one"

    within(work())


def test_a_cancelled_request_is_given_up_and_no_longer_counted():
    async def work() -> None:
        replica = FakeReplica()
        replica.hold = asyncio.Event()
        client = await client_of(a=replica)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await client.generate(request())
        assert replica.cancelled == 1
        assert client.balancer.in_flight("a") == 0

    within(work())


def test_a_sample_talks_to_one_replica_and_each_of_its_calls_has_noise_of_its_own():
    async def work() -> None:
        replicas = {"a": FakeReplica(), "b": FakeReplica()}
        client = await client_of(**replicas)
        settings = SamplingSettings(temperature=0.7)
        common: dict[str, Any] = {"seed": 3, "step": 5, "sampling": settings, "max_response_length": 4}
        one, two = (Llm(client, uid="p", sample_index=index, **common) for index in (0, 1))
        await asyncio.gather(one.generate([1]), two.generate([1]))
        await one.generate([1, 2, 3], max_new_tokens=1, stop_ids=[9])
        await one.generate([7], sampling=SamplingSettings(do_sample=False), conversation="judge")
        seen = replicas["a"].requests
        assert [(r.uid, r.sample_index, r.seed, r.step, r.max_new_tokens) for r in seen[:2]] == [
            ("p", 0, 3, 5, 4),
            ("p#1", 0, 3, 5, 1),
        ]
        assert list(seen[1].stop_ids) == [9]
        assert seen[0].sampling == settings
        assert [r.sample_index for r in replicas["b"].requests] == [1], "the other sample went to the idle one"
        assert one.num_calls == 3
        one.close()
        two.close()
        assert client.balancer.num_conversations == 1, "judge is a talk of the loop's own"
        for bad in ({"prompt_ids": []}, {"prompt_ids": [1], "max_new_tokens": 0}):
            with pytest.raises(UsageError, match="needs a prompt and room"):
                await one.generate(**bad)

    within(work())
