"""Does one thread serve everybody, whatever happens to the engine?"""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import TimeoutError as FutureTimeoutError

import pytest
import torch

from rpcrl.engines.request_batches import NO_VERSION, batch_of, requests_of
from rpcrl.engines.serving import EngineServer
from rpcrl.engines.torch_rollout import TorchRolloutEngine
from rpcrl.errors import BatchError, ClosedError, UsageError
from rpcrl.tasks.sort_digits import base_checkpoint
from rpcrl.testing.engine_kit import make_prompts
from rpcrl.testing.request_kit import requests_like
from rpcrl.testing.tiny_model import write_tiny_llama

WAIT_S = 60.0


@pytest.fixture
def folder(tmp_path):
    return write_tiny_llama(tmp_path / "model", seed=0)


@pytest.fixture
def served(folder):
    engine = SteppedEngine(folder)
    server = EngineServer(engine)
    yield engine, server
    server.close()


class SteppedEngine(TorchRolloutEngine):
    """The engine, whose steps wait at a gate when a test closes it, and fail when it says so."""

    def __init__(self, folder):
        super().__init__(folder)
        self.gate = threading.Event()
        self.gate.set()
        self.stepping = threading.Event()
        self.error = None

    def step(self):
        self.stepping.set()
        assert self.gate.wait(WAIT_S)
        if self.error is not None:
            raise self.error
        return super().step()


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, WAIT_S))


async def reached(event):
    assert await asyncio.to_thread(event.wait, WAIT_S)


def expected(folder, prompts):
    output = TorchRolloutEngine(folder).generate(prompts)
    return [
        tokens[:length]
        for tokens, length in zip(
            output.batch["responses"].tolist(), output.batch["response_mask"].sum(-1).tolist(), strict=True
        )
    ]


async def all_of(server, prompts):
    return await asyncio.gather(*(server.generate(request) for request in requests_like(prompts)))


def test_requests_that_come_at_once_get_the_tokens_of_a_batch(folder, served):
    outputs = run(all_of(served[1], make_prompts()))
    assert [list(output.token_ids) for output in outputs] == expected(folder, make_prompts())


def test_a_paused_server_holds_requests_and_an_empty_engine_and_they_go_on(folder, served):
    engine, server = served

    async def main():
        engine.gate.clear()
        waiting = asyncio.ensure_future(all_of(server, make_prompts(length=8)))
        await reached(engine.stepping)
        pausing = asyncio.ensure_future(server.pause())
        await asyncio.sleep(0)
        engine.gate.set()
        held = await pausing
        assert held > 0
        assert engine.num_unfinished == 0
        late = asyncio.ensure_future(server.generate(requests_like(make_prompts(seed=5, groups=1, n=1))[0]))
        assert await server.abort(["nobody"]) == 0
        assert engine.num_unfinished == 0
        assert not waiting.done()
        assert not late.done()
        assert await server.resume() == held + 1
        return await waiting, await late

    outputs, late = run(main())
    assert [list(output.token_ids) for output in outputs] == expected(folder, make_prompts(length=8))
    assert list(late.token_ids) == expected(folder, make_prompts(seed=5, groups=1, n=1))[0]


def test_an_abort_ends_waiters_with_what_they_have_also_while_paused(served):
    engine, server = served

    async def main():
        engine.gate.clear()
        waiting = asyncio.ensure_future(all_of(server, make_prompts(length=8)))
        await reached(engine.stepping)
        pausing = asyncio.ensure_future(server.pause())
        await asyncio.sleep(0)
        engine.gate.set()
        held = await pausing
        assert await server.abort() == held
        return held, await waiting

    held, outputs = run(main())
    aborted = [output for output in outputs if output.finish_reason == "abort"]
    assert len(aborted) == held
    assert all(len(output.token_ids) == 1 for output in aborted)


def test_a_failed_step_reaches_every_waiter_and_later_requests_are_served(served):
    engine, server = served

    async def main():
        engine.error = RuntimeError("no memory for this step")
        failed = await asyncio.gather(
            *(server.generate(request) for request in requests_like(make_prompts())), return_exceptions=True
        )
        engine.error = None
        return failed, await all_of(server, make_prompts())

    failed, outputs = run(main())
    assert [str(error) for error in failed] == ["no memory for this step"] * 15
    assert all(output.finish_reason in ("stop", "length") for output in outputs)
    assert engine.num_unfinished == 0


def test_requests_that_cannot_be_sampled_are_refused_alone(served):
    _, server = served
    good, twin = requests_like(make_prompts(groups=1, n=2))

    async def main():
        return await asyncio.gather(
            server.generate(good),
            server.generate(good),
            server.generate(twin.resumed(twin_output())),
            return_exceptions=True,
        )

    def twin_output():
        from rpcrl.engines.requests import SampleOutput

        return SampleOutput(twin.request_id, (5,), (), (), "abort")

    first, again, unequal = run(main())
    assert first.finish_reason in ("stop", "length")
    assert isinstance(again, UsageError)
    assert "being sampled already" in str(again)
    assert isinstance(unequal, UsageError)
    assert "log-probs" in str(unequal)


def test_a_waiter_that_is_cancelled_leaves_the_engine(served):
    engine, server = served

    async def main():
        engine.gate.clear()
        task = asyncio.ensure_future(server.generate(requests_like(make_prompts(length=8))[0]))
        await reached(engine.stepping)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        engine.gate.set()

    run(main())
    assert server.run(lambda: engine.num_unfinished) == 0


def test_what_runs_alone_finds_an_empty_engine_between_two_steps(folder, served):
    engine, server = served

    async def main():
        engine.gate.clear()
        waiting = asyncio.ensure_future(all_of(server, make_prompts(length=8)))
        await reached(engine.stepping)
        alone = asyncio.ensure_future(asyncio.to_thread(server.run, look, alone=True))
        engine.gate.set()
        return await alone, await waiting

    def look():
        return engine.num_unfinished, threading.current_thread().name

    (count, thread), outputs = run(main())
    assert (count, thread) == (0, "rpcrl-engine")
    assert [list(output.token_ids) for output in outputs] == expected(folder, make_prompts(length=8))


def test_errors_of_what_is_run_are_the_callers(served):
    _, server = served

    def late():
        raise FutureTimeoutError("mine")

    with pytest.raises(TimeoutError, match="mine"):
        server.run(late)
    with pytest.raises(ZeroDivisionError):
        server.run(lambda: 1 // 0)


def test_p12_closing_ends_waiters_and_refuses_newcomers(served):
    engine, server = served

    async def main():
        engine.gate.clear()
        waiting = [asyncio.ensure_future(server.generate(request)) for request in requests_like(make_prompts())]
        await reached(engine.stepping)
        queued = server.submit(lambda: 1)
        closing = asyncio.ensure_future(asyncio.to_thread(server.close))
        while not server._closing:  # set by close before it waits for the step
            await asyncio.to_thread(lambda: None)
        engine.gate.set()
        await closing
        return await asyncio.gather(*waiting, return_exceptions=True), queued

    results, queued = run(main())
    assert any(isinstance(result, ClosedError) for result in results)
    with pytest.raises(ClosedError):
        queued.result(WAIT_S)
    with pytest.raises(ClosedError):
        server.run(lambda: 1)
    server.close()


def test_a_batch_made_of_requests_is_the_batch_of_generate(folder):
    engine = TorchRolloutEngine(folder)
    prompts = make_prompts()
    batch = engine.generate(prompts)
    requests = requests_of(prompts, iter(f"r{number}" for number in range(100)))
    engine.add(requests)
    outputs = {}
    while engine.num_unfinished:
        outputs.update({output.request_id: output for output in engine.step()})
    made = batch_of(prompts, [outputs[request.request_id] for request in requests], pad_token_id=engine._pad)
    for name in sorted(batch.batch.keys()):
        assert torch.allclose(made.batch[name].double(), batch.batch[name].double(), atol=1e-5), name
    assert list(made.non_tensor_batch["finish_reason"]) == list(batch.non_tensor_batch["finish_reason"])
    assert set(made.non_tensor_batch["max_weight_version"]) == {0}
    mask = made.batch["response_mask"].bool()
    assert (made.batch["weight_versions"][mask] == 0).all()
    assert (made.batch["weight_versions"][~mask] == NO_VERSION).all()


@pytest.mark.parametrize("missing", ["uid", "response_length"])
def test_rows_that_cannot_be_keyed_or_bounded_are_refused(missing):
    prompts = make_prompts()
    prompts.non_tensor_batch.pop(missing, None)
    prompts.meta_info.pop(missing, None)
    with pytest.raises(BatchError, match=missing):
        requests_of(prompts, iter(map(str, range(100))))


def test_the_rollout_role_samples_single_requests_beside_whole_batches():
    from rpcrl.config.run import ActorRolloutRef
    from rpcrl.roles.actor import ActorWorker
    from rpcrl.roles.rollout import RolloutWorker
    from tests.unit.roles.local_group import local_groups

    common = {"model_path": str(base_checkpoint()), "device": "cpu", "threads": 1}
    config = ActorRolloutRef()
    classes = {
        "actor": (ActorWorker, (config,), {**common, "seed": 0}),
        "rollout": (RolloutWorker, (config,), common),
    }
    prompts = make_prompts(groups=2, n=2)

    async def main(worker):
        paused = await worker.pause_generation()
        sampling = asyncio.ensure_future(worker.sample(prompts))
        assert await worker.resume_generation() in (0, 4)
        whole = await sampling
        one = await worker.generate_one(requests_like(prompts)[0])
        assert await worker.abort_requests() == 0
        return paused, whole, one

    with local_groups(classes) as groups:
        worker = groups["rollout"].role
        groups["rollout"].update_weights(3)
        batch = groups["rollout"].generate_sequences(prompts)
        paused, whole, one = run(main(worker))
        again = groups["rollout"].generate_sequences(prompts)
        assert groups["rollout"].update_weights(4) == [4]
        assert groups["rollout"].sleep() != [0]
        worker._server().close()
    assert paused == 0
    assert torch.equal(whole.batch["responses"], batch.batch["responses"])
    assert torch.equal(again.batch["responses"], batch.batch["responses"])
    assert list(one.token_ids) == batch.batch["responses"][0][batch.batch["response_mask"][0].bool()].tolist()
    assert set(whole.non_tensor_batch["min_weight_version"]) == {3}
