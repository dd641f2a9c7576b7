"""Does a training engine make the update that a single float64 process would make, on any number of ranks?

``write_case`` puts a model, mini-batches and the reference's answer into a folder. ``train_report`` then runs on
every rank and writes what it saw; ``TRAIN_CHECKS`` compare the reports of a world with the reference's answer. How
the ranks are started is the caller's business.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rpcrl.algorithms.actor_loss import ActorLoss
from rpcrl.batch.data_proto import DataProto
from rpcrl.engines.base import TrainEngine
from rpcrl.errors import BatchError, CheckpointError
from rpcrl.testing.engine_kit import require
from rpcrl.testing.engine_reference import Reference, Update, columns_of, rows_of
from rpcrl.testing.tiny_model import write_tiny_llama

__all__ = ["TRAIN_CHECKS", "WorldReport", "train_report", "write_case"]

ROWS, PROMPT, RESPONSE = 12, 6, 7
RATES = (1e-3, 8e-4, 6e-4)
MICRO_BATCHES: dict[str, dict[str, int]] = {
    "1": {"micro_batch_size": 1},
    "2": {"micro_batch_size": 2},
    "all": {},
    "30-tokens": {"max_tokens": 30},
}
"""Ways to cut a mini-batch; rows have up to 13 tokens."""
TOLERANCE = 1e-5
CHANGE_TOLERANCE = 1e-3
"""Of the parameters' change, relative: Adam divides by the gradient's size, which float32 knows less well."""

MakeTrainEngine = Callable[[Path], TrainEngine]


def _mini_batch(reference: Reference, seed: int) -> DataProto:
    """Return rows of uneven lengths, one of them without a response, with clips and dual clips active."""
    generator = torch.Generator().manual_seed(seed)
    prompts = torch.randint(1, PROMPT + 1, (ROWS,), generator=generator)
    responses = torch.randint(1, RESPONSE + 1, (ROWS,), generator=generator)
    responses[3] = 0
    columns = torch.arange(PROMPT + RESPONSE)
    mask = ((columns >= (PROMPT - prompts).unsqueeze(1)) & (columns < (PROMPT + responses).unsqueeze(1))).long()
    ids = torch.randint(0, 24, mask.shape, generator=generator)
    tensors = {
        "input_ids": ids,
        "attention_mask": mask,
        "responses": ids[:, PROMPT:],
        "response_mask": mask[:, PROMPT:],
        "advantages": torch.randn(ROWS, RESPONSE, generator=generator) - 0.5,
        "old_log_probs": torch.full((ROWS, RESPONSE), float("nan")),
    }
    batch = DataProto.from_dict(tensors=tensors)
    for index, row in enumerate(rows_of(batch)):
        if row.response:
            exact = reference.log_probs(row).detach()
            noise = 0.5 * torch.randn(exact.shape, generator=generator)
            tensors["old_log_probs"][index, : len(row.response)] = exact.float() + noise
    return DataProto.from_dict(tensors=tensors)


def write_case(case: Path, *, tied: bool = True, **settings: Any) -> None:
    """Write a model, mini-batches, and what the reference makes of them, into the folder ``case``."""
    from safetensors.torch import save_file

    reference = Reference(write_tiny_llama(case / "model", tied=tied, **settings))
    save_file(reference.parameters(), case / "before.safetensors")
    scored, updates = None, []
    for index, lr in enumerate(RATES):
        batch = _mini_batch(reference, seed=index)
        batch.save_to_disk(case / f"batch-{index}")
        if scored is None:
            scored = torch.zeros(ROWS, RESPONSE, dtype=torch.float64)
            for row_index, row in enumerate(rows_of(batch)):
                if row.response:
                    scored[row_index, : len(row.response)] = reference.log_probs(row).detach()
            save_file({"log_prob": scored}, case / "scored.safetensors")
        updates.append(asdict(reference.update(batch, lr=lr)))
    save_file(reference.parameters(), case / "after.safetensors")
    (case / "updates.json").write_text(json.dumps(updates), encoding="utf-8")


def _batch(case: Path, index: int, rank: int, world: int) -> DataProto:
    """Return this rank's rows of a mini-batch."""
    rows = ROWS // world
    return DataProto.load_from_disk(case / f"batch-{index}").slice(rank * rows, (rank + 1) * rows)


def _whole(engine: TrainEngine) -> dict[str, Tensor]:
    return {name: tensor.clone() for bucket in engine.weights(bucket_bytes=1 << 20) for name, tensor in bucket}


def _same(one: dict[str, Tensor], two: dict[str, Tensor]) -> bool:
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def train_report(make: MakeTrainEngine, case: Path, out: Path, *, rank: int, world: int) -> None:
    """Run every scenario on this rank and write ``out/rank-N.json`` and tensors; collective over the world.

    ``make`` returns an engine with the reference's settings: betas (0.9, 0.99), eps 1e-8, no weight decay, clipping
    at norm 1.
    """
    from safetensors.torch import save_file

    report: dict[str, Any] = {"updates": {}}
    tensors: dict[str, Tensor] = {}
    engine = make(case / "model")
    tensors["log_prob"], _ = engine.compute_log_prob(_batch(case, 0, rank, world), micro_batch_size=2)
    by_tokens, _ = engine.compute_log_prob(_batch(case, 0, rank, world), max_tokens=30)
    tensors["log_prob_by_tokens"] = by_tokens
    for micro, cut in MICRO_BATCHES.items():
        engine = make(case / "model")
        made = [
            dict(engine.train_mini_batch(_batch(case, index, rank, world), ActorLoss(), **cut, lr=lr))
            for index, lr in enumerate(RATES)
        ]
        report["updates"][micro] = made
        report["version"] = engine.weight_version
        tensors |= {f"micro-{micro}/{name}": tensor for name, tensor in _whole(engine).items()}
    report |= _resume(make, engine, case, out, rank, world)
    report |= _skip(engine, case, rank, world)
    report |= _uneven(engine, case, rank, world)
    report |= _buckets(engine)
    engine.export(out / "export")
    save_file(tensors, out / f"rank-{rank}.safetensors")
    (out / f"rank-{rank}.json").write_text(json.dumps(report), encoding="utf-8")


def _resume(make: MakeTrainEngine, engine: TrainEngine, case: Path, out: Path, rank: int, world: int) -> dict[str, Any]:
    """Save, go on, and compare with an engine that loads and goes on; then damage what was saved."""
    directory = out / "checkpoint"
    directory.mkdir(exist_ok=True)
    entry = json.loads(json.dumps(engine.save(directory)))
    more = [dict(engine.train_mini_batch(_batch(case, 0, rank, world), ActorLoss(), micro_batch_size=2, lr=1e-3))]
    expected = _whole(engine)
    resumed = make(case / "model")
    resumed.load(directory, entry)
    version = resumed.weight_version
    again = [dict(resumed.train_mini_batch(_batch(case, 0, rank, world), ActorLoss(), micro_batch_size=2, lr=1e-3))]
    results = {
        "resumed_equal": _same(expected, _whole(resumed)) and more == again,
        "resumed_version": version,
        "files": sorted(path.name for path in directory.iterdir() if f"rank-{rank:05d}" in path.name),
        "described": entry["tensors"],
    }
    errors = {"wrong_world": {**entry, "world_size": world + 1}}
    files, gone = entry["files"], entry["files"][entry["optimizer"]]
    errors["damaged"] = {**entry, "files": {**files, entry["model"]: {**files[entry["model"]], "sha256": "0" * 64}}}
    errors["missing"] = {**entry, "files": {**files, "gone.safetensors": gone}}
    (out / f"entry-{rank}.json").write_text(json.dumps(entry), encoding="utf-8")
    before = _whole(resumed)
    for name, wrong in errors.items():
        try:
            resumed.load(directory, wrong)
            results[name] = "nothing was raised"
        except CheckpointError as error:
            results[name] = str(error)
    return {**results, "refused_load_changes_nothing": _same(before, _whole(resumed))}


def _skip(engine: TrainEngine, case: Path, rank: int, world: int) -> dict[str, Any]:
    """Train on a batch whose last rank has an infinite advantage, then on a sound one."""
    batch = _batch(case, 1, rank, world)
    poisoned = DataProto.from_dict(tensors={name: value.clone() for name, value in columns_of(batch).items()})
    if rank == world - 1:
        columns_of(poisoned)["advantages"][-1] = float("inf")
    before, version = _whole(engine), engine.weight_version
    skipped = engine.train_mini_batch(poisoned, ActorLoss(), micro_batch_size=2, lr=1e-3)
    unchanged, counted = _same(before, _whole(engine)), engine.weight_version - version
    sound = engine.train_mini_batch(batch, ActorLoss(), micro_batch_size=2, lr=1e-3)
    return {
        "skipped": [skipped["skipped"], sound["skipped"]],
        "skip_unchanged": unchanged,
        "skip_counted": counted,
        "after_skip_changed": not _same(before, _whole(engine)),
    }


def _uneven(engine: TrainEngine, case: Path, rank: int, world: int) -> dict[str, Any]:
    """Give rank 0 a row less than the others (in a world of one: none at all)."""
    batch = _batch(case, 0, rank, world)
    rows = batch.slice(0, len(batch) - 1 if world > 1 else 0) if rank == 0 else batch
    try:
        engine.train_mini_batch(rows, ActorLoss(), micro_batch_size=2, lr=1e-3)
    except BatchError as error:
        return {"uneven": str(error)}
    return {"uneven": "nothing was raised"}


def _buckets(engine: TrainEngine) -> dict[str, Any]:
    limit = 4000
    buckets = [[(name, tensor.nbytes) for name, tensor in bucket] for bucket in engine.weights(bucket_bytes=limit)]
    return {"bucket_limit": limit, "buckets": buckets}


@dataclass(frozen=True)
class WorldReport:
    """What the ranks of one world have written."""

    case: Path
    out: Path
    world: int

    def ranks(self) -> list[dict[str, Any]]:
        """Return every rank's report."""
        return [json.loads((self.out / f"rank-{rank}.json").read_text()) for rank in range(self.world)]

    def tensors(self, rank: int) -> dict[str, Tensor]:
        """Return the tensors that a rank has written."""
        return _load(self.out / f"rank-{rank}.safetensors")


def _load(path: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    loaded: dict[str, Tensor] = load_file(path)
    return loaded


def check_scores(report: WorldReport) -> None:
    """Log-probs equal the float64 reference's; rows and columns without a token are 0."""
    exact = _load(report.case / "scored.safetensors")["log_prob"]
    for name in ("log_prob", "log_prob_by_tokens"):
        ours = torch.cat([report.tensors(rank)[name] for rank in range(report.world)])
        require(ours.dtype is torch.float32 and ours.shape == exact.shape, f"{name} is {ours.dtype} {ours.shape}")
        gap = float((ours.double() - exact).abs().max())
        require(gap < TOLERANCE, f"{name} is {gap} off the reference")


def check_updates(report: WorldReport) -> None:
    """Loss, norm and weights after several updates equal the reference's, for every size of micro-batches."""
    expected = [Update(**update) for update in json.loads((report.case / "updates.json").read_text())]
    require(max(update.grad_norm for update in expected) > 1.0, "the case must clip at least once to mean anything")
    before, after = _load(report.case / "before.safetensors"), _load(report.case / "after.safetensors")
    flat = {name: torch.cat([part[key].flatten() for key in before]) for name, part in (("b", before), ("a", after))}
    for rank, seen in enumerate(report.ranks()):
        tensors = report.tensors(rank)
        for micro, made in seen["updates"].items():
            where = f"world {report.world}, rank {rank}, micro-batches of {micro}"
            for update, ours in zip(expected, made, strict=True):
                for name, value in asdict(update).items():
                    off = abs(ours[name] - value) / abs(value)
                    require(off < TOLERANCE, f"{where}: {name} is {ours[name]}, the reference has {value}")
                require(ours["skipped"] == 0.0, f"{where}: nothing is skipped")
            weights = torch.cat([tensors[f"micro-{micro}/{key}"].double().flatten() for key in before])
            off = float((weights - flat["a"]).norm() / flat["a"].norm())
            require(off < TOLERANCE, f"{where}: weights are {off} off the reference")
            off = float((weights - flat["a"]).norm() / (flat["a"] - flat["b"]).norm())
            require(off < CHANGE_TOLERANCE, f"{where}: the weights' change is {off} off the reference's")


def check_metrics(report: WorldReport) -> None:
    """Metrics are the whole mini-batch's, the same on every rank and for every size of micro-batches."""
    first = report.ranks()[0]["updates"]["1"]
    require(any(update["pg_clipfrac"] > 0 for update in first), "the case must clip some tokens")
    for seen in report.ranks():
        require(seen["version"] == len(RATES), "weight_version counts the mini-batches")
        for made in seen["updates"].values():
            for ours, other, lr in zip(made, first, RATES, strict=True):
                require(ours["lr"] == lr, f"lr is {ours['lr']}, not {lr}")
                for name, value in other.items():
                    off = abs(ours[name] - value)
                    require(off <= TOLERANCE * max(abs(value), 1.0), f"{name} is {ours[name]} here and {value} there")


def check_resume(report: WorldReport) -> None:
    """A loaded engine goes on bit for bit; what does not fit or is damaged is refused and changes nothing."""
    for rank, seen in enumerate(report.ranks()):
        require(seen["resumed_equal"], f"rank {rank}: the resumed engine went on differently")
        require(seen["resumed_version"] == len(RATES), f"rank {rank}: the version was not restored")
        require(len(seen["files"]) == 2, f"rank {rank} wrote {seen['files']}, one file for model and optimizer each")
        require("world" in seen["wrong_world"] or "ranks" in seen["wrong_world"], seen["wrong_world"])
        require("damaged" in seen["damaged"] and "SHA-256" in seen["damaged"], seen["damaged"])
        require("missing" in seen["missing"], seen["missing"])
        require(seen["refused_load_changes_nothing"], f"rank {rank}: a refused load changed something")


def check_skip(report: WorldReport) -> None:
    """A gradient that is not finite on one rank skips the step on all, and training goes on."""
    for rank, seen in enumerate(report.ranks()):
        require(seen["skipped"] == [1.0, 0.0], f"rank {rank} reported skipped {seen['skipped']}")
        require(seen["skip_unchanged"], f"rank {rank}: a skipped step changed weights")
        require(seen["skip_counted"] == 1, f"rank {rank}: a skipped step still counts")
        require(seen["after_skip_changed"], f"rank {rank}: the step after a skipped one moved nothing")


def check_uneven_rows(report: WorldReport) -> None:
    """Ranks with different numbers of rows get an error, all of them, before anything is computed."""
    for rank, seen in enumerate(report.ranks()):
        require("rows" in seen["uneven"] and "ppo_mini_batch_size" in seen["uneven"], f"rank {rank}: {seen['uneven']}")


def check_weights(report: WorldReport) -> None:
    """Buckets keep to their size and name every parameter once."""
    names = sorted(_load(report.case / "before.safetensors"))
    for seen in report.ranks():
        buckets = seen["buckets"]
        require(sorted(name for bucket in buckets for name, _ in bucket) == names, "every parameter comes once")
        require(len(buckets) > 1, "the case needs several buckets")
        for bucket in buckets:
            size = sum(size_bytes for _, size_bytes in bucket)
            require(len(bucket) == 1 or size <= seen["bucket_limit"], f"a bucket has {size} bytes")


def check_export(report: WorldReport) -> None:
    """Transformers loads the exported folder, tokenizer included, and it scores as the engine's weights do."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(report.out / "export", local_files_only=True)
    tokenizer = AutoTokenizer.from_pretrained(report.out / "export", local_files_only=True)
    require(tokenizer("ascending 5 =")["input_ids"] == [13, 8, 15], "the tokenizer is the model's")
    exported = dict(model.named_parameters())
    before = _load(report.case / "before.safetensors")
    require(exported.keys() == before.keys(), f"the export has {sorted(exported)}")
    moved = [name for name in before if not torch.equal(exported[name].double(), before[name])]
    require(len(moved) == len(before), "every exported tensor was trained")
    source = json.loads((report.case / "model" / "config.json").read_text())
    config = json.loads((report.out / "export" / "config.json").read_text())
    require(config["eos_token_id"] == source["eos_token_id"], "the stop tokens are kept")


TRAIN_CHECKS: dict[str, Callable[[WorldReport], None]] = {
    check.__name__.removeprefix("check_"): check
    for check in (
        check_scores,
        check_updates,
        check_metrics,
        check_resume,
        check_skip,
        check_uneven_rows,
        check_weights,
        check_export,
    )
}
