"""Do the engines keep the promises of their interfaces?"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from rpcrl.engines.base import RolloutEngine
from rpcrl.engines.fsdp import FsdpEngine
from rpcrl.engines.torch_rollout import TorchRolloutEngine
from rpcrl.testing.engine_kit import ROLLOUT_CHECKS, RolloutHarness
from rpcrl.testing.request_kit import REQUEST_CHECKS
from rpcrl.testing.tiny_model import STOP_IDS, write_tiny_llama


@contextlib.contextmanager
def second_tensor_fails(engine: RolloutEngine) -> Iterator[None]:
    store = engine._store
    resize, calls = store._resize, []

    def limited(tensor: torch.Tensor, size_bytes: int) -> None:
        calls.append(size_bytes)
        if len(calls) > 1:
            raise MemoryError("no memory left (injected)")
        resize(tensor, size_bytes)

    store._resize = limited
    yield
    store._resize = resize


@pytest.fixture(scope="module", params=["tied", "untied"])
def harness(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> RolloutHarness:
    root = tmp_path_factory.mktemp(request.param)
    tied = request.param == "tied"
    return RolloutHarness(
        folder=write_tiny_llama(root / "a", seed=0, tied=tied),
        other=write_tiny_llama(root / "b", seed=1, tied=tied),
        make=TorchRolloutEngine,
        make_trainer=FsdpEngine,
        failing_allocation=second_tensor_fails,
        stop=frozenset(STOP_IDS),
    )


@pytest.mark.parametrize("name", ROLLOUT_CHECKS)
def test_rollout_engine_torch(name: str, harness: RolloutHarness) -> None:
    ROLLOUT_CHECKS[name](harness)


@pytest.mark.parametrize("name", REQUEST_CHECKS)
def test_requests_of_engine_torch(name: str, harness: RolloutHarness) -> None:
    REQUEST_CHECKS[name](harness)


def test_a_sliding_window_model_samples_what_its_trainer_scores(tmp_path: Path) -> None:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=24,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=48,
        max_position_embeddings=64,
        use_sliding_window=True,
        sliding_window=4,
        max_window_layers=1,
        initializer_range=0.2,
        eos_token_id=list(STOP_IDS),
        pad_token_id=0,
        bos_token_id=None,
    )
    assert "sliding_attention" in config.layer_types
    torch.manual_seed(0)
    Qwen2ForCausalLM(config).save_pretrained(tmp_path)
    torch.manual_seed(1)
    other = tmp_path / "other"
    Qwen2ForCausalLM(config).save_pretrained(other)
    harness = RolloutHarness(tmp_path, other, TorchRolloutEngine, FsdpEngine, second_tensor_fails, frozenset(STOP_IDS))
    ROLLOUT_CHECKS["keyed_noise"](harness)
    ROLLOUT_CHECKS["log_probs"](harness)
    for name in ("arrivals", "abort", "new_weights"):
        REQUEST_CHECKS[name](harness)
