"""Does a rollout engine keep the promises of ``rpcrl.engines.base``?

``ROLLOUT_CHECKS`` maps names to checks over a ``RolloutHarness``; a failed promise raises ``ContractError``. The
training side is ``rpcrl.testing.train_kit``.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rpcrl.batch.data_proto import DataProto
from rpcrl.engines.base import RolloutEngine, TrainEngine
from rpcrl.errors import RpcrlError
from rpcrl.testing.engine_reference import Reference, columns_of, rows_of

__all__ = ["ROLLOUT_CHECKS", "ContractError", "RolloutHarness", "make_prompts", "require"]

LOG_PROB_TOLERANCE = 1e-5
RESPONSE_LENGTH = 6


class ContractError(AssertionError):
    """An engine broke a promise of its interface."""


def require(holds: bool, promise: str) -> None:
    """Raise ContractError with the broken promise unless it ``holds``."""
    if not holds:
        raise ContractError(promise)


@contextlib.contextmanager
def refuses(*words: str) -> Iterator[None]:
    """Require that the body raises an error of rpcrl whose text has all ``words``."""
    try:
        yield
    except RpcrlError as error:
        for word in words:
            require(word in str(error), f"the error should mention {word!r}: {error}")
    else:
        raise ContractError(f"an error that mentions {', '.join(words)} should have been raised")


@dataclass(frozen=True)
class RolloutHarness:
    """How to make the engine under test. Folders are of ``write_tiny_llama``."""

    folder: Path
    other: Path
    """The same architecture with other weights."""
    make: Callable[[Path], RolloutEngine]
    """Return an engine that is awake and has the folder's weights, version 0."""
    make_trainer: Callable[[Path], TrainEngine]
    failing_allocation: Callable[[RolloutEngine], contextlib.AbstractContextManager[object]]
    """While active, ``wake_up(["weights"])`` runs out of memory half-way."""
    stop: frozenset[int]
    tolerance: float = LOG_PROB_TOLERANCE
    """Largest difference of a float32 log-prob from the exact one."""
    resumes_noise: bool = True
    """Whether a request that was aborted and resumed draws what it would have drawn; else only greedy ones go on so."""
    frees_memory: bool = True
    """Whether sleeping gives memory back on this device; where it does not, ``sleep`` returns 0."""


def make_prompts(
    groups: int = 5, n: int = 3, *, columns: int = 6, length: int = RESPONSE_LENGTH, seed: int = 0, **meta: Any
) -> DataProto:
    """Return ``groups`` left-padded prompts of 2 to ``columns`` tokens, each ``n`` times with sample_index 0 … n−1."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 16, (groups, columns), generator=generator)
    real = torch.randint(2, columns + 1, (groups,), generator=generator)
    mask = (torch.arange(columns) >= (columns - real).unsqueeze(1)).long()
    uids = np.array([f"prompt-{seed}-{row // n}" for row in range(groups * n)], dtype=object)
    indices = np.array([row % n for row in range(groups * n)], dtype=object)
    return DataProto.from_dict(
        tensors={
            "input_ids": (ids * mask).repeat_interleave(n, 0),
            "attention_mask": mask.repeat_interleave(n, 0),
        },
        non_tensors={"uid": uids, "sample_index": indices},
        meta_info={"response_length": length, "seed": 7, "global_steps": 3, **meta},
    )


def with_meta(prompts: DataProto, **meta: Any) -> DataProto:
    """Return the prompts with other meta_info."""
    changed = prompts.slice(0, len(prompts))
    changed.meta_info = {**prompts.meta_info, **meta}
    return changed


def sampled(output: DataProto) -> dict[tuple[str, int], list[int]]:
    """Return each row's real response tokens by (uid, sample_index)."""
    names = zip(output.non_tensor_batch["uid"], output.non_tensor_batch["sample_index"], strict=True)
    rows = (row.response for row in rows_of(output))
    return {(str(uid), int(index)): tokens for (uid, index), tokens in zip(names, rows, strict=True)}


def named_weights(folder: Path) -> list[tuple[str, Tensor]]:
    """Return a folder's parameters by Hugging Face name."""
    return [(name, tensor.float()) for name, tensor in Reference(folder).parameters().items()]


def check_columns(harness: RolloutHarness) -> None:
    """Shapes, dtypes, masks, padding, positions, reasons and version are as promised; the prompts stay unchanged."""
    engine = harness.make(harness.folder)
    prompts = make_prompts()
    before = {name: columns_of(prompts)[name].clone() for name in ("input_ids", "attention_mask")}
    output = engine.generate(prompts)
    columns, n, p, r = columns_of(output), len(prompts), before["input_ids"].shape[1], RESPONSE_LENGTH
    shapes = {"prompts": p, "responses": r, "response_mask": r, "rollout_log_probs": r}
    shapes |= dict.fromkeys(("input_ids", "attention_mask", "position_ids"), p + r)
    for name, width in shapes.items():
        require(tuple(columns[name].shape) == (n, width), f"{name} is {tuple(columns[name].shape)}, not {(n, width)}")
    require(columns["rollout_log_probs"].dtype is torch.float32, "rollout_log_probs are float32")
    mask = columns["response_mask"].bool()
    require(torch.equal(columns["prompts"], before["input_ids"]), "prompts come back as they were")
    require(torch.equal(columns["input_ids"], torch.cat([columns["prompts"], columns["responses"]], 1)), "input_ids")
    whole = torch.cat([before["attention_mask"], columns["response_mask"].long()], 1)
    require(torch.equal(columns["attention_mask"].long(), whole), "attention_mask = prompt mask + response mask")
    expected = (whole.cumsum(1) - 1).clamp(min=0)
    require(torch.equal(columns["position_ids"][whole.bool()], expected[whole.bool()]), "positions count real tokens")
    require(bool((columns["rollout_log_probs"][~mask] == 0).all()), "log-probs of padding are 0")
    require(bool((columns["rollout_log_probs"][mask] <= 0).all()), "log-probs are not positive")
    for row, reason in zip(rows_of(output), output.non_tensor_batch["finish_reason"], strict=True):
        stops = [token in harness.stop for token in row.response]
        require(not any(stops[:-1]), "nothing follows a stop token")
        require(reason == ("stop" if stops[-1] else "length"), f"finish_reason {reason} of {row.response}")
        require(stops[-1] or len(row.response) == r, "a response ends by a stop token or at its full length")
    reasons = set(output.non_tensor_batch["finish_reason"])
    require(reasons == {"stop", "length"}, f"the test must see both reasons, it saw {reasons}")
    require(output.meta_info["weight_version"] == engine.weight_version == 0, "weight_version is 0 at first")
    for name, tensor in before.items():
        require(torch.equal(columns_of(prompts)[name], tensor), f"the caller's {name} is unchanged")


def check_keyed_noise(harness: RolloutHarness) -> None:
    """Tokens depend on (seed, step, uid, sample, position) only: not on order, batch, padding or the engine."""
    engine = harness.make(harness.folder)
    prompts = make_prompts(groups=6, n=4)
    expected = sampled(engine.generate(prompts))
    order = torch.randperm(len(prompts), generator=torch.Generator().manual_seed(1)).tolist()
    require(sampled(engine.generate(prompts[order])) == expected, "the order of rows does not matter")
    again: dict[tuple[str, int], list[int]] = {}
    for start in range(0, len(prompts), 5):
        again |= sampled(harness.make(harness.folder).generate(prompts[order[start : start + 5]]))
    require(again == expected, "neither the split into batches nor the engine matters")
    one = {key: tokens for i in range(6) for key, tokens in sampled(engine.generate(prompts[i : i + 1])).items()}
    require(all(expected[key] == tokens for key, tokens in one.items()), "a row alone gives the same tokens")
    wide = DataProto.from_dict(
        tensors={
            name: torch.nn.functional.pad(columns_of(prompts)[name], (3, 0)) for name in ("input_ids", "attention_mask")
        },
        non_tensors=dict(prompts.non_tensor_batch),
        meta_info=dict(prompts.meta_info),
    )
    require(sampled(engine.generate(wide)) == expected, "more padding does not matter")
    samples = [tokens for (uid, _), tokens in expected.items() if uid.endswith("-0")]
    require(any(tokens != samples[0] for tokens in samples), "samples of one prompt differ")
    for meta in ({"seed": 8}, {"global_steps": 4}):
        require(sampled(engine.generate(with_meta(prompts, **meta))) != expected, f"{meta} changes the noise")


def check_distribution(harness: RolloutHarness) -> None:
    """First tokens come with the frequencies of softmax(logits / temperature)."""
    engine = harness.make(harness.folder)
    count, temperature = 2000, 1.3
    output = engine.generate(make_prompts(groups=1, n=count, length=1, temperature=temperature))
    row = rows_of(output)[0]
    expected = torch.softmax(Reference(harness.folder).logits(row.prompt)[-1].detach() / temperature, -1)
    seen = torch.bincount(columns_of(output)["responses"][:, 0], minlength=expected.shape[0]).double() / count
    deviation = ((seen - expected).abs() / (expected * (1 - expected) / count).sqrt().clamp(min=1e-4)).max()
    require(float(deviation) < 5.0, f"a token's frequency is {float(deviation):.1f} standard deviations off")


def check_log_probs(harness: RolloutHarness) -> None:
    """Reported log-probs equal the trainer's and the float64 reference's."""
    engine, trainer = harness.make(harness.folder), harness.make_trainer(harness.folder)
    reference = Reference(harness.folder)
    for temperature in (1.0, 0.7):
        output = engine.generate(make_prompts(temperature=temperature))
        mask = columns_of(output)["response_mask"].bool()
        ours = columns_of(output)["rollout_log_probs"]
        trained, entropy = trainer.compute_log_prob(output, micro_batch_size=4)
        gap = float((trained - ours)[mask].abs().max())
        require(gap < harness.tolerance, f"trainer and sampler differ by {gap} at temperature {temperature}")
        require(bool((trained[~mask] == 0).all()) and bool((entropy[~mask] == 0).all()), "padding scores 0")
        for index, row in enumerate(rows_of(output)):
            exact = reference.log_probs(row, temperature).detach()
            gap = float((ours[index][mask[index]].double() - exact).abs().max())
            require(gap < harness.tolerance, f"sampler and reference differ by {gap} at temperature {temperature}")


def check_filters(harness: RolloutHarness) -> None:
    """top_k and top_p keep the right tokens, and log-probs are of what is left."""
    engine, reference = harness.make(harness.folder), Reference(harness.folder)
    for meta in ({"top_k": 3}, {"top_p": 0.6}, {"top_k": 4, "top_p": 0.8, "temperature": 1.5}):
        output = engine.generate(make_prompts(groups=3, n=40, length=1, **meta))
        for index, row in enumerate(rows_of(output)):
            logits = reference.logits(row.prompt)[-1].detach() / float(meta.get("temperature", 1.0))
            allowed = _allowed(logits, int(meta.get("top_k", -1)), float(meta.get("top_p", 1.0)))
            token = row.response[0]
            require(token in allowed, f"{meta} must not sample {token}, only {sorted(allowed)}")
            kept = torch.tensor(sorted(allowed))
            exact = logits[token] - torch.logsumexp(logits[kept], 0)
            gap = abs(float(columns_of(output)["rollout_log_probs"][index, 0]) - float(exact))
            require(gap < harness.tolerance, f"with {meta} the log-prob is {gap} off the renormalised one")


def _allowed(logits: Tensor, top_k: int, top_p: float) -> set[int]:
    ranked = sorted(range(len(logits)), key=lambda token: -float(logits[token]))
    ranked = ranked[:top_k] if top_k > 0 else ranked
    weights = [math.exp(float(logits[token])) for token in ranked]
    kept: set[int] = set()
    reached = 0.0
    for token, weight in zip(ranked, weights, strict=True):
        if kept and reached >= top_p:
            break
        kept.add(token)
        reached += weight / sum(weights)
    return kept


def check_greedy(harness: RolloutHarness) -> None:
    """Without sampling each token is the likeliest, whatever seed, temperature and filters say."""
    engine, reference = harness.make(harness.folder), Reference(harness.folder)
    prompts = make_prompts(groups=6, n=1, do_sample=False)
    output = engine.generate(prompts)
    for row in rows_of(output):
        expected = reference.greedy(row.prompt, RESPONSE_LENGTH, harness.stop)
        require(row.response == expected, f"greedy gave {row.response}, not {expected}")
    other = engine.generate(with_meta(prompts, seed=99, temperature=0.0, top_k=2))
    require(sampled(other) == sampled(output), "greedy decoding does not look at seed, temperature or filters")


def check_sleep(harness: RolloutHarness) -> None:
    """Sleeping frees what it says, refuses to sample, and an update brings everything back."""
    engine = harness.make(harness.folder)
    prompts, weights = make_prompts(), named_weights(harness.folder)
    expected = sampled(engine.generate(prompts))
    require(engine.awake == {"weights", "kv_cache"}, "a new engine is awake")
    freed = engine.sleep(["weights"])
    size = sum(tensor.nbytes for _, tensor in weights)
    if harness.frees_memory:
        require(freed >= size, f"sleep freed {freed} bytes, the weights have {size}")
    else:
        require(freed == 0, f"sleep frees nothing on this device and says that it freed {freed} bytes")
    require(engine.awake == {"kv_cache"}, "only the weights sleep")
    require(engine.sleep(["weights"]) == 0, "sleeping twice frees nothing more")
    with refuses("asleep", "wake_up"):
        engine.generate(prompts)
    with refuses("asleep", "wake_up"):
        engine.update_weights([weights], version=1)
    require((engine.sleep() > 0) == harness.frees_memory and not engine.awake, "the rest sleeps too, and is freed")
    engine.wake_up(["weights"])
    with refuses("update_weights"):
        engine.wake_up(["kv_cache"])
        engine.generate(prompts)
    engine.update_weights([weights], version=1)
    output = engine.generate(prompts)
    require(sampled(output) == expected, "after sleep, wake and update the tokens are the same")
    require(output.meta_info["weight_version"] == engine.weight_version == 1, "the version is the update's")
    with refuses("weight"):
        engine.sleep(["weight"])


def check_failed_wake(harness: RolloutHarness) -> None:
    """A wake-up that runs out of memory leaves the engine asleep, and a later one works."""
    engine = harness.make(harness.folder)
    prompts = make_prompts()
    expected = sampled(engine.generate(prompts))
    slept = engine.sleep()
    with harness.failing_allocation(engine):
        try:
            engine.wake_up()
        except (MemoryError, RuntimeError):
            pass
        else:
            raise ContractError("the harness's allocation failure must reach the caller")
    require(not engine.awake, f"after a failed wake-up nothing is awake, not {sorted(engine.awake)}")
    with refuses("asleep"):
        engine.generate(prompts)
    engine.wake_up()
    engine.update_weights([named_weights(harness.folder)], version=2)
    require(sampled(engine.generate(prompts)) == expected, "the engine works again after a failed wake-up")
    require(engine.sleep() == slept, "a failed wake-up leaks nothing")


def check_update(harness: RolloutHarness) -> None:
    """New weights take effect in place, in buckets of any size, from lists and from streams."""
    engine = harness.make(harness.folder)
    prompts, weights = make_prompts(), named_weights(harness.other)
    first, fresh = sampled(engine.generate(prompts)), sampled(harness.make(harness.other).generate(prompts))
    require(first != fresh, "the two sets of weights must sample differently for this check to mean anything")
    engine.update_weights(([pair] for pair in weights), version=4)
    require(engine.weight_version == 4, "the version is the update's")
    require(sampled(engine.generate(prompts)) == fresh, "an updated engine samples like a new one with those weights")
    trainer = harness.make_trainer(harness.folder)
    engine.update_weights(trainer.weights(bucket_bytes=1000), version=5)
    require(sampled(engine.generate(prompts)) == first, "a trainer's weights arrive under the names it gives them")


def check_refused_updates(harness: RolloutHarness) -> None:
    """Wrong names and shapes are refused by name; nothing changes, or nothing is sampled until all is well."""
    engine = harness.make(harness.folder)
    prompts, weights = make_prompts(), named_weights(harness.other)
    before = sampled(engine.generate(prompts))
    (name, tensor), *rest = weights
    for wrong, word in (
        ([(f"{name}.x", tensor), *rest], f"{name}.x"),
        ([*rest, (name, tensor[:-1])], name),
        (rest, name),
    ):
        with refuses(word):
            engine.update_weights([wrong], version=9)
        require(engine.weight_version == 0, "a refused update carries no version")
        require(sampled(engine.generate(prompts)) == before, "a refused update changes nothing")
    with refuses(name):
        engine.update_weights(([pair] for pair in rest), version=9)
    with refuses("update_weights"):
        engine.generate(prompts)
    engine.update_weights([weights], version=2)
    require(sampled(engine.generate(prompts)) != before, "a complete update mends it")


def check_refused_prompts(harness: RolloutHarness) -> None:
    """Prompts without noise keys, without a response length, padded on the right or too long are refused."""
    engine = harness.make(harness.folder)
    prompts = make_prompts()
    without = DataProto.from_dict(tensors=dict(columns_of(prompts).items()), meta_info=dict(prompts.meta_info))
    with refuses("uid", "sample_index"):
        engine.generate(without)
    no_length = prompts.slice(0, len(prompts))
    no_length.meta_info = {"seed": 1}
    with refuses("response_length"):
        engine.generate(no_length)
    with refuses("data.max_response_length"):
        engine.generate(with_meta(prompts, response_length=10_000))
    flipped = DataProto.from_dict(
        tensors={name: columns_of(prompts)[name].flip(1) for name in ("input_ids", "attention_mask")},
        non_tensors=dict(prompts.non_tensor_batch),
        meta_info=dict(prompts.meta_info),
    )
    with refuses("left-padded"):
        engine.generate(flipped)


ROLLOUT_CHECKS: dict[str, Callable[[RolloutHarness], None]] = {
    check.__name__.removeprefix("check_"): check
    for check in (
        check_columns,
        check_keyed_noise,
        check_distribution,
        check_log_probs,
        check_filters,
        check_greedy,
        check_sleep,
        check_failed_wake,
        check_update,
        check_refused_updates,
        check_refused_prompts,
    )
}
