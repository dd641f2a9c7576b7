"""Which columns does an engine read, and which part of them is real?"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rpcrl.errors import BatchError

if TYPE_CHECKING:
    from rpcrl.batch.data_proto import DataProto

__all__ = ["Sequences", "Shown", "columns", "positions"]


def columns(batch: DataProto, names: Iterable[str], *, of: str) -> list[Tensor]:
    """Return tensor columns of a batch. Raises BatchError naming those that are missing."""
    tensors = batch.batch
    present: set[str] = set() if tensors is None else set(tensors.keys())
    wanted = list(names)
    missing = [name for name in wanted if name not in present]
    if tensors is None or missing:
        raise BatchError(f"{of} needs the columns {', '.join(missing)}; the batch has {', '.join(sorted(present))}")
    return [tensors[name] for name in wanted]


def positions(attention_mask: Tensor) -> Tensor:
    """Return position ids ``[N, T]`` for a mask that is left-padded, right-padded or both: real tokens count from 0."""
    return (attention_mask.cumsum(-1) - 1).clamp(min=0)


@dataclass(frozen=True)
class Sequences:
    """Prompts and responses of some rows, trimmed to the columns that hold a real token.

    P' prompt columns and R' response columns are left of the batch's P and R.
    """

    input_ids: Tensor
    """``[n, P' + R']``"""
    attention_mask: Tensor
    """``[n, P' + R']``, int64"""
    response_columns: int
    """R'"""
    padded_response_columns: int
    """R of the batch; results are padded back to it."""

    @classmethod
    def of(cls, input_ids: Tensor, attention_mask: Tensor, response_length: int) -> Sequences:
        """Trim ``[n, P + R]`` tensors whose last ``response_length`` columns are responses."""
        real = attention_mask.bool().any(0)
        prompt_length = input_ids.shape[1] - response_length
        found = real.nonzero().flatten()
        first, last = (int(found[0]), int(found[-1])) if found.numel() else (prompt_length - 1, prompt_length - 1)
        # One prompt column stays whatever happens: its hidden state predicts the first response token.
        start = max(min(first, prompt_length - 1), 0)
        end = max(last + 1, prompt_length)
        return cls(
            input_ids[:, start:end],
            attention_mask[:, start:end].to(torch.int64),
            end - prompt_length,
            response_length,
        )

    @property
    def responses(self) -> Tensor:
        """Response tokens ``[n, R']``."""
        return self.input_ids[:, self.input_ids.shape[1] - self.response_columns :]

    @property
    def response_mask(self) -> Tensor:
        """Which response columns hold a token, ``[n, R']`` bool."""
        return self.attention_mask[:, self.attention_mask.shape[1] - self.response_columns :].bool()

    def pad_back(self, values: Tensor) -> Tensor:
        """Return ``[n, R']`` values as ``[n, R]``, zero where there is no token."""
        kept = torch.where(self.response_mask, values, torch.zeros((), dtype=values.dtype, device=values.device))
        return torch.nn.functional.pad(kept, (0, self.padded_response_columns - self.response_columns))


@dataclass(frozen=True)
class Shown:
    """What the model sees of a micro-batch, on the device; the last token, which predicts nothing, is left out."""

    whole: Sequences
    """Prompts and responses, trimmed."""
    arguments: dict[str, Any]
    """Of the model's call."""

    @property
    def width(self) -> int:
        """Number of the last positions whose outputs belong to response tokens; at least 1."""
        return max(self.whole.response_columns, 1)

    @property
    def targets(self) -> Tensor:
        """The tokens that the last ``width`` positions predict, ``[n, width]``."""
        return self.whole.input_ids[:, self.whole.input_ids.shape[1] - self.width :]

    def pad_back(self, values: Tensor) -> Tensor:
        """Return ``[n, width]`` values of those positions as ``[n, R]``, zero where there is no token."""
        return self.whole.pad_back(values[:, : self.whole.response_columns])

    @classmethod
    def of(cls, input_ids: Tensor, attention_mask: Tensor, response_length: int) -> Shown:
        """Show ``[n, P + R]`` tensors, trimmed, whose last ``response_length`` columns are responses."""
        part = Sequences.of(input_ids, attention_mask, response_length)
        ids, mask = part.input_ids, part.attention_mask
        last = ids.shape[1] - 1 if part.response_columns else ids.shape[1]
        arguments = {
            "input_ids": ids[:, :last],
            "attention_mask": mask[:, :last],
            "position_ids": positions(mask)[:, :last],
            "use_cache": False,
        }
        return cls(part, arguments)
