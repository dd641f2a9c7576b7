"""Do training engines make the same update on one, two and four ranks as a float64 process?

The ranks of a world are started once, run every scenario of the kit, and the checks read their reports.
"""

from __future__ import annotations

import json
import os
import time
import weakref
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rpcrl.algorithms.actor_loss import ActorLoss
from rpcrl.engines import sharding
from rpcrl.engines.fsdp import FsdpEngine
from rpcrl.engines.shards import SavedRank, read_rows
from rpcrl.engines.torch_rollout import TorchRolloutEngine
from rpcrl.errors import CheckpointError
from rpcrl.testing.engine_kit import make_prompts, sampled
from rpcrl.testing.train_kit import TRAIN_CHECKS, WorldReport, _batch, train_report, write_case

LIMIT_S = 200.0
"""For the ranks of a world to end, on a busy machine too: each imports torch and transformers first."""
LAYERWISE = ("untied-layerwise", "untied-layerwise-packed-checkpointed")
SETTINGS: dict[str, dict[str, object]] = {
    "tied": {},
    "tied-packed-checkpointed": {"packed": True, "checkpoint_activations": True},
    "untied-layerwise": {},
    "untied-layerwise-packed-checkpointed": {"packed": True, "checkpoint_activations": True},
    "tied-ddp": {"strategy": "ddp"},
    "untied-ddp-packed": {"strategy": "ddp", "packed": True},
}
CASES_OF_WORLD = {
    1: ["tied", "tied-packed-checkpointed"],
    2: ["tied", "untied-layerwise", "untied-layerwise-packed-checkpointed", "tied-ddp", "untied-ddp-packed"],
    4: ["tied", "tied-ddp"],
}


class Reductions(TorchDispatchMode):
    """Counts the reductions of torch.distributed (reduce-scatter of gradients, all-reduce of norm and metrics)."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.namespace == "c10d" and "reduce" in str(func)
        return func(*args, **(kwargs or {}))


def count_reductions(case: Path, rank: int, world: int, settings: dict[str, object]) -> dict[str, int]:
    counts = {}
    for micro in (1, 2, 100):
        engine = FsdpEngine(case / "model", **settings)
        with Reductions() as seen:
            engine.train_mini_batch(_batch(case, 0, rank, world), ActorLoss(), micro_batch_size=micro, lr=1e-3)
        counts[str(micro)] = seen.count
    return counts


def work(rank: int, world: int, store: str, cases: dict[str, tuple[str, str]]) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    try:
        for name, (case, out) in cases.items():
            sharding.SHARD_LAYERS_ABOVE = 0 if name in LAYERWISE else 50_000_000
            make = partial(FsdpEngine, **SETTINGS[name])
            train_report(make, Path(case), Path(out), rank=rank, world=world)
            (Path(out) / f"extra-{rank}.json").write_text(json.dumps(extras(Path(case), rank, world, SETTINGS[name])))
    finally:
        dist.destroy_process_group()
    # As rpcrl's workers end: taking an interpreter with torch's threads apart can abort after the work is done.
    os._exit(0)


def extras(case: Path, rank: int, world: int, settings: dict[str, object]) -> dict[str, object]:
    engine = FsdpEngine(case / "model", **settings)
    rollout = TorchRolloutEngine(case / "model", load_weights=False)
    rollout.update_weights(engine.weights(bucket_bytes=5000), version=1)
    return {
        "sampled": sampled_rows(rollout),
        "reductions": count_reductions(case, rank, world, settings),
        "peak": weights_peak(engine),
        "sent": {size: sent_as_whole(engine, size) for size in (256, 1000, 5000, 1 << 20)},
        "bfloat16": in_bfloat16(case, rank, world, settings),
        "sharded": {name: list(part.shape) for name, part in engine._locals.items()},
    }


def sent_as_whole(engine: FsdpEngine, bucket_bytes: int) -> dict[str, object]:
    """Put together what this rank would send, and compare it with the whole weights."""
    parts: dict[str, list[torch.Tensor]] = {}
    for bucket in engine.sent_weights(bucket_bytes=bucket_bytes):
        for name, tensor in bucket:
            parts.setdefault(name, []).append(tensor.clone())
    whole = {name: tensor for bucket in engine.weights(bucket_bytes=1 << 20) for name, tensor in bucket}
    equal = {
        name: torch.equal(torch.cat(found) if len(found) > 1 else found[0], whole[name])
        for name, found in parts.items()
    }
    return {
        "equal": all(equal.values()),
        "in_order": list(parts) == list(whole),
        "num_tensors": len(parts),
        "most_parts": max(map(len, parts.values()), default=0),
    }


class Live(TorchDispatchMode):
    """Follows the bytes of tensors that are made while it is active, and their most at a time.

    A storage counts for what it holds now: a collective's thread may keep the object of one that was given back.
    """

    def __init__(self, before: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.peak_bytes = 0
        self._before = {tensor.untyped_storage().data_ptr() for tensor in before}
        self._storages: list[weakref.ref[torch.UntypedStorage]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if type(tensor) is torch.Tensor and tensor.untyped_storage().data_ptr() not in self._before:
                self._storages.append(weakref.ref(tensor.untyped_storage()))
        held = {storage.data_ptr(): storage.nbytes() for ref in self._storages if (storage := ref()) is not None}
        self.peak_bytes = max(self.peak_bytes, sum(size for pointer, size in held.items() if pointer))
        return out


def weights_peak(engine: FsdpEngine) -> dict[str, int]:
    """Measure a pass over the weights while everything that went through a collective stays referenced.

    gloo's thread keeps some of it for a while, on a busy machine for long: the peak may not depend on that.
    """
    largest = 0
    held: list[object] = []
    all_gather = dist.all_gather

    def holding(tensor_list: list[torch.Tensor], tensor: torch.Tensor) -> None:
        held.append((tensor_list, tensor))
        all_gather(tensor_list, tensor)

    with Live(engine._locals.values()) as live, pytest.MonkeyPatch.context() as patched:
        patched.setattr(dist, "all_gather", holding)
        for bucket in engine.weights(bucket_bytes=4000):
            largest = max(largest, sum(tensor.nbytes for _, tensor in bucket))
            del bucket
    model = sum(p.numel() * p.element_size() for p in engine._model.parameters())
    return {"peak_bytes": live.peak_bytes, "largest_bucket_bytes": largest, "model_bytes": model}


class ReducedIn(TorchDispatchMode):
    """Notes the number types of gradients that are added up over the ranks; figures go as float64."""

    def __init__(self) -> None:
        super().__init__()
        self.types: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d" and "reduce" in str(func):
            found = {str(t.dtype).removeprefix("torch.") for t in tree_leaves(args) if isinstance(t, torch.Tensor)}
            self.types |= found - {"float64", "int64"}
        return func(*args, **(kwargs or {}))


def in_bfloat16(case: Path, rank: int, world: int, settings: dict[str, object]) -> dict[str, object]:
    engine = FsdpEngine(case / "model", dtype="bfloat16", **settings)
    with ReducedIn() as seen:
        made = engine.train_mini_batch(_batch(case, 0, rank, world), ActorLoss(), micro_batch_size=2, lr=1e-3)
    weights = {str(t.dtype).removeprefix("torch.") for bucket in engine.weights(bucket_bytes=9000) for _, t in bucket}
    found: dict[str, object] = {"loss": made["loss"], "grad_norm": made["grad_norm"]}
    return {**found, "weights": sorted(weights), "gradients_reduced_in": sorted(seen.types)}


def sampled_rows(rollout: TorchRolloutEngine) -> list[list[object]]:
    return sorted([uid, index, row] for (uid, index), row in sampled(rollout.generate(make_prompts())).items())


def run_world(world: int, cases: dict[str, tuple[str, str]], store: Path) -> None:
    if world == 1:
        for name, (case, out) in cases.items():
            train_report(partial(FsdpEngine, **SETTINGS[name]), Path(case), Path(out), rank=0, world=1)
        return
    arguments = (world, str(store), cases)
    context = mp.start_processes(work, arguments, nprocs=world, join=False, start_method="spawn")
    deadline = time.monotonic() + LIMIT_S
    try:
        while not context.join(timeout=max(deadline - time.monotonic(), 0.0)):
            if time.monotonic() > deadline:
                pytest.fail(f"the {world} ranks did not end within {LIMIT_S} s")
    finally:
        for process in context.processes:
            if process.is_alive():
                process.kill()
            process.join(10)


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = {}
    for name in ("tied", "untied"):
        folders[name] = tmp_path_factory.mktemp(name)
        write_case(folders[name], tied=name == "tied")
    return folders


@pytest.fixture(scope="module", params=CASES_OF_WORLD, ids=lambda world: f"world-{world}")
def reports(
    request: pytest.FixtureRequest, cases: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> list[WorldReport]:
    world = request.param
    root = tmp_path_factory.mktemp(f"world-{world}")
    made = [WorldReport(cases[name.partition("-")[0]], root / name, world) for name in CASES_OF_WORLD[world]]
    for report in made:
        report.out.mkdir()
    places = {report.out.name: (str(report.case), str(report.out)) for report in made}
    run_world(world, places, root / "store")
    return made


@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", TRAIN_CHECKS)
def test_train_engine_fsdp(name: str, reports: list[WorldReport]) -> None:
    for report in reports:
        TRAIN_CHECKS[name](report)


@pytest.mark.timeout(240)
def test_ranks_hold_shards_reduce_once_a_mini_batch_and_sample_alike(reports: list[WorldReport]) -> None:
    for report in reports:
        expected = sampled_rows(TorchRolloutEngine(report.case / "model"))
        whole = {name: tensor for name, tensor in report.tensors(0).items() if name.startswith("micro-1/")}
        found = [json.loads(path.read_text()) for path in sorted(report.out.glob("extra-*.json"))]
        assert len(found) == (report.world if report.world > 1 else 0)
        for name, tensor in whole.items() if found else ():
            rows = [extra["sharded"][name.removeprefix("micro-1/")][0] for extra in found]
            if "ddp" in report.out.name:
                assert rows == [tensor.shape[0]] * report.world
            else:
                assert sum(rows) == tensor.shape[0]
        for extra in found:
            assert extra["sampled"] == expected
            counts = extra["reductions"]
            assert counts["100"] >= 2
            assert counts["1"] == counts["2"] == counts["100"]


@pytest.mark.timeout(240)
def test_another_world_loads_what_the_ranks_saved(reports: list[WorldReport]) -> None:
    for report in reports:
        folder = report.out / "checkpoint"
        entries = [json.loads((report.out / f"entry-{rank}.json").read_text()) for rank in range(report.world)]
        saved = [SavedRank(folder, entry) for entry in entries]
        for settings in ({}, {"strategy": "ddp"}):
            engine = FsdpEngine(report.case / "model", **settings)
            assert engine.fits(entries[0]) == (report.world == 1 or "ddp" in report.out.name)
            engine.load_resharded(saved)
            whole = {name: tensor for bucket in engine.weights(bucket_bytes=1 << 20) for name, tensor in bucket}
            for name, tensor in whole.items():
                assert torch.equal(tensor, report.tensors(0)[f"micro-30-tokens/{name}"]), name
            assert engine.weight_version == 3
            # what is saved again by one rank is what the ranks saved together: the optimizer's state too
            again = report.out / f"again-{len(settings)}"
            again.mkdir()
            entry = engine.save(again)
            other = FsdpEngine(report.case / "model")
            other.load(again, json.loads(json.dumps(entry)))
            for name, (start, stop) in {key: engine._dp.rows(p) for key, p in engine._model.named_parameters()}.items():
                span = {f"{name}.exp_avg_sq": (start, stop)}
                together = read_rows(saved, "optimizer", span)
                assert torch.equal(
                    together[f"{name}.exp_avg_sq"], other._moments(other._optimizer)[1][next(iter(span))]
                )
        half = {"model.embed_tokens.weight": (5, 17)}
        rows = read_rows(saved, "model", half)["model.embed_tokens.weight"]
        assert torch.equal(rows, report.tensors(0)["micro-30-tokens/model.embed_tokens.weight"][5:17])
        damaged = {
            **entries[-1],
            "files": {name: {**f, "sha256": "0" * 64} for name, f in entries[-1]["files"].items()},
        }
        with pytest.raises(CheckpointError, match="SHA-256"):
            engine.load_resharded([*saved[:-1], SavedRank(folder, damaged)])


@pytest.mark.timeout(240)
def test_rank_0_sends_the_whole_weights_and_large_tensors_in_parts(reports: list[WorldReport]) -> None:
    for report in reports:
        for path in sorted(report.out.glob("extra-*.json")):
            for bucket_bytes, sent in json.loads(path.read_text())["sent"].items():
                if path.name != "extra-0.json":
                    assert sent["num_tensors"] == 0, "only rank 0 sends"
                    continue
                assert sent["equal"]
                assert sent["in_order"]
                cut = "ddp" not in report.out.name and int(bucket_bytes) < 1 << 20
                assert (sent["most_parts"] > 1) == cut


@pytest.mark.timeout(240)
def test_no_rank_ever_holds_more_than_a_few_buckets_of_the_weights(reports: list[WorldReport]) -> None:
    for report in reports:
        for path in sorted(report.out.glob("extra-*.json")):
            found = json.loads(path.read_text())["peak"]
            if "ddp" in report.out.name:
                assert found["peak_bytes"] == 0, "the parameters themselves are handed out"
                continue
            # the bucket as it was gathered and as its tensors, rounded up by a row a tensor
            allowed = found["largest_bucket_bytes"] * 2 + 2048
            assert found["largest_bucket_bytes"] <= found["peak_bytes"] <= allowed
            assert allowed < found["model_bytes"] / 2


@pytest.mark.timeout(240)
def test_ranks_in_bfloat16_train_near_float32_and_keep_float32_weights(reports: list[WorldReport]) -> None:
    for report in reports:
        exact = json.loads((report.case / "updates.json").read_text())[0]
        for path in sorted(report.out.glob("extra-*.json")):
            found = json.loads(path.read_text())["bfloat16"]
            assert found["weights"] == ["float32"]
            for name in ("loss", "grad_norm"):
                assert found[name] == pytest.approx(exact[name], rel=0.1)
                assert found[name] != pytest.approx(exact[name], rel=1e-5), "it does compute in bfloat16"
            assert found["gradients_reduced_in"] == ["float32"]


def test_the_update_does_not_depend_on_padding_or_row_order(cases: dict[str, Path]) -> None:
    from rpcrl.batch.data_proto import DataProto

    case = cases["tied"]
    batch = DataProto.load_from_disk(case / "batch-0")
    expected = FsdpEngine(case / "model").train_mini_batch(batch, ActorLoss(), micro_batch_size=3, lr=1e-3)
    order = torch.randperm(len(batch), generator=torch.Generator().manual_seed(0)).tolist()
    pads = {"input_ids": (4, 5), "attention_mask": (4, 5)}
    wide = DataProto.from_dict(
        tensors={name: torch.nn.functional.pad(value, pads.get(name, (0, 5))) for name, value in batch.batch.items()}
    )[order]
    other = FsdpEngine(case / "model").train_mini_batch(wide, ActorLoss(), micro_batch_size=5, lr=1e-3)
    assert other == pytest.approx(expected, rel=1e-5)


def test_bfloat16_computes_near_float32_and_keeps_float32_weights(cases: dict[str, Path]) -> None:
    from rpcrl.batch.data_proto import DataProto

    case = cases["tied"]
    batch = DataProto.load_from_disk(case / "batch-0")
    exact = FsdpEngine(case / "model").train_mini_batch(batch, ActorLoss(), micro_batch_size=4, lr=1e-5)
    engine = FsdpEngine(case / "model", dtype="bfloat16")
    before = {name: tensor.clone() for bucket in engine.weights(bucket_bytes=1 << 20) for name, tensor in bucket}
    rough = engine.train_mini_batch(batch, ActorLoss(), micro_batch_size=4, lr=1e-5)
    assert rough["loss"] != exact["loss"]
    assert rough["loss"] == pytest.approx(exact["loss"], rel=0.1)
    after = {name: tensor for bucket in engine.weights(bucket_bytes=1 << 20) for name, tensor in bucket}
    assert {tensor.dtype for tensor in after.values()} == {torch.float32}
    assert any(not torch.equal(after[name], before[name]) for name in before)


def test_an_engine_that_only_scores_refuses_to_train(cases: dict[str, Path]) -> None:
    from rpcrl.batch.data_proto import DataProto
    from rpcrl.errors import UsageError

    case = cases["tied"]
    batch = DataProto.load_from_disk(case / "batch-0")
    engine = FsdpEngine(case / "model", trainable=False)
    trained, _ = FsdpEngine(case / "model").compute_log_prob(batch, micro_batch_size=5)
    scored, _ = engine.compute_log_prob(batch, micro_batch_size=5)
    assert torch.equal(scored, trained)
    with pytest.raises(UsageError, match="trainable=False"):
        engine.train_mini_batch(batch, ActorLoss(), micro_batch_size=5, lr=1e-3)
