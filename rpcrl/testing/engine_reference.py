"""What should an engine compute? The slow answer: float64, one process, one unpadded row at a time, no cache."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rpcrl.engines.hf_model import load_model

if TYPE_CHECKING:
    from rpcrl.batch.data_proto import DataProto

__all__ = ["Reference", "Update", "columns_of", "rows_of"]


@dataclass(frozen=True)
class Update:
    """What one optimizer step should report."""

    loss: float
    grad_norm: float


@dataclass(frozen=True)
class Row:
    """One sample without padding."""

    prompt: list[int]
    response: list[int]


def columns_of(batch: DataProto) -> Any:
    """Return the tensor columns of a batch that has some."""
    return batch.batch


def rows_of(batch: DataProto) -> list[Row]:
    """Return a batch's samples without their padding."""
    tensors = columns_of(batch)
    responses, ids, mask = tensors["responses"], tensors["input_ids"], tensors["attention_mask"].bool()
    width = ids.shape[1] - responses.shape[1]
    return [
        Row(ids[i, :width][mask[i, :width]].tolist(), ids[i, width:][mask[i, width:]].tolist())
        for i in range(ids.shape[0])
    ]


@dataclass
class Reference:
    """A causal LM in float64 with AdamW and clipping written out from their papers."""

    folder: Path
    betas: tuple[float, float] = (0.9, 0.99)
    eps: float = 1e-8
    weight_decay: float = 0.0
    grad_clip: float = 1.0
    clip: tuple[float, float] = (0.2, 0.2)
    dual_clip: float = 3.0
    steps: int = 0
    moments: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.model: Any = load_model(self.folder, dtype=torch.float64)

    def logits(self, tokens: Sequence[int]) -> Tensor:
        """Return next-token logits ``[T, V]`` of one sequence."""
        logits: Tensor = self.model(input_ids=torch.tensor([list(tokens)]), use_cache=False).logits[0]
        return logits

    def log_probs(self, row: Row, temperature: float = 1.0) -> Tensor:
        """Return the log-probs of a row's response tokens, with gradient."""
        logits = self.logits([*row.prompt, *row.response])[len(row.prompt) - 1 : -1] / temperature
        chosen = torch.tensor(row.response).unsqueeze(-1)
        return torch.log_softmax(logits, dim=-1).gather(-1, chosen).squeeze(-1)

    def greedy(self, prompt: Sequence[int], length: int, stop: frozenset[int]) -> list[int]:
        """Return the likeliest continuation, at most ``length`` tokens, token by token."""
        response: list[int] = []
        while len(response) < length and (not response or response[-1] not in stop):
            response.append(int(self.logits([*prompt, *response])[-1].argmax()))
        return response

    def update(self, batch: DataProto, *, lr: float) -> Update:
        """Make one step on a whole mini-batch with PPO's clipped loss, token mean."""
        columns = columns_of(batch)
        mask = columns["response_mask"].bool()
        total = torch.zeros((), dtype=torch.float64)
        for index, row in enumerate(rows_of(batch)):
            old = columns["old_log_probs"][index][mask[index]].double()
            advantages = columns["advantages"][index][mask[index]].double()
            ratios = (self.log_probs(row) - old).exp()
            for ratio, advantage in zip(ratios, advantages, strict=True):
                clipped = ratio.clamp(1 - self.clip[0], 1 + self.clip[1])
                objective = torch.minimum(ratio * advantage, clipped * advantage)
                if advantage < 0:
                    objective = torch.maximum(objective, self.dual_clip * advantage)
                total = total - objective
        loss = total / int(mask.sum())
        self.model.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        return Update(loss.item(), self._adamw(lr))

    def _adamw(self, lr: float) -> float:
        """Clip and step (Loshchilov and Hutter 2019); returns the norm before clipping."""
        named = [(name, parameter) for name, parameter in self.model.named_parameters()]
        norm = math.sqrt(sum(float(parameter.grad.square().sum()) for _, parameter in named))
        scale = self.grad_clip / (norm + 1e-6) if norm > self.grad_clip > 0 else 1.0
        self.steps += 1
        first, second = self.betas
        with torch.no_grad():
            for name, parameter in named:
                gradient = parameter.grad * scale
                zeros = torch.zeros_like(parameter)
                mean, square = self.moments.get(name, (zeros, zeros))
                mean = first * mean + (1 - first) * gradient
                square = second * square + (1 - second) * gradient.square()
                self.moments[name] = (mean, square)
                corrected = square / (1 - second**self.steps)
                parameter.mul_(1 - lr * self.weight_decay)
                parameter.sub_(lr * (mean / (1 - first**self.steps)) / (corrected.sqrt() + self.eps))
        return norm

    def parameters(self) -> dict[str, Tensor]:
        """Return copies of the float64 parameters by name, tied ones once."""
        return {name: parameter.detach().clone() for name, parameter in self.model.named_parameters()}
