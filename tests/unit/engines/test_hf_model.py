"""Is a folder that is no model refused early, and is a good one read right?"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rpcrl.engines import hf_model
from rpcrl.engines.torch_rollout import TorchRolloutEngine
from rpcrl.errors import UsageError
from rpcrl.testing.tiny_model import PAD, STOP_IDS, write_tiny_llama


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny"))


def test_a_missing_folder_is_an_error_before_anything_heavy_is_loaded(tmp_path: Path) -> None:
    program = (
        "import sys\n"
        "from rpcrl.engines.hf_model import load_model\n"
        "from rpcrl.errors import UsageError\n"
        "try:\n"
        "    load_model(sys.argv[1], dtype=None)\n"
        "except UsageError as error:\n"
        "    print(error)\n"
        "print([name for name in ('torch', 'transformers') if name in sys.modules])\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "none")]
    result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert "no such folder on this machine" in result.stdout
    assert "actor_rollout_ref.model.path=" in result.stdout
    assert result.stdout.rstrip().endswith("[]")


def test_folders_without_configuration_or_weights_are_refused(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(UsageError, match=r"no config\.json"):
        hf_model.model_folder(tmp_path)
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    with pytest.raises(UsageError, match="no weights"):
        TorchRolloutEngine(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(UsageError, match=r"no tokenizer\.json"):
        hf_model.load_tokenizer(tmp_path)
    with pytest.raises(UsageError, match="'float8'"):
        hf_model.torch_dtype("float8")


def test_ids_and_tokenizer_come_from_the_folder(folder: Path) -> None:
    tokenizer = hf_model.load_tokenizer(folder)
    assert tokenizer.padding_side == "left"
    assert tokenizer("ascending 5 2 =")["input_ids"] == [13, 8, 5, 15]
    assert hf_model.stop_token_ids(folder) == hf_model.stop_token_ids(folder, tokenizer) == set(STOP_IDS)
    assert hf_model.pad_token_id(folder) == hf_model.pad_token_id(folder, tokenizer) == PAD


def test_weights_have_the_wanted_dtype_and_layers_are_found(folder: Path) -> None:
    model = hf_model.load_model(folder, dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert not model.training
    assert len(hf_model.decoder_layers(model)) == 2


def test_threads_are_set_on_purpose() -> None:
    hf_model.use_threads(1)
    assert torch.get_num_threads() == 1
    with pytest.raises(UsageError, match="threads_per_worker=0"):
        hf_model.use_threads(0)


def test_an_engine_without_weights_does_not_sample(folder: Path) -> None:
    from rpcrl.testing.engine_kit import make_prompts

    engine = TorchRolloutEngine(folder, load_weights=False)
    with pytest.raises(UsageError, match="update_weights"):
        engine.generate(make_prompts())


def test_large_batches_are_sampled_in_parts_with_the_same_tokens(folder: Path) -> None:
    from rpcrl.testing.engine_kit import make_prompts

    prompts = make_prompts(groups=4, n=3)
    whole = TorchRolloutEngine(folder).generate(prompts)
    parts = TorchRolloutEngine(folder, max_rows=5).generate(prompts)
    for name in ("responses", "response_mask", "attention_mask", "position_ids"):
        assert torch.equal(whole.batch[name], parts.batch[name])
