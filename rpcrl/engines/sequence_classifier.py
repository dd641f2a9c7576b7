"""How good is a text? A Hugging Face model with one number for each sequence answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rpcrl.engines.hf_model import load_config, load_tokenizer, model_folder, quiet, torch_dtype, use_threads
from rpcrl.errors import BatchError, UsageError

if TYPE_CHECKING:
    import torch

__all__ = ["KEY", "SequenceClassifier"]

KEY = "reward.reward_model.model_path"


class SequenceClassifier:
    """A model of ``AutoModelForSequenceClassification`` with one label, its tokenizer and, if it has one, template."""

    def __init__(
        self, model_path: str | Path, *, device: str = "cpu", dtype: str = "float32", threads: int = 1
    ) -> None:
        """Load the folder. Raises UsageError when it is no such model, has several labels or lacks weights."""
        folder = model_folder(model_path)
        import torch

        use_threads(threads)
        self._torch = torch
        self._device = torch.device(device)
        self._tokenizer = load_tokenizer(folder)
        self._tokenizer.padding_side = "right"
        self._model = _loaded(folder, torch_dtype(dtype)).to(self._device).requires_grad_(False)
        # The model reads the score at the last token that is not padding.
        self._model.config.get_text_config().pad_token_id = self._tokenizer.pad_token_id
        self._limit: int | None = getattr(self._model.config.get_text_config(), "max_position_embeddings", None)

    def text_of(self, prompt: str | Sequence[Mapping[str, Any]], response: str) -> str:
        """Return what the model reads of a prompt and its answer.

        Chat messages go through the model's own template, the answer as the assistant's; without a template their
        contents stand on lines of their own before the answer. A plain string is continued by the answer.
        """
        if isinstance(prompt, str):
            return prompt + response
        messages = [*prompt, {"role": "assistant", "content": response}]
        if self._tokenizer.chat_template:
            return str(self._tokenizer.apply_chat_template(messages, tokenize=False))
        return "\n".join(str(message["content"]) for message in messages)

    def score(self, texts: Sequence[str], *, micro_batch_size: int | None = None) -> list[float]:
        """Return one number a text, in their order; a pass takes ``micro_batch_size`` texts (None: all).

        Raises BatchError for a text that is longer than the model's positions: nothing is cut off.
        """
        special = not self._tokenizer.chat_template
        ids = [self._tokenizer.encode(text, add_special_tokens=special) or [self._pad] for text in texts]
        longest = max((len(row) for row in ids), default=0)
        if self._limit is not None and longest > self._limit:
            row = next(number for number, row in enumerate(ids) if len(row) == longest)
            raise BatchError(
                f"the reward model reads at most {self._limit} tokens (max_position_embeddings), and text {row} of "
                f"{len(texts)} has {longest}; set data.max_prompt_length and data.max_response_length smaller"
            )
        size = micro_batch_size or max(len(ids), 1)
        scores: list[float] = []
        for start in range(0, len(ids), size):
            scores += self._pass(ids[start : start + size])
        return scores

    @property
    def _pad(self) -> int:
        return int(self._tokenizer.pad_token_id or 0)

    def _pass(self, rows: list[list[int]]) -> list[float]:
        torch = self._torch
        width = max(len(row) for row in rows)
        input_ids = torch.tensor([row + [self._pad] * (width - len(row)) for row in rows], device=self._device)
        mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows], device=self._device)
        with torch.inference_mode():
            logits = self._model(input_ids=input_ids, attention_mask=mask).logits
        return [float(value) for value in logits[:, 0].float().tolist()]


def _loaded(folder: Path, dtype: torch.dtype) -> Any:
    from transformers import AutoModelForSequenceClassification

    config = load_config(folder)
    if type(config) not in AutoModelForSequenceClassification._model_mapping:
        raise UsageError(
            f"{KEY}={str(folder)!r}: Transformers has no sequence classification for models of type "
            f"{config.model_type!r}"
        )
    if config.num_labels != 1:
        raise UsageError(
            f"{KEY}={str(folder)!r}: a reward model has 1 label, whose logit is the score; this one has "
            f"{config.num_labels}"
        )
    with quiet(reports=False):
        model, report = AutoModelForSequenceClassification.from_pretrained(
            folder, dtype=dtype, local_files_only=True, output_loading_info=True
        )
    if report["missing_keys"]:
        names = ", ".join(sorted(report["missing_keys"])[:8])
        raise UsageError(
            f"{KEY}={str(folder)!r}: the folder's weights lack {names}; a head that is made up scores noise"
        )
    return model.eval()
