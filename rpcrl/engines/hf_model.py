"""How does a local Hugging Face folder become a model and a tokenizer?

Nothing here ever asks a hub: a path that is not a folder of this machine is an error before anything heavy loads.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rpcrl.errors import UsageError

if TYPE_CHECKING:
    import torch

__all__ = [
    "DTYPES",
    "build_model",
    "copy_tokenizer",
    "decoder_layers",
    "load_config",
    "load_model",
    "load_tokenizer",
    "load_value_model",
    "model_folder",
    "num_labels",
    "pad_token_id",
    "quiet",
    "stop_token_ids",
    "tokenizer_folder",
    "torch_dtype",
    "use_activation_checkpoints",
    "use_threads",
]

DTYPES = ("float32", "bfloat16", "float16", "float64")
WEIGHT_PATTERNS = ("*.safetensors", "*.bin")
NOT_TOKENIZER = ("config.json", "generation_config.json", "model.safetensors.index.json", "README.md", ".gitattributes")


def use_threads(count: int) -> None:
    """Give PyTorch's operators ``count`` threads in this process.

    One is right unless a core is idle for each: OpenMP threads spin while they wait, and two of them beside any
    other load are ten to eighty times slower than one.
    """
    import torch

    if count < 1:
        raise UsageError(f"threads_per_worker={count} must be 1 or more")
    if torch.get_num_threads() != count:
        torch.set_num_threads(count)


def torch_dtype(name: str) -> torch.dtype:
    """Return the dtype of a setting such as ``float32``. Raises UsageError for an unknown one."""
    import torch

    if name not in DTYPES:
        raise UsageError(f"actor_rollout_ref.model.dtype={name!r} is not one of {', '.join(DTYPES)}")
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def model_folder(path: str | Path) -> Path:
    """Return ``path`` as a folder with a model in it; imports nothing heavy.

    Raises UsageError when it is no folder here, has no readable ``config.json``, or no weights.
    """
    folder = Path(path).expanduser()
    setting = f"actor_rollout_ref.model.path={str(path)!r}"
    if not folder.is_dir():
        raise UsageError(
            f"{setting}: no such folder on this machine. rpcrl loads models from local Hugging Face folders only; "
            "download or convert the model first and give the folder"
        )
    if not (folder / "config.json").is_file():
        raise UsageError(f"{setting}: the folder has no config.json, so it is not a Hugging Face model folder")
    if not any(next(folder.glob(pattern), None) for pattern in WEIGHT_PATTERNS):
        raise UsageError(f"{setting}: the folder has no weights ({' or '.join(WEIGHT_PATTERNS)})")
    try:
        json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except ValueError as error:
        raise UsageError(f"{setting}: its config.json is not JSON: {error}") from None
    return folder


def tokenizer_folder(path: str | Path) -> Path:
    """Return ``path`` as a folder with a model and its tokenizer in it; raises UsageError like ``model_folder``."""
    folder = model_folder(path)
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")):
        raise UsageError(f"actor_rollout_ref.model.path={str(path)!r}: the folder has no tokenizer.json")
    return folder


@contextlib.contextmanager
def quiet(*, reports: bool = True) -> Iterator[None]:
    """Keep Transformers' progress bars off the console meanwhile; many processes would write over each other.

    Without ``reports`` its warnings stay away too, where they tell what is meant to be so.
    """
    from transformers.utils import logging

    bar_was_on, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    if not reports:
        logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bar_was_on:
            logging.enable_progress_bar()


def load_config(path: str | Path) -> Any:
    """Return the Transformers configuration of a model folder."""
    folder = model_folder(path)
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(folder, local_files_only=True)


def num_labels(path: str | Path) -> int:
    """Return the labels that a model folder's config.json names; Transformers takes 2 where it names none."""
    config = json.loads((model_folder(path) / "config.json").read_text(encoding="utf-8"))
    return len(config["id2label"]) if isinstance(config.get("id2label"), dict) else 2


def build_model(config: Any, *, dtype: torch.dtype) -> Any:
    """Return a causal LM of ``config`` in evaluation mode; its weights are arbitrary."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def load_model(path: str | Path, *, dtype: torch.dtype) -> Any:
    """Return the causal LM of a model folder, on the CPU, in evaluation mode (dropout stays off)."""
    folder = model_folder(path)
    from transformers import AutoModelForCausalLM

    with quiet():
        return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True).eval()


def load_value_model(path: str | Path, *, dtype: torch.dtype) -> Any:
    """Return the model of a folder with one number for each token instead of logits, on the CPU, in evaluation mode.

    The head is that of Transformers' token classification. One that the folder does not have, as that of a language
    model's, is zero: a fresh critic expects nothing, whatever the seed and the rank. Raises UsageError for an
    architecture that Transformers has no such head for.
    """
    folder = model_folder(path)
    from transformers import AutoModelForTokenClassification

    config = load_config(folder)
    if type(config) not in AutoModelForTokenClassification._model_mapping:
        raise UsageError(
            f"critic.model.path={str(path)!r}: Transformers has no token classification for models of type "
            f"{config.model_type!r}, and a critic is one with one class; choose another model for the critic, or an "
            "estimator that needs none (algorithm.adv_estimator=grpo)"
        )
    with quiet(reports=False):
        model, report = AutoModelForTokenClassification.from_pretrained(
            folder, num_labels=1, dtype=dtype, local_files_only=True, output_loading_info=True
        )
    missing = {name: tensor for name, tensor in model.named_parameters() if name in report["missing_keys"]}
    body = [name for name in missing if name.startswith(f"{model.base_model_prefix}.")]
    if body:
        raise UsageError(f"critic.model.path={str(path)!r}: the folder's weights lack {', '.join(body[:8])}")
    for tensor in missing.values():
        tensor.data.zero_()
    return model.eval()


def load_tokenizer(path: str | Path) -> Any:
    """Return the tokenizer of a model folder, set to pad on the left.

    Raises UsageError when the folder has none.
    """
    folder = tokenizer_folder(path)
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    tokenizer.padding_side = "left"
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def _token_ids(folder: Path, key: str) -> list[int]:
    """Return a token id setting of the folder: of generation_config.json if it is there, else of config.json."""
    for name in ("generation_config.json", "config.json"):
        file = folder / name
        value = json.loads(file.read_text(encoding="utf-8")).get(key) if file.is_file() else None
        if value is not None:
            return [int(item) for item in value] if isinstance(value, list) else [int(value)]
    return []


def stop_token_ids(path: str | Path, tokenizer: Any = None) -> frozenset[int]:
    """Return every id that ends a response: of the generation configuration and, if given, the tokenizer."""
    ids = set(_token_ids(model_folder(path), "eos_token_id"))
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        ids.add(int(tokenizer.eos_token_id))
    return frozenset(ids)


def pad_token_id(path: str | Path, tokenizer: Any = None) -> int:
    """Return the id that fills responses up: the tokenizer's or the configuration's, else a stop id, else 0."""
    if tokenizer is not None and tokenizer.pad_token_id is not None:
        return int(tokenizer.pad_token_id)
    folder = model_folder(path)
    return next(iter(_token_ids(folder, "pad_token_id") or sorted(stop_token_ids(folder)) or [0]))


def decoder_layers(model: Any) -> list[Any]:
    """Return the repeated blocks of a Transformers model, in order; empty when it names none."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    return [module for module in model.modules() if type(module).__name__ in names]


def use_activation_checkpoints(model: Any) -> None:
    """Make a model keep only the inputs of its layers for the backward pass, and compute the rest of them again.

    Dropout stays off: of the layers, only their own switch is set to training, not that of the parts within.
    Raises UsageError for a model without such layers.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise UsageError(
            f"enable_gradient_checkpointing=true: {type(model).__name__} has no layers that can be checkpointed; set "
            "actor_rollout_ref.model.enable_gradient_checkpointing=false"
        )
    model.gradient_checkpointing_enable({"use_reentrant": False})
    for layer in layers:
        layer.training = True


def copy_tokenizer(source: str | Path, target: Path) -> None:
    """Copy what belongs to the tokenizer (all small files but weights and model configuration)."""
    for file in sorted(model_folder(source).iterdir()):
        is_text = file.suffix in (".json", ".txt", ".jinja", ".model")
        if file.is_file() and is_text and file.name not in NOT_TOKENIZER:
            shutil.copyfile(file, target / file.name)
