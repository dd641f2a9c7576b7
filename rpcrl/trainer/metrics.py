"""Which figures does a step report, under which names, and what exactly is each?

The names are verl's, so that a dashboard made for verl shows an rpcrl run. Lengths are in tokens, times in seconds,
throughput in tokens (prompt and response) per second and device of the trainer's pool.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rpcrl.errors import BatchError

if TYPE_CHECKING:
    from torch import Tensor

    from rpcrl.batch.data_proto import DataProto

__all__ = [
    "PhaseTimer",
    "data_metrics",
    "joined_figures",
    "log_prob_difference",
    "reduce_metrics",
    "reward_metrics",
    "staleness_metrics",
    "tensors_of",
    "timing_metrics",
]

_COUNTS = ("num_updates", "skipped", "evicted_samples")
"""Last parts of the names of figures that add up over the parts of a step."""


def tensors_of(batch: DataProto) -> Any:
    """Return the batch's TensorDict; raises BatchError for a batch without tensors."""
    tensors = batch.batch
    if tensors is None:
        raise BatchError(f"a batch without tensors came to a step that reads some: {batch!r}")
    return tensors


class PhaseTimer:
    """Measures the phases of one step; a phase that is entered twice adds up."""

    def __init__(self, on_phase: Callable[[str], None] | None = None) -> None:
        self.seconds: dict[str, float] = {}
        self._on_phase = on_phase

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Time the body as ``phase``, also when it raises."""
        if self._on_phase is not None:
            self._on_phase(phase)
        start_s = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - start_s


def _spread(name: str, values: Tensor) -> dict[str, float]:
    if values.numel() == 0:
        return {}
    figures = values.float()
    return {
        f"{name}/mean": float(figures.mean()),
        f"{name}/max": float(figures.max()),
        f"{name}/min": float(figures.min()),
    }


def data_metrics(batch: DataProto, *, max_prompt_length: int, max_response_length: int) -> dict[str, float]:
    """Return scores, rewards, advantages and lengths of a step's samples.

    Reads ``token_level_scores``, ``token_level_rewards``, ``advantages``, ``returns``, ``response_mask``,
    ``attention_mask``, and ``values`` where there is a critic. ``clip_ratio`` is the share of samples at the maximal
    length, tokens counted that the policy has not sampled.
    """
    columns = tensors_of(batch)
    mask = columns["response_mask"].bool()
    response_tokens = mask.sum(-1)
    prompt_tokens = columns["attention_mask"].sum(-1) - columns["attention_mask"][:, -mask.shape[1] :].sum(-1)
    metrics = {
        **_spread("critic/score", columns["token_level_scores"].sum(-1)),
        **_spread("critic/rewards", columns["token_level_rewards"].sum(-1)),
        **_spread("critic/advantages", columns["advantages"][mask]),
        **_spread("critic/returns", columns["returns"][mask]),
        **_value_metrics(columns, mask),
        **_spread("response_length", response_tokens),
        **_spread("prompt_length", prompt_tokens),
    }
    metrics.update(_agent_metrics(batch))
    # a tool's tokens take room as well
    filled = columns["attention_mask"][:, -mask.shape[1] :].sum(-1)
    metrics["response_length/clip_ratio"] = float((filled >= max_response_length).float().mean())
    metrics["response/aborted_ratio"] = float((response_tokens == 0).float().mean())
    metrics["prompt_length/clip_ratio"] = float((prompt_tokens >= max_prompt_length).float().mean())
    return metrics


def reward_metrics(batch: DataProto, fields: Iterable[str]) -> dict[str, float]:
    """Return ``reward/<field>/mean`` of each field beside the score that the reward function gave as numbers.

    Rows for which it gave None are left out; a field of anything but numbers and truth values has no mean.
    """
    metrics = {}
    for name in sorted(set(fields) - {"response_text", "score"}):
        given = [value for value in batch.non_tensor_batch[name].tolist() if value is not None]
        if given and all(isinstance(value, int | float) for value in given):
            metrics[f"reward/{name}/mean"] = sum(map(float, given)) / len(given)
    return metrics


def _agent_metrics(batch: DataProto) -> dict[str, float]:
    """Return turns and failed samples of agent loops; nothing for samples without them."""
    turns = batch.non_tensor_batch.get("num_turns")
    if turns is None:
        return {}
    numbers = [float(number) for number in turns.tolist()]
    return {
        "num_turns/mean": sum(numbers) / len(numbers),
        "num_turns/max": max(numbers),
        "num_turns/min": min(numbers),
        "agent_loop/rows": float(len(numbers)),
        "agent_loop/failed_tasks": float(sum(reason == "failed" for reason in batch.non_tensor_batch["finish_reason"])),
    }


def _value_metrics(columns: Any, mask: Tensor) -> dict[str, float]:
    """Return ``critic/values/*`` and which share of the returns' variance the values explain (1: all of it)."""
    if "values" not in columns.keys():  # noqa: SIM118  (a TensorDict answers ``in`` for its keys only)
        return {}
    values, returns = columns["values"][mask].double(), columns["returns"][mask].double()
    metrics = _spread("critic/values", values)
    if values.numel() > 1:
        unexplained = float((returns - values).var() / (returns.var() + 1e-5))
        metrics["critic/vf_explained_var"] = 1.0 - unexplained
    return metrics


def timing_metrics(
    phases_s: Mapping[str, float], *, step_s: float, total_tokens: int, response_tokens: int, num_devices: int
) -> dict[str, float]:
    """Return ``timing_s/*``, ``timing_per_token_ms/*`` and ``perf/*`` of one step."""
    metrics = {f"timing_s/{phase}": seconds for phase, seconds in phases_s.items()}
    metrics["timing_s/step"] = step_s
    for phase, tokens in (
        ("gen", response_tokens),
        ("ref", total_tokens),
        ("values", total_tokens),
        ("adv", total_tokens),
        ("update_critic", total_tokens),
        ("update_actor", total_tokens),
    ):
        if phase in phases_s and tokens > 0:
            metrics[f"timing_per_token_ms/{phase}"] = 1000.0 * phases_s[phase] / tokens
    metrics["perf/total_num_tokens"] = float(total_tokens)
    metrics["perf/time_per_step"] = step_s
    metrics["perf/throughput"] = total_tokens / step_s / num_devices if step_s > 0 else 0.0
    return metrics


def reduce_metrics(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Make one figure of several optimizer steps' figures: ``max`` and ``min`` by name, ``lr`` the last, else the mean.

    A figure that only some parts have is reduced over those.
    """
    gathered: dict[str, list[float]] = {}
    for part in parts:
        for name, value in part.items():
            gathered.setdefault(name, []).append(float(value))
    reduced: dict[str, float] = {}
    for name, values in gathered.items():
        words = name.rsplit("/", 1)[-1].split("_")
        if "max" in words:
            reduced[name] = max(values)
        elif "min" in words:
            reduced[name] = min(values)
        elif words == ["lr"]:
            reduced[name] = values[-1]
        else:
            reduced[name] = sum(values) / len(values)
    return reduced


def log_prob_difference(batch: DataProto) -> dict[str, float]:
    """Compare the probabilities that sampler and trainer give the sampled tokens (both columns must be there)."""
    columns = tensors_of(batch)
    mask = columns["response_mask"].bool()
    if not bool(mask.any()):
        return {"training/rollout_probs_diff_valid": 0.0}
    difference = (columns["old_log_probs"][mask].exp() - columns["rollout_log_probs"][mask].exp()).abs()
    return {
        "training/rollout_probs_diff_valid": 1.0,
        "training/rollout_probs_diff_max": float(difference.max()),
        "training/rollout_probs_diff_mean": float(difference.mean()),
        "training/rollout_probs_diff_std": float(difference.std(unbiased=False)),
    }


def joined_figures(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Make one figure of those of a step's parts: as ``reduce_metrics``, but counts of updates and samples add up."""
    joined = reduce_metrics(parts)
    for name in joined:
        if name.rsplit("/", 1)[-1] in _COUNTS:
            joined[name] = sum(part.get(name, 0.0) for part in parts)
    return joined


def staleness_metrics(batch: DataProto, *, version: int) -> dict[str, float]:
    """Return ``training/off_policy/*``, in weight versions, from ``min_weight_version`` and ``max_weight_version``.

    ``trajectory_spans``: versions between a sample's first and last token; ``trajectory_staleness`` and ``_worst``: how
    much older than the trainer's weights, of ``version``, the newest and the oldest of a sample's tokens are.
    """
    import torch

    low, high = (
        torch.tensor([int(value) for value in batch.non_tensor_batch[name]])
        for name in ("min_weight_version", "max_weight_version")
    )
    return {
        **_spread("training/off_policy/trajectory_spans", high - low),
        **_spread("training/off_policy/trajectory_staleness", version - high),
        **_spread("training/off_policy/trajectory_staleness_worst", version - low),
    }
