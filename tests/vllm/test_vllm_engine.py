"""Does the engine on vLLM keep the promises of rollout engines? One engine for the module, as a worker has one."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from rpcrl import env
from rpcrl.engines import vllm_weights
from rpcrl.engines.base import RolloutEngine
from rpcrl.engines.canary import canary_tokens, check_canary
from rpcrl.engines.fsdp import FsdpEngine
from rpcrl.engines.requests import SampleOutput
from rpcrl.engines.serving import EngineServer
from rpcrl.errors import UsageError, WeightSyncError
from rpcrl.testing.engine_kit import ROLLOUT_CHECKS, RolloutHarness, make_prompts, named_weights
from rpcrl.testing.engine_reference import Reference
from rpcrl.testing.request_kit import REQUEST_CHECKS, finished, requests_like
from rpcrl.testing.tiny_model import STOP_IDS, write_tiny_llama

pytestmark = pytest.mark.vllm

SHAPE = {"head_dim": 32, "max_position_embeddings": 512}
"""vLLM has attention kernels for CPUs from this head size on; prefixes are kept by blocks of 128 tokens."""


@contextlib.contextmanager
def second_part_fails(engine: RolloutEngine) -> Iterator[None]:
    take, taken = engine._take, []

    def limited(tag: str) -> None:
        taken.append(tag)
        if len(taken) > 1:
            raise MemoryError("no memory left (injected)")
        take(tag)

    engine._take = limited
    yield
    del engine._take


@pytest.fixture(scope="module", params=["tied", "untied"])
def harness(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RolloutHarness]:
    from rpcrl.engines.vllm_rollout import VllmRolloutEngine
    from rpcrl.engines.vllm_start import VllmSettings

    root = tmp_path_factory.mktemp(request.param)
    tied = request.param == "tied"
    folder = write_tiny_llama(root / "a", seed=0, tied=tied, **SHAPE)
    random.seed(5)
    np.random.seed(5)
    torch.manual_seed(5)
    before = (env.snapshot(), random.random(), np.random.rand(), torch.rand(1).item(), torch.set_num_threads)
    random.seed(5)
    np.random.seed(5)
    torch.manual_seed(5)
    engine = VllmRolloutEngine(folder, load_weights=False, settings=VllmSettings(kv_cache_bytes=16 << 20))
    after = (env.snapshot(), random.random(), np.random.rand(), torch.rand(1).item(), torch.set_num_threads)
    engine.seen_by_the_test = (before, after)

    def make(weights: Path) -> RolloutEngine:
        engine.abort()
        engine.wake_up()
        engine.update_weights([named_weights(weights)], version=0)
        return engine

    yield RolloutHarness(
        folder=folder,
        other=write_tiny_llama(root / "b", seed=1, tied=tied, **SHAPE),
        make=make,
        make_trainer=FsdpEngine,
        failing_allocation=second_part_fails,
        stop=frozenset(STOP_IDS),
        tolerance=1e-4,
        resumes_noise=False,
        frees_memory=False,
    )
    engine.close()


@pytest.mark.parametrize("name", ROLLOUT_CHECKS)
def test_rollout_engine_vllm(name: str, harness: RolloutHarness) -> None:
    ROLLOUT_CHECKS[name](harness)


@pytest.mark.parametrize("name", REQUEST_CHECKS)
def test_requests_of_vllm(name: str, harness: RolloutHarness) -> None:
    REQUEST_CHECKS[name](harness)


def test_the_start_leaves_the_process_as_it_was(harness: RolloutHarness) -> None:
    (variables, *generators), (variables_after, *generators_after) = harness.make(harness.folder).seen_by_the_test
    changed = {name for name in {*variables, *variables_after} if variables.get(name) != variables_after.get(name)}
    allowed = {"DO_NOT_TRACK", "HF_HUB_OFFLINE", "TORCHDYNAMO_DISABLE"}
    assert {name for name in changed if not name.startswith("VLLM_")} <= allowed
    assert generators == generators_after


def test_a_second_engine_in_the_process_is_refused(harness: RolloutHarness) -> None:
    from rpcrl.engines.vllm_rollout import VllmRolloutEngine

    with pytest.raises(UsageError, match="has a vLLM engine already"):
        VllmRolloutEngine(harness.folder)


def test_weights_come_through_a_buffer_that_is_used_again(harness: RolloutHarness) -> None:
    """A bucket's memory is overwritten by the next one: what vLLM still holds of it must have been copied."""
    engine = harness.make(harness.folder)
    weights = named_weights(harness.other)
    buffer = torch.empty(max(tensor.numel() for _, tensor in weights))

    def buckets() -> Iterator[list[tuple[str, torch.Tensor]]]:
        for name, tensor in weights:
            view = buffer[: tensor.numel()].view(tensor.shape)
            view.copy_(tensor)
            yield [(name, view)]
            buffer.fill_(float("nan"))

    engine.update_weights(buckets(), version=1)
    ids = [3, 5, 7, 9, 11, 13, 4, 6]
    assert engine.score(ids) == pytest.approx(exact_scores(harness.other, ids), abs=1e-4)


def test_an_update_that_breaks_off_is_mended_by_the_next(harness: RolloutHarness) -> None:
    engine = harness.make(harness.folder)
    weights = named_weights(harness.other)

    def broken() -> Iterator[list[tuple[str, torch.Tensor]]]:
        for pair in weights[: len(weights) // 2]:
            yield [pair]
        raise ConnectionError("the sender is gone")

    with pytest.raises(ConnectionError, match="the sender is gone"):
        engine.update_weights(broken(), version=5)
    assert engine.weight_version == 0
    with pytest.raises(UsageError, match="an update broke off; call update_weights"):
        engine.generate(make_prompts())
    engine.update_weights([weights], version=6)
    ids = [3, 5, 7, 9, 11, 13, 4, 6]
    assert engine.score(ids) == pytest.approx(exact_scores(harness.other, ids), abs=1e-4)


def test_a_batch_leaves_requests_in_flight_alone(harness: RolloutHarness) -> None:
    engine = harness.make(harness.folder)
    requests = requests_like(make_prompts(length=8))
    engine.add(requests)
    expected = finished(engine)
    engine.add(requests)
    done = engine.step()
    engine.generate(make_prompts(length=12))
    ended = finished(engine, [*done, *engine.step()])
    assert {name: output.token_ids for name, output in ended.items()} == {
        name: output.token_ids for name, output in expected.items()
    }


def test_p90_no_prefix_of_old_weights_serves_new_ones(harness: RolloutHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two blocks of a long prompt are kept; after an update they are computed again, in a request's course too."""
    engine = harness.make(harness.folder)
    ids = [3 + (7 * place) % 21 for place in range(300)]
    request = replace(requests_like(make_prompts(1, 1, do_sample=False))[0], prompt_ids=ids)

    def first_log_prob(name: str) -> float:
        engine.add([replace(request, request_id=name)])
        return float(finished(engine)[name].log_probs[0])

    def exact(folder: Path) -> float:
        return float(torch.log_softmax(Reference(folder).logits(ids).detach()[-1], -1).max())

    assert (
        first_log_prob("computed") == first_log_prob("from the cache") == pytest.approx(exact(harness.folder), abs=1e-4)
    )
    engine.update_weights([named_weights(harness.other)], version=1)
    assert first_log_prob("new") == pytest.approx(exact(harness.other), abs=1e-4)
    with monkeypatch.context() as without_reset:
        without_reset.setattr(engine, "reset_caches", lambda: None)
        engine.update_weights([named_weights(harness.folder)], version=2)
    assert abs(first_log_prob("stale") - exact(harness.folder)) > 1e-2, "this test sees a cache that was kept"


def test_p90_a_reset_that_does_not_happen_is_an_error(harness: RolloutHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = harness.make(harness.folder)
    with monkeypatch.context() as broken:
        broken.setattr(engine._llm, "reset_prefix_cache", lambda **_: False)
        with pytest.raises(UsageError, match="did not reset its prefix cache"):
            engine.update_weights([named_weights(harness.other)], version=1)
    with pytest.raises(UsageError, match="call update_weights"):
        engine.generate(make_prompts())


def test_the_canary_sees_an_output_layer_that_kept_its_weights(
    harness: RolloutHarness, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """With tied weights vLLM's own reload leaves the packed output layer as it was."""
    if "untied" in request.node.name:
        pytest.skip("an output layer of its own is reloaded by vLLM itself")
    engine = harness.make(harness.folder)
    tokens = canary_tokens(engine)
    expected = exact_scores(harness.other, tokens)
    with monkeypatch.context() as without_remedy:
        without_remedy.setattr(vllm_weights, "_pack_tied_output", lambda model: None)
        engine.update_weights([named_weights(harness.other)], version=1)
    with pytest.raises(WeightSyncError, match="refuses to sample"):
        check_canary(engine, tokens, expected, version=1, exact=True)
    with pytest.raises(UsageError, match="canary of the last weight sync"):
        engine.generate(make_prompts())
    engine.update_weights([named_weights(harness.other)], version=2)
    check_canary(engine, tokens, expected, version=2, exact=True)
    engine.generate(make_prompts())


def test_the_engine_is_stepped_by_a_thread_of_its_own(harness: RolloutHarness) -> None:
    engine = harness.make(harness.folder)
    requests = requests_like(make_prompts())
    engine.add(requests)
    expected = {name: output.token_ids for name, output in finished(engine).items()}
    server = EngineServer(engine)

    async def ask() -> list[SampleOutput]:
        return await asyncio.gather(*(server.generate(request) for request in requests))

    try:
        outputs = asyncio.run(ask())
    finally:
        server.close()
    assert {output.request_id: output.token_ids for output in outputs} == expected


def test_ids_outside_of_the_vocabulary_are_refused(harness: RolloutHarness) -> None:
    engine = harness.make(harness.folder)
    with pytest.raises(UsageError, match="outside of the model's 24"):
        engine.add([replace(requests_like(make_prompts(1, 1))[0], prompt_ids=[3, 24])])
    engine.add(requests_like(make_prompts(1, 1)))
    with pytest.raises(UsageError, match="1 requests are in flight; abort them first"):
        engine.sleep()


def exact_scores(folder: Path, ids: list[int]) -> list[float]:
    logs = torch.log_softmax(Reference(folder).logits(ids).detach(), -1)
    return [float(logs[place, token]) for place, token in enumerate(ids[1:])]
