"""What must a training engine and a rollout engine provide?

Roles (``rpcrl.roles``) are thin workers over these two interfaces; ``rpcrl.testing.engine_kit`` checks every
implementation. Batches are DataProto; shapes: N samples, P prompt columns (left-padded), R response columns
(right-padded).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    from rpcrl.batch.data_proto import DataProto
    from rpcrl.engines.requests import SampleOutput, SampleRequest

__all__ = ["LossFn", "NamedTensors", "RolloutEngine", "TrainEngine"]

NamedTensors = Iterable[tuple[str, "torch.Tensor"]]

LossFn = Callable[["torch.Tensor", "torch.Tensor", "DataProto"], "tuple[torch.Tensor, Mapping[str, torch.Tensor]]"]
"""(log_prob [n, R], entropy [n, R], micro-batch) → (loss, sums of metrics).

The loss is normalised by the *mini-batch's* global counts in ``meta_info`` (``batch_num_tokens``,
``global_batch_size``, ``dp_size``), so that its sum over micro-batches, averaged over dp ranks, depends on
neither. The engine fills the counts in and treats the metrics alike. A loss function with an attribute
``needs_entropy_gradient`` that is False gets an entropy without a graph.
"""


class TrainEngine(Protocol):
    """One dp rank of a trainable model."""

    @property
    def weight_version(self) -> int:
        """Number of ``train_mini_batch`` calls since the start of the run."""
        ...

    def compute_log_prob(
        self, batch: DataProto, *, micro_batch_size: int | None = None, max_tokens: int | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return log-probs and entropy of the responses, each ``[N, R]`` float32, without gradient.

        A pass takes ``micro_batch_size`` rows, or as many as have ``max_tokens`` positions, or (neither) all.
        """
        ...

    def train_mini_batch(
        self,
        batch: DataProto,
        loss_fn: LossFn,
        *,
        micro_batch_size: int | None = None,
        max_tokens: int | None = None,
        lr: float,
    ) -> Mapping[str, float]:
        """Make one optimizer step on this rank's rows, in passes as those of ``compute_log_prob``.

        Returns ``loss``, ``grad_norm``, ``lr`` and the loss's metrics.

        Collective over the dp ranks. A non-finite gradient norm skips the step and is reported in
        ``skipped``.
        """
        ...

    def weights(self, *, bucket_bytes: int) -> Iterator[list[tuple[str, torch.Tensor]]]:
        """Yield full tensors under Hugging Face names, bucket by bucket; valid until the next bucket.

        Collective over the dp ranks.
        """
        ...

    def save(self, directory: Path) -> Mapping[str, object]:
        """Write this rank's model and optimizer shards as safetensors; returns this rank's manifest entry."""
        ...

    def load(self, directory: Path, manifest: Mapping[str, object]) -> None:
        """Restore what ``save`` wrote, bit for bit, for the same world."""
        ...

    def export(self, directory: Path) -> None:
        """Write a Hugging Face checkpoint from rank 0 (collective)."""
        ...


class RolloutEngine(Protocol):
    """One replica of a model that samples: whole batches by ``generate``, single requests by ``add`` and ``step``.

    One thread uses it. Weights may change between two steps: requests in flight go on with the new ones, and
    each token keeps the version that sampled it.
    """

    @property
    def weight_version(self) -> int:
        """Version of the weights that would sample now."""
        ...

    @property
    def awake(self) -> frozenset[str]:
        """Which of ``weights`` and ``kv_cache`` are resident."""
        ...

    def account(self) -> dict[str, object]:
        """Return ``engine`` (its name), and what else a reader of the run wants to know of its start and memory."""
        ...

    def generate(self, prompts: DataProto) -> DataProto:
        """Sample one response per row.

        In: ``input_ids``/``attention_mask`` [N, P]; non-tensor ``uid`` and ``sample_index``; meta_info
        ``do_sample``, ``temperature``, ``top_p``, ``top_k``, ``response_length``, ``seed``, ``global_steps``.
        Out: ``prompts`` [N, P], ``responses`` [N, R], ``response_mask`` [N, R], ``input_ids``/
        ``attention_mask``/``position_ids`` [N, P+R], ``rollout_log_probs`` [N, R] float32 (of the
        distribution that was sampled from); non-tensor ``finish_reason``; meta_info ``weight_version``.
        Noise is keyed by (seed, step, uid, sample_index, position): tokens do not depend on batching or rank.
        """
        ...

    def sleep(self, tags: Sequence[str] = ("weights", "kv_cache")) -> int:
        """Free what the tags name; returns the freed bytes."""
        ...

    def wake_up(self, tags: Sequence[str] = ("weights", "kv_cache")) -> None:
        """Take the memory back; ``weights`` hold nothing until ``update_weights``.

        After a failure the engine is asleep as before.
        """
        ...

    def update_weights(self, buckets: Iterable[NamedTensors], *, version: int) -> None:
        """Take new weights in place, then reset every cache and carry ``version``."""
        ...

    def reset_caches(self) -> None:
        """Forget every kept key and value that a later request could be served from."""
        ...

    # -- single requests: an engine is stepped while it has unfinished ones

    def add(self, requests: Sequence[SampleRequest]) -> None:
        """Take requests; they advance with the next ``step``. Raises UsageError, with none taken, for bad ones."""
        ...

    @property
    def num_unfinished(self) -> int:
        """Requests that were added and have neither ended nor been aborted."""
        ...

    def step(self) -> list[SampleOutput]:
        """Advance every running request by about one token; returns those that have ended with it."""
        ...

    def abort(self, request_ids: Sequence[str] | None = None) -> list[SampleOutput]:
        """End requests (None: all) with ``finish_reason`` "abort" and what they have so far; unknown ids are ignored.

        ``resumed`` of the request goes on from there.
        """
        ...
