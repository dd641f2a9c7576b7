"""How good is the policy on held-out prompts, which training never sees?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rpcrl.trainer import steps
from rpcrl.trainer.metrics import tensors_of

if TYPE_CHECKING:
    from rpcrl.batch.data_proto import DataProto

__all__ = ["HELDOUT_ACCURACY", "Validation", "validate"]

HELDOUT_ACCURACY = "heldout/accuracy"
"""Mean accuracy over all held-out prompts and their samples."""


@dataclass(frozen=True)
class Validation:
    """The figures of one evaluation, and the first few rows for a human to read."""

    metrics: dict[str, float]
    samples: list[dict[str, object]]

    @property
    def accuracy(self) -> float:
        """Mean accuracy over all held-out prompts."""
        return self.metrics[HELDOUT_ACCURACY]


def validate(
    rollout: Any,
    reward: Callable[[DataProto], DataProto],
    heldout: DataProto,
    sampling: steps.Sampling,
    *,
    step: int,
    batch_size: int | None = None,
    num_samples: int = 0,
) -> Validation:
    """Answer every held-out prompt ``sampling.n`` times and score the answers with ``reward`` (as ``steps.reward``).

    ``batch_size`` prompts are generated at once (None: all). Accuracy is the reward function's ``acc`` where it
    returns one, else its score. Metrics: ``heldout/accuracy``; per data source
    ``val-core/<source>/acc/mean@n`` and ``val-aux/<source>/reward/mean@n``; ``val-aux/response_length/mean``.
    """
    size = batch_size or len(heldout)
    accuracies: dict[str, list[float]] = {}
    scores: dict[str, list[float]] = {}
    samples: list[dict[str, object]] = []
    response_tokens = 0
    for start in range(0, len(heldout), size):
        batch = steps.generate(rollout, heldout[start : start + size], sampling, step=step, validate=True)
        batch = reward(batch)
        response_tokens += int(tensors_of(batch)["response_mask"].sum())
        columns = batch.non_tensor_batch
        accuracy = columns["acc"] if "acc" in columns else columns["score"]
        for source, right, score in zip(columns["data_source"], accuracy, columns["score"], strict=True):
            accuracies.setdefault(str(source), []).append(float(right))
            scores.setdefault(str(source), []).append(float(score))
        if len(samples) < num_samples:
            samples += sample_rows(batch, num_samples - len(samples))
    count = sum(len(values) for values in accuracies.values())
    metrics = {HELDOUT_ACCURACY: sum(sum(values) for values in accuracies.values()) / count}
    for source, values in accuracies.items():
        metrics[f"val-core/{source}/acc/mean@{sampling.n}"] = sum(values) / len(values)
        metrics[f"val-aux/{source}/reward/mean@{sampling.n}"] = sum(scores[source]) / len(scores[source])
    metrics["val-aux/response_length/mean"] = response_tokens / count
    return Validation(metrics, samples)


def sample_rows(
    batch: DataProto, count: int, *, extra: Sequence[str] = ("finish_reason", "num_turns")
) -> list[dict[str, object]]:
    """Return the first ``count`` rows of a scored batch as plain objects: prompt, response, score, truth."""
    columns = batch.non_tensor_batch
    names = ["uid", "sample_index", "data_source", "raw_prompt", "response_text", "score", "ground_truth", *extra]
    present = [name for name in names if name in columns]
    return [{name: columns[name][row] for name in present} for row in range(min(count, len(batch)))]
