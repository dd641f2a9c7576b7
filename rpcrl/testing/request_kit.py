"""Does a rollout engine sample single requests as ``rpcrl.engines.base`` promises?

``REQUEST_CHECKS`` maps names to checks over the ``RolloutHarness`` of the engine kit. The engine's own batch path,
which ``ROLLOUT_CHECKS`` holds against the reference, says what the tokens are; here is checked that they do not depend
on who comes and goes meanwhile, and that every token keeps the version and log-prob of the weights that sampled it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch

from rpcrl.batch.data_proto import DataProto
from rpcrl.engines.base import RolloutEngine
from rpcrl.engines.requests import SampleOutput, SampleRequest
from rpcrl.engines.sampling import SamplingSettings
from rpcrl.testing.engine_kit import (
    RolloutHarness,
    make_prompts,
    named_weights,
    refuses,
    require,
)
from rpcrl.testing.engine_reference import Reference, Row, columns_of, rows_of

__all__ = ["REQUEST_CHECKS", "requests_like"]

MOST_STEPS = 1000
"""Steps after which an engine that has not ended its requests never will."""


def requests_like(prompts: DataProto) -> list[SampleRequest]:
    """Return one request per row, which asks for what ``generate`` would sample."""
    meta, columns = prompts.meta_info, columns_of(prompts)
    settings = SamplingSettings(
        bool(meta.get("do_sample", True)), float(meta.get("temperature", 1.0)), int(meta.get("top_k", -1))
    )
    return [
        SampleRequest(
            request_id=f"{uid}/{index}",
            prompt_ids=columns["input_ids"][row][columns["attention_mask"][row].bool()].tolist(),
            max_new_tokens=int(meta["response_length"]),
            sampling=settings,
            seed=int(meta["seed"]),
            step=int(meta["global_steps"]),
            uid=str(uid),
            sample_index=int(index),
        )
        for row, (uid, index) in enumerate(
            zip(prompts.non_tensor_batch["uid"], prompts.non_tensor_batch["sample_index"], strict=True)
        )
    ]


def finished(engine: RolloutEngine, outputs: Sequence[SampleOutput] = ()) -> dict[str, SampleOutput]:
    """Step until nothing is left; returns all outputs by request id."""
    found = {output.request_id: output for output in outputs}
    for _ in range(MOST_STEPS):
        if not engine.num_unfinished:
            return found
        for output in engine.step():
            require(output.request_id not in found, f"{output.request_id} ends once")
            found[output.request_id] = output
    raise AssertionError(f"{engine.num_unfinished} requests have not ended after {MOST_STEPS} steps")


def tokens_of(outputs: Mapping[str, SampleOutput]) -> dict[str, list[int]]:
    """Return the tokens of each output."""
    return {name: list(output.token_ids) for name, output in outputs.items()}


def resumable_prompts(harness: RolloutHarness, groups: int, n: int) -> DataProto:
    """Return prompts whose responses are the same whether or not they are interrupted."""
    return make_prompts(groups, n) if harness.resumes_noise else make_prompts(groups, n, do_sample=False)


def batch_tokens(engine: RolloutEngine, prompts: DataProto) -> dict[str, list[int]]:
    """Return what ``generate`` samples, by request id."""
    output = engine.generate(prompts)
    names = [request.request_id for request in requests_like(prompts)]
    return {name: row.response for name, row in zip(names, rows_of(output), strict=True)}


def check_equal_the_batch(harness: RolloutHarness) -> None:
    """Requests give the tokens, log-probs and reasons that the same rows have in ``generate``."""
    engine = harness.make(harness.folder)
    for meta in ({}, {"temperature": 0.7, "top_k": 5}, {"do_sample": False}):
        prompts = make_prompts(**meta)
        batch, requests = engine.generate(prompts), requests_like(prompts)
        engine.add(requests)
        require(engine.num_unfinished == len(requests), "added requests are unfinished")
        outputs = finished(engine)
        require(set(outputs) == {request.request_id for request in requests}, "every request ends")
        rows = zip(requests, rows_of(batch), batch.non_tensor_batch["finish_reason"], strict=True)
        for index, (request, row, reason) in enumerate(rows):
            output = outputs[request.request_id]
            require(list(output.token_ids) == row.response, f"tokens with {meta}: {output} is not {row.response}")
            require(output.finish_reason == reason, f"finish_reason {output.finish_reason} is not {reason}")
            require(list(output.versions) == [0] * len(row.response), "each token has the version")
            expected = columns_of(batch)["rollout_log_probs"][index, : len(row.response)]
            gap = float((torch.tensor(list(output.log_probs)) - expected).abs().max())
            require(gap < harness.tolerance, f"log-probs with {meta} are {gap} off")


def check_arrivals(harness: RolloutHarness) -> None:
    """Who comes between two steps changes nobody's tokens."""
    engine = harness.make(harness.folder)
    prompts = make_prompts(groups=6, n=3)
    expected, requests = batch_tokens(engine, prompts), requests_like(prompts)
    outputs: list[SampleOutput] = []
    for start in (0, 1, 2, 7, 13):
        engine.add(requests[start : {0: 1, 1: 2, 2: 7, 7: 13, 13: 18}[start]])
        outputs += engine.step()
    require(tokens_of(finished(engine, outputs)) == expected, "arrivals between steps change no tokens")


def check_settings(harness: RolloutHarness) -> None:
    """Requests of other settings, lengths and stop ids run side by side."""
    engine = harness.make(harness.folder)
    prompts = make_prompts(groups=2, n=2)
    cold = make_prompts(groups=2, n=2, do_sample=False)
    expected, greedy = batch_tokens(engine, prompts), batch_tokens(engine, cold)
    warm_requests = requests_like(prompts)
    cold_requests = [replace(request, request_id=f"greedy {request.request_id}") for request in requests_like(cold)]
    long = max(expected, key=lambda name: len(expected[name]))
    require(len(expected[long]) > 2, "the check needs a response of 3 tokens or more")
    short = replace(
        next(request for request in warm_requests if request.request_id == long), request_id="short", max_new_tokens=2
    )
    stopped = replace(short, request_id="stopped", max_new_tokens=6, stop_ids=(expected[long][1],))
    engine.add([*warm_requests, *cold_requests, short, stopped])
    outputs = finished(engine)
    for name, tokens in {**expected, **{f"greedy {name}": tokens for name, tokens in greedy.items()}}.items():
        require(list(outputs[name].token_ids) == tokens, f"{name} beside others gave {outputs[name]}, not {tokens}")
    require(list(outputs["short"].token_ids) == expected[long][:2], "max_new_tokens ends a response")
    require(outputs["short"].finish_reason == "length", "a response that is cut off ends by its length")
    first = expected[long].index(expected[long][1])
    require(list(outputs["stopped"].token_ids) == expected[long][: first + 1], "a stop id of the request ends it")
    require(outputs["stopped"].finish_reason == "stop", "a response that a stop id ends has stopped")


def check_abort(harness: RolloutHarness) -> None:
    """An aborted request gives what it has; ``resumed``, it ends as if nothing had happened, on any engine."""
    engine = harness.make(harness.folder)
    prompts = resumable_prompts(harness, groups=5, n=2)
    expected, requests = batch_tokens(engine, prompts), requests_like(prompts)
    engine.add(requests)
    done = [output for _ in range(2) for output in engine.step()]
    require(engine.abort(["nobody"]) == [], "unknown ids are ignored")
    one = engine.abort([next(name for name in expected if name not in {output.request_id for output in done})])
    require(len(one) == 1 and one[0].finish_reason == "abort", "a named request is aborted")
    aborted = {output.request_id: output for output in [*one, *engine.abort()]}
    require(engine.num_unfinished == 0 and engine.step() == [], "nothing is left after an abort of all")
    require({*aborted, *(output.request_id for output in done)} == set(expected), "each request has one end")
    for name, output in aborted.items():
        prior = list(output.token_ids)
        require(prior == expected[name][: len(prior)], "an aborted request keeps its tokens")
        require(len(output.log_probs) == len(output.versions) == len(prior), "each token has log-prob and version")
    other = harness.make(harness.folder)
    other.add([request.resumed(aborted[request.request_id]) for request in requests if request.request_id in aborted])
    outputs = finished(other, done)
    require(tokens_of(outputs) == expected, "resumed requests end with the same tokens")
    for name, output in aborted.items():
        count = len(output.token_ids)
        kept = list(outputs[name].log_probs[:count]) == list(output.log_probs)
        require(kept, "tokens from before an abort keep their log-probs")


def check_new_weights(harness: RolloutHarness) -> None:
    """Weights change between two steps: later tokens are of the new ones, computed anew, and say so."""
    engine = harness.make(harness.folder)
    old, new = Reference(harness.folder), Reference(harness.other)
    requests = requests_like(make_prompts(groups=6, n=2, length=8))
    engine.add(requests)
    done = [output for _ in range(3) for output in engine.step()]
    engine.update_weights([named_weights(harness.other)], version=5)
    outputs = finished(engine, done)
    mixed = 0
    for request in requests:
        output = outputs[request.request_id]
        versions = list(output.versions)
        require(sorted(versions) == versions and set(versions) <= {0, 5}, f"versions are 0, then 5, not {versions}")
        row, before = Row(list(request.prompt_ids), list(output.token_ids)), versions.count(0)
        mixed += 0 < before < len(versions)
        exact = torch.cat([old.log_probs(row)[:before], new.log_probs(row)[before:]]).detach()
        gap = float((torch.tensor(list(output.log_probs)).double() - exact).abs().max())
        require(gap < harness.tolerance, f"a log-prob is {gap} off that of its token's version: kept keys and values?")
    require(mixed > 0, "the check must see a response of two versions")


def check_sleep_between_steps(harness: RolloutHarness) -> None:
    """Requests outlast a sleep: a step then is refused, and later they end as they would have."""
    engine = harness.make(harness.folder)
    prompts = resumable_prompts(harness, groups=5, n=3)
    expected = batch_tokens(engine, prompts)
    engine.add(requests_like(prompts))
    done = engine.step()
    # as whoever takes the memory does: the requests leave the engine, with what they have, and come back
    waiting = {request.request_id: request for request in requests_like(prompts)}
    back = [waiting[output.request_id].resumed(output) for output in engine.abort()]
    engine.sleep()
    with refuses("asleep", "wake_up"):
        engine.add(back)
        engine.step()
    engine.wake_up()
    engine.update_weights([named_weights(harness.folder)], version=1)
    if engine.num_unfinished == 0:  # an engine may refuse them already when they are added
        engine.add(back)
    require(tokens_of(finished(engine, done)) == expected, "after sleep and wake-up the requests go on")
    engine.add(requests_like(prompts))
    engine.step()
    engine.reset_caches()
    again = finished(engine)
    require(all(len(output.token_ids) for output in again.values()), "requests go on after reset_caches")


def check_refused_requests(harness: RolloutHarness) -> None:
    """Requests that cannot be sampled are refused by name, and none of those that came with them is taken."""
    engine = harness.make(harness.folder)
    good = requests_like(make_prompts(groups=1, n=1))[0]
    begun = replace(good, request_id="x", prior_ids=(5, 6), prior_log_probs=(-0.5, -0.5), prior_versions=(0, 0))
    for wrong, word in (
        (good, "being sampled already"),
        (replace(good, request_id="x", prompt_ids=()), "prompt"),
        (replace(good, request_id="x", max_new_tokens=0), "max_new_tokens"),
        (replace(good, request_id="x", max_new_tokens=10_000), "data.max_response_length"),
        (replace(begun, prior_log_probs=(-0.5,)), "log-prob"),
        (replace(begun, max_new_tokens=2), "nothing is left"),
        (replace(begun, prior_ids=(5, min(harness.stop))), "stop token"),
    ):
        with refuses(word):
            engine.add([good, wrong])
        require(engine.num_unfinished == 0, f"with a refused request ({word}) none is taken")


REQUEST_CHECKS: dict[str, Callable[[RolloutHarness], None]] = {
    check.__name__.removeprefix("check_"): check
    for check in (
        check_equal_the_batch,
        check_arrivals,
        check_settings,
        check_abort,
        check_new_weights,
        check_sleep_between_steps,
        check_refused_requests,
    )
}
