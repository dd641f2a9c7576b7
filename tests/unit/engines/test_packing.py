"""Packed rows: nothing is computed for padding, no row sees another, and a model that cannot do it is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rpcrl.algorithms.actor_loss import ActorLoss
from rpcrl.batch.data_proto import DataProto
from rpcrl.engines import packed_attention, packing
from rpcrl.engines.fsdp import FsdpEngine
from rpcrl.engines.sharding import SHARD_ABOVE, DataParallel, Replicas, data_parallel
from rpcrl.errors import BatchError, UsageError
from rpcrl.testing.tiny_model import write_tiny_llama

PROMPT, RESPONSE = 9, 11


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory, llama: Path) -> Path:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=24,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=48,
        initializer_range=0.2,
        eos_token_id=1,
        pad_token_id=0,
    )
    folder = tmp_path_factory.mktemp("qwen3")
    torch.manual_seed(1)
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


def batch(rows: int = 9, *, empty: tuple[int, ...] = (2,), seed: int = 0) -> DataProto:
    generator = torch.Generator().manual_seed(seed)
    prompts = torch.randint(1, PROMPT + 1, (rows,), generator=generator)
    responses = torch.randint(1, RESPONSE + 1, (rows,), generator=generator)
    responses[list(empty)] = 0
    columns = torch.arange(PROMPT + RESPONSE)
    mask = ((columns >= (PROMPT - prompts).unsqueeze(1)) & (columns < (PROMPT + responses).unsqueeze(1))).long()
    ids = torch.randint(0, 24, mask.shape, generator=generator)
    return DataProto.from_dict(
        tensors={
            "input_ids": ids,
            "attention_mask": mask,
            "responses": ids[:, PROMPT:],
            "response_mask": mask[:, PROMPT:],
            "advantages": torch.randn(rows, RESPONSE, generator=generator),
            "old_log_probs": -3.0 + 0.3 * torch.randn(rows, RESPONSE, generator=generator),
        }
    )


class Seen:
    """Counts the positions that go into a model's embedding: what is really computed."""

    def __init__(self, engine: FsdpEngine) -> None:
        self.positions = 0
        engine._model.get_input_embeddings().register_forward_pre_hook(self._count)

    def _count(self, module: object, arguments: tuple[torch.Tensor, ...]) -> None:
        self.positions += arguments[0].numel()


def needed(data: DataProto) -> int:
    """Tokens of rows with a response, without the last one of each, which predicts nothing."""
    mask = data.batch["attention_mask"]
    answered = data.batch["response_mask"].any(-1)
    return int((mask.sum(-1) - 1)[answered].sum())


@pytest.mark.parametrize("cut", [{}, {"micro_batch_size": 2}, {"max_tokens": 40}], ids=str)
def test_no_pad_token_is_computed(llama: Path, cut: dict[str, int]) -> None:
    data = batch()
    engine, padded = FsdpEngine(llama, packed=True), FsdpEngine(llama)
    seen, seen_padded = Seen(engine), Seen(padded)
    engine.compute_log_prob(data, **cut)
    engine.train_mini_batch(data, ActorLoss(), **cut, lr=1e-3)
    padded.compute_log_prob(data, **cut)
    assert (engine.computed_tokens, engine.computed_pad_tokens) == (seen.positions, 0)
    assert seen.positions == 2 * needed(data)
    assert padded.computed_tokens == seen_padded.positions
    assert padded.computed_pad_tokens > 0
    mask = data.batch["attention_mask"]
    if not cut:
        # all columns but the last are shown; of those the real ones are no padding
        assert padded.computed_tokens - padded.computed_pad_tokens == int(mask[:, :-1].sum())


@pytest.fixture(scope="module")
def mistral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a model each of whose tokens sees the last five only: less than the rows are long."""
    from transformers import MistralConfig, MistralForCausalLM

    config = MistralConfig(
        vocab_size=24,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=48,
        initializer_range=0.2,
        sliding_window=5,
        eos_token_id=1,
        pad_token_id=0,
    )
    folder = tmp_path_factory.mktemp("mistral")
    torch.manual_seed(2)
    MistralForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("attention", [packed_attention.NAME, "sdpa", "eager"])
@pytest.mark.parametrize("model", ["llama", "qwen3", "mistral"])
def test_packed_rows_are_computed_as_padded_ones(model: str, attention: str, request: pytest.FixtureRequest) -> None:
    folder, data = request.getfixturevalue(model), batch()
    exact, engine = FsdpEngine(folder, dtype="float64"), FsdpEngine(folder, dtype="float64", packed=True)
    assert engine._model.config._attn_implementation == packed_attention.NAME, "the default where the model allows it"
    engine._model.set_attn_implementation(attention)
    packing.require_packing(engine._model)
    for one, other in zip(engine.compute_log_prob(data), exact.compute_log_prob(data), strict=True):
        assert torch.allclose(one, other, atol=1e-6)
    made = [dict(one.train_mini_batch(data, ActorLoss(), lr=1e-3)) for one in (engine, exact)]
    assert made[0] == pytest.approx(made[1], rel=1e-6)
    assert abs(made[0]["grad_norm"]) > 1e-3


def test_what_one_row_holds_does_not_move_another(llama: Path) -> None:
    data = batch(empty=())
    engine = FsdpEngine(llama, packed=True)
    before, _ = engine.compute_log_prob(data)
    other = DataProto.from_dict(tensors={name: tensor.clone() for name, tensor in data.batch.items()})
    other.batch["input_ids"][4] = (other.batch["input_ids"][4] + 5) % 24
    after, _ = engine.compute_log_prob(other)
    kept = [row for row in range(len(data)) if row != 4]
    assert torch.equal(before[kept], after[kept])
    assert not torch.allclose(before[4], after[4])


def test_a_batch_without_any_response_trains_nothing_and_is_zero(llama: Path) -> None:
    data = batch(3, empty=(0, 1, 2))
    engine = FsdpEngine(llama, packed=True)
    assert not engine.compute_log_prob(data)[0].any()
    made = engine.train_mini_batch(data, ActorLoss(), lr=1e-3)
    assert (made["loss"], made["grad_norm"], made["skipped"]) == (0.0, 0.0, 0.0)


def test_a_response_without_a_prompt_is_refused(llama: Path) -> None:
    data = batch(3, empty=())
    data.batch["attention_mask"][1, :PROMPT] = 0
    with pytest.raises(BatchError, match="needs prompts of 1 token or more"):
        FsdpEngine(llama, packed=True).compute_log_prob(data)


class Largest(TorchDispatchMode):
    """Follows the number of elements of the largest tensor that is made."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.untyped_storage().nbytes() // tensor.element_size())
        return out


def test_memory_grows_with_the_tokens_and_not_with_their_square(llama: Path) -> None:
    most = {}
    for rows in (8, 64):
        engine, data = FsdpEngine(llama, packed=True), batch(rows, empty=())
        with Largest() as seen:
            engine.train_mini_batch(data, ActorLoss(), lr=1e-3)
        most[rows] = seen.elements
        assert seen.elements < needed(data) ** 2 / 4 or rows == 8
    assert most[64] < 12 * most[8], "eight times the rows; a mask over all of them would be 64 times as large"


@pytest.mark.parametrize("lengths", [[1], [5, 1, 4], [3] * 4, [1, 2, 4, 8, 16, 3, 7]], ids=str)
def test_rows_come_back_to_their_places(lengths: list[int]) -> None:
    blocks = packed_attention.RowBlocks.of(lengths, torch.device("cpu"))
    tokens = torch.arange(sum(lengths))
    kept = [tokens[index].flatten()[places] for index, places in zip(blocks.gather, blocks.kept, strict=True)]
    assert torch.cat(kept)[blocks.back].equal(tokens)
    padded = sum(index.numel() for index in blocks.gather)
    assert padded < 2 * sum(lengths)


def test_a_model_that_does_not_hand_on_where_the_rows_are_keeps_transformers_mask(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.models.llama.modeling_llama import LlamaModel

    forward = LlamaModel.forward

    def dropping(self: object, *arguments: object, row_blocks: object = None, **named: object) -> object:
        return forward(self, *arguments, **named)

    monkeypatch.setattr(LlamaModel, "forward", dropping)
    engine = FsdpEngine(llama, packed=True)
    assert engine._model.config._attn_implementation == "sdpa"
    whole, _ = FsdpEngine(llama).compute_log_prob(batch())
    assert torch.allclose(engine.compute_log_prob(batch())[0], whole, atol=1e-5)


def test_a_model_whose_rows_see_one_another_is_refused(llama: Path) -> None:
    model = FsdpEngine(llama)._model
    packing.require_packing(model)
    forward = model.model.forward

    def leaking(*arguments: object, position_ids: torch.Tensor, **named: object) -> object:
        # as a model that reads no positions: all rows are one
        return forward(*arguments, position_ids=torch.arange(position_ids.shape[1]).unsqueeze(0), **named)

    model.model.forward = leaking
    with pytest.raises(UsageError, match=r"LlamaForCausalLM: in a packed trial batch .* set actor_rollout_ref.model"):
        packing.require_packing(model)


def test_a_recurrent_model_is_refused_at_the_start(tmp_path: Path) -> None:
    from transformers import MambaConfig, MambaForCausalLM

    MambaForCausalLM(
        MambaConfig(hidden_size=16, num_hidden_layers=1, vocab_size=24, state_size=4, pad_token_id=0)
    ).save_pretrained(tmp_path)
    with pytest.raises(UsageError, match=r"rows cannot be packed without padding .* MambaForCausalLM"):
        FsdpEngine(tmp_path, packed=True)


@pytest.mark.parametrize("packed", [False, True])
def test_no_pass_has_more_tokens_than_allowed(llama: Path, packed: bool) -> None:
    data = batch(20, empty=())
    engine = FsdpEngine(llama, packed=packed)
    seen: list[int] = []
    engine._model.get_input_embeddings().register_forward_pre_hook(lambda _, args: seen.append(args[0].numel()))
    whole, _ = FsdpEngine(llama).compute_log_prob(data)
    scored, _ = engine.compute_log_prob(data, max_tokens=45)
    assert len(seen) > 2
    assert max(seen) <= 45
    assert torch.allclose(scored, whole, atol=1e-5)
    with pytest.raises(UsageError, match="ppo_max_token_len_per_gpu"):
        engine.compute_log_prob(data, max_tokens=5)


def test_checkpointed_activations_keep_less_and_make_the_same_update(llama: Path) -> None:
    data = batch()
    kept: dict[bool, int] = {}
    made = {}
    for checkpoint in (False, True):
        engine = FsdpEngine(llama, checkpoint_activations=checkpoint)
        sizes: list[int] = []

        def keep(tensor: torch.Tensor, sizes: list[int] = sizes) -> torch.Tensor:
            sizes.append(tensor.nbytes)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            log_prob, _ = engine._score(data, entropy_gradient=False)
            kept[checkpoint] = sum(sizes)
            del log_prob
        made[checkpoint] = dict(engine.train_mini_batch(data, ActorLoss(), lr=1e-3))
    assert kept[True] < kept[False] / 2
    assert made[True] == pytest.approx(made[False], rel=1e-6)


def test_an_unknown_strategy_is_refused(llama: Path) -> None:
    with pytest.raises(UsageError, match="'zero' is not one of auto, fsdp2, ddp"):
        FsdpEngine(llama, strategy="zero")


def test_the_size_of_a_model_decides_how_it_is_spread_when_nobody_does() -> None:
    cpu = torch.device("cpu")
    kinds = {size: type(data_parallel("auto", cpu, num_parameters=size)) for size in (SHARD_ABOVE, SHARD_ABOVE + 1)}
    assert kinds == {SHARD_ABOVE: Replicas, SHARD_ABOVE + 1: DataParallel}
