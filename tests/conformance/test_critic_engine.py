"""Does a critic value and learn on one and two ranks as a float64 process does that reads row by row?"""

from __future__ import annotations

import json
import math
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from rpcrl.algorithms.critic_loss import CriticLoss
from rpcrl.batch.data_proto import DataProto
from rpcrl.engines.critic import FsdpCritic
from rpcrl.engines.hf_model import copy_tokenizer, load_value_model
from rpcrl.testing.engine_reference import rows_of
from rpcrl.testing.tiny_model import write_tiny_llama
from tests.unit.algorithms import papers

LIMIT_S = 200.0
ROWS, PROMPT, RESPONSE = 8, 5, 6
RATES = (1e-2, 5e-3)
MICRO_BATCHES = (1, 3, ROWS)
CLIP = 0.3


def mini_batch(seed: int) -> DataProto:
    generator = torch.Generator().manual_seed(seed)
    prompts = torch.randint(1, PROMPT + 1, (ROWS,), generator=generator)
    responses = torch.randint(1, RESPONSE + 1, (ROWS,), generator=generator)
    responses[3] = 0
    columns = torch.arange(PROMPT + RESPONSE)
    mask = ((columns >= (PROMPT - prompts).unsqueeze(1)) & (columns < (PROMPT + responses).unsqueeze(1))).long()
    ids = torch.randint(0, 24, mask.shape, generator=generator)
    return DataProto.from_dict(
        tensors={
            "input_ids": ids,
            "attention_mask": mask,
            "responses": ids[:, PROMPT:],
            "response_mask": mask[:, PROMPT:],
            "values": torch.randn(ROWS, RESPONSE, generator=generator),
            "returns": 2 * torch.randn(ROWS, RESPONSE, generator=generator),
        }
    )


def reference_values(model: Any, batch: DataProto) -> list[torch.Tensor]:
    """The scores where the token itself is not seen yet: from the last prompt token to the last but one."""
    found = []
    for row in rows_of(batch):
        tokens = torch.tensor([[*row.prompt, *row.response]])
        found.append(model(input_ids=tokens, use_cache=False).logits[0, len(row.prompt) - 1 : -1, 0])
    return found


def reference_updates(folder: Path) -> tuple[list[list[float]], list[dict[str, float]], dict[str, torch.Tensor]]:
    """Return values before training, (loss, norm) of each update and the weights after them, all float64."""
    model = load_value_model(folder, dtype=torch.float64)
    before = [row.tolist() for row in reference_values(model, mini_batch(0))]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.0)
    updates = []
    for seed, lr in enumerate(RATES):
        batch = mini_batch(seed)
        mask = batch.batch["response_mask"]
        count = int(mask.sum())
        total: Any = 0.0
        for index, values in enumerate(reference_values(model, batch)):
            old, target = (batch.batch[name][index][mask[index].bool()].double() for name in ("values", "returns"))
            clipped = old + (values - old).clamp(-CLIP, CLIP)
            total = total + 0.5 * torch.maximum((values - target) ** 2, (clipped - target) ** 2).sum()
        loss = total / count
        rows = [papers.tokens(batch.batch[name], mask) for name in ("values", "returns")]
        now = [row.tolist() for row in reference_values(model, batch)]
        by_loop = papers.aggregate(papers.value_loss(now, *rows, clip=CLIP), "token-mean", scale=0)
        assert float(loss.detach()) == pytest.approx(by_loop, rel=1e-9)
        optimizer.zero_grad()
        loss.backward()
        norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        optimizer.param_groups[0]["lr"] = lr
        optimizer.step()
        updates.append({"loss": float(loss.detach()), "grad_norm": norm})
    return before, updates, {name: tensor.detach().clone() for name, tensor in model.named_parameters()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A value model whose head is trained already, so that values differ."""
    language, folder = tmp_path_factory.mktemp("language"), tmp_path_factory.mktemp("value")
    model = load_value_model(write_tiny_llama(language), dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    model.score.weight.data.copy_(0.3 * torch.randn(model.score.weight.shape, generator=generator))
    model.score.bias.data.fill_(0.25)
    model.save_pretrained(folder)
    copy_tokenizer(language, folder)
    return folder


def report(folder: Path, out: Path, rank: int, world: int) -> None:
    from safetensors.torch import save_file

    def share(seed: int) -> DataProto:
        rows = ROWS // world
        return mini_batch(seed).slice(rank * rows, (rank + 1) * rows)

    def whole(engine: FsdpCritic) -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for bucket in engine.weights(bucket_bytes=1 << 20) for name, tensor in bucket}

    tensors = {"values": FsdpCritic(folder).compute_values(share(0), micro_batch_size=3)}
    updates = {}
    for micro in MICRO_BATCHES:
        engine = FsdpCritic(folder)
        loss = CriticLoss(cliprange_value=CLIP)
        updates[str(micro)] = [
            dict(engine.train_mini_batch(share(seed), loss, micro_batch_size=micro, lr=lr))
            for seed, lr in enumerate(RATES)
        ]
        tensors |= {f"{micro}/{name}": tensor for name, tensor in whole(engine).items()}
    shards = out / "shards"
    shards.mkdir(exist_ok=True)
    entry = json.loads(json.dumps(engine.save(shards)))
    engine.train_mini_batch(share(0), loss, micro_batch_size=2, lr=1e-3)
    resumed = FsdpCritic(folder)
    resumed.load(shards, entry)
    resumed.train_mini_batch(share(0), loss, micro_batch_size=2, lr=1e-3)
    same = all(torch.equal(tensor, whole(resumed)[name]) for name, tensor in whole(engine).items())
    engine.export(out / "export")
    save_file(tensors, out / f"rank-{rank}.safetensors")
    (out / f"rank-{rank}.json").write_text(json.dumps({"updates": updates, "resumed_equal": same}))


def work(rank: int, world: int, store: str, folder: str, out: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    try:
        report(Path(folder), Path(out), rank, world)
    finally:
        dist.destroy_process_group()
    # As rpcrl's workers end: taking an interpreter with torch's threads apart can abort after the work is done.
    os._exit(0)


@pytest.fixture(scope="module", params=[1, 2], ids=lambda world: f"world-{world}")
def ranks(request: pytest.FixtureRequest, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Every rank's report and tensors."""
    from safetensors.torch import load_file

    world, out = request.param, tmp_path_factory.mktemp(f"critic-{request.param}")
    if world == 1:
        report(folder, out, 0, 1)
    else:
        arguments = (world, str(out / "store"), str(folder), str(out))
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
    reports = [json.loads((out / f"rank-{rank}.json").read_text()) for rank in range(world)]
    return out, reports, [load_file(out / f"rank-{rank}.safetensors") for rank in range(world)]


@pytest.fixture(scope="module")
def reference(folder: Path) -> Any:
    return reference_updates(folder)


@pytest.mark.timeout(240)
def test_values_are_those_before_each_token(ranks: Any, reference: Any) -> None:
    values = torch.cat([tensors["values"] for tensors in ranks[2]])
    mask = mini_batch(0).batch["response_mask"].bool()
    assert values.dtype is torch.float32
    assert not values[~mask].any()
    flat = [value for row in reference[0] for value in row]
    assert values[mask].tolist() == pytest.approx(flat, abs=1e-5)
    assert max(flat) - min(flat) > 0.5, "a model that gives every token the same value would show nothing"


@pytest.mark.timeout(240)
def test_updates_equal_the_reference_on_any_number_of_ranks_and_micro_batches(ranks: Any, reference: Any) -> None:
    _, reports, tensors = ranks
    _, expected, after = reference
    assert max(update["grad_norm"] for update in expected) > 1.0, "the case must clip"
    for seen, weights in zip(reports, tensors, strict=True):
        for micro, made in seen["updates"].items():
            for ours, theirs in zip(made, expected, strict=True):
                assert ours["vf_loss"] == ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
                assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4)
                assert 0 < ours["vf_clipfrac"] < 1
                assert ours["skipped"] == 0
            for name, tensor in after.items():
                off = float((weights[f"{micro}/{name}"].double() - tensor).abs().max())
                assert off < 2e-4, f"{name} is {off} off with micro-batches of {micro}"


@pytest.mark.timeout(240)
def test_a_restored_critic_goes_on_bit_for_bit_and_an_exported_one_is_the_same(ranks: Any) -> None:
    out, reports, _ = ranks
    assert all(seen["resumed_equal"] for seen in reports)
    again = FsdpCritic(out / "export")
    assert math.isclose(again._model.score.bias.item(), 0.25, abs_tol=0.1)
    assert again._model.score.bias.item() != 0.25


def test_a_fresh_head_is_zero_and_a_broken_folder_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    from rpcrl.errors import UsageError

    language = write_tiny_llama(tmp_path)
    assert not FsdpCritic(language).compute_values(mini_batch(0), micro_batch_size=4).any()
    weights = load_file(language / "model.safetensors")
    del weights["model.layers.0.mlp.up_proj.weight"]
    save_file(weights, language / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UsageError, match=r"the folder's weights lack model\.layers\.0\.mlp\.up_proj\.weight"):
        load_value_model(language, dtype=torch.float32)


def test_an_architecture_without_such_a_head_is_refused(tmp_path: Path) -> None:
    from rpcrl.errors import UsageError

    language = write_tiny_llama(tmp_path)
    config = json.loads((language / "config.json").read_text())
    (language / "config.json").write_text(json.dumps({**config, "model_type": "mamba"}))
    with pytest.raises(UsageError, match="no token classification for models of type 'mamba'"):
        load_value_model(language, dtype=torch.float32)
