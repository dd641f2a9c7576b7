"""How does one dp rank train its part of a model, with a result that does not depend on the number of ranks?

What the model gives out (log-probs, values) is a subclass's business: ``rpcrl.engines.fsdp``, ``rpcrl.engines.critic``.

Gradients are summed over micro-batches without communication and averaged over the ranks once, in the last backward
pass; the loss is normalised by the whole mini-batch's counts (``rpcrl.algorithms.aggregate``), so the update is the
one that a single process would make. Weights and optimizer state are float32 whatever the computation's dtype is.
"""

from __future__ import annotations

import contextlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rpcrl.algorithms.aggregate import BatchCounts
from rpcrl.algorithms.partition import fit_groups, split_to
from rpcrl.engines import shards
from rpcrl.engines.batches import Shown, columns
from rpcrl.engines.hf_model import (
    copy_tokenizer,
    model_folder,
    quiet,
    torch_dtype,
    use_activation_checkpoints,
    use_threads,
)
from rpcrl.engines.outgoing import full_weights, sent_weights
from rpcrl.engines.packing import Packed, attends_in_blocks, prepare_packing
from rpcrl.engines.shard_files import describe_files, verify_files
from rpcrl.engines.sharding import data_parallel
from rpcrl.errors import BatchError, CheckpointError, UsageError

if TYPE_CHECKING:
    from rpcrl.batch.data_proto import DataProto

__all__ = ["Sharded"]

MOMENTS = ("exp_avg", "exp_avg_sq")


Outputs = tuple[Tensor, ...]


class Sharded(ABC):
    """A model whose parameters, gradients and optimizer state are spread over the dp ranks.

    All ranks of the default process group (none: a world of one) build it, and call its methods, together.
    """

    def __init__(
        self,
        model_path: str | Path,
        *,
        dtype: str = "float32",
        device: str = "cpu",
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        eps: float = 1e-8,
        grad_clip: float = 1.0,
        trainable: bool = True,
        packed: bool = False,
        checkpoint_activations: bool = False,
        strategy: str = "fsdp2",
        reduce_dtype: str = "float32",
        threads: int = 1,
    ) -> None:
        """Load the folder's weights as float32 (float64 for ``dtype="float64"``) and shard them over the ranks.

        ``dtype`` is what the model computes in (below float32 by autocast). ``grad_clip`` bounds the norm of the
        whole gradient; 0 does not clip. ``trainable=False`` makes a model that only scores, e.g. a reference.
        ``packed`` computes rows side by side without their padding; ``checkpoint_activations`` keeps only the layers'
        inputs for the backward pass. ``strategy`` is fsdp2, ddp (every rank holds the whole model) or auto (by the
        model's size), ``reduce_dtype`` what gradients are added up in.
        Raises UsageError for a folder that is no model, before anything heavy loads; and for a model whose rows cannot
        be packed.
        """
        self._folder = model_folder(model_path)
        use_threads(threads)
        compute = torch_dtype(dtype)
        wide = torch.float64 if compute is torch.float64 else torch.float32
        self._autocast = None if compute is wide else compute
        self._device = torch.device(device)
        self._model = self._load(self._folder, wide).to(self._device).requires_grad_(trainable)
        size = sum(parameter.numel() for parameter in self._model.parameters())
        self._dp = data_parallel(strategy, self._device, num_parameters=size)
        self._packed = packed
        if packed:
            prepare_packing(self._model)
        if checkpoint_activations and trainable:
            use_activation_checkpoints(self._model)
        # Below float32 a sharded model gathers and computes in its own copies of that type, any other by autocast.
        if self._dp.shard(self._model, compute=self._autocast, reduce=torch_dtype(reduce_dtype)):
            self._autocast = None
        self.computed_tokens = 0
        """Positions that the model was run on since the engine was made."""
        self.computed_pad_tokens = 0
        """Those of them that were padding."""
        self._grad_clip = grad_clip
        self._version = 0
        self._optimizer: torch.optim.AdamW | None = None
        # The optimizer steps the plain tensors of this rank's shards, which share memory with the parameters:
        # AdamW works element by element, and a step through DTensor's dispatch costs a small model milliseconds.
        self._locals = {name: shards.local_part(parameter) for name, parameter in self._model.named_parameters()}
        if trainable:
            self._optimizer = torch.optim.AdamW(
                list(self._locals.values()), lr=0.0, betas=betas, eps=eps, weight_decay=weight_decay, fused=True
            )

    @property
    def weight_version(self) -> int:
        """Number of ``train_mini_batch`` calls since the start of the run."""
        return self._version

    @property
    def dp_size(self) -> int:
        """Number of ranks that train this model together."""
        return self._dp.size

    # ---------------------------------------------------------------- forward

    @abstractmethod
    def _load(self, folder: Path, dtype: torch.dtype) -> Any:
        """Return the model of a folder, on the CPU, in evaluation mode."""

    @abstractmethod
    def _outputs(self, micro: DataProto, loss_fn: Callable[..., Any]) -> Outputs:
        """Return what a loss function gets before the micro-batch, each ``[n, R]``, with gradient."""

    def _scored(
        self,
        batch: DataProto,
        micro_batch_size: int | None,
        max_tokens: int | None,
        outputs: Callable[[DataProto], Outputs],
    ) -> list[Tensor]:
        """Return the outputs for all rows, float32, on the CPU and without gradient (collective)."""
        groups = self._cut(batch, micro_batch_size, max_tokens)
        parts: list[Outputs] = []
        try:
            with torch.no_grad():
                parts.extend(outputs(micro) for micro in self._micro_batches(batch, groups))
        finally:
            self._dp.reshard()
        results = [torch.cat([tensor.float() for tensor in column]).cpu() for column in zip(*parts, strict=True)]
        if max_tokens is None:
            return results
        back = torch.tensor([row for group in groups for row in group]).argsort()
        return [result[back] for result in results]

    def _cut(self, batch: DataProto, size: int | None, max_tokens: int | None) -> list[Sequence[int]]:
        """Return the rows of each micro-batch: at most ``size`` rows, or ``max_tokens`` positions, or all at once.

        By tokens the groups are balanced, and every rank makes the same number of them (collective), as the model's
        forward pass is collective too.
        """
        rows = len(batch)
        if rows == 0:
            raise BatchError("the engine got a batch without rows")
        if max_tokens is None:
            size = rows if size is None else size
            if size < 1:
                raise UsageError(f"micro_batch_size={size} must be 1 or more")
            return [range(start, min(start + size, rows)) for start in range(0, rows, size)]
        (mask,) = columns(batch, ("attention_mask",), of="batching by tokens")
        if self._packed:
            lengths = mask.sum(-1).tolist()
        else:
            lengths = [int(mask.bool().any(0).sum())] * rows
        groups = fit_groups(lengths, max_tokens)
        most = max(count for (count,) in self._dp.gather([len(groups)]))
        return list(split_to(groups, most))

    def _micro_batches(self, batch: DataProto, groups: Sequence[Sequence[int]]) -> Iterator[DataProto]:
        for group in groups:
            if isinstance(group, range):
                yield batch.slice(group.start, group.stop)
            else:
                yield batch.select_idxs(list(group))

    def _shown(self, micro: DataProto) -> Shown | Packed:
        """Return what the model sees of a micro-batch, on the device, and count it."""
        input_ids, attention_mask, responses = columns(
            micro, ("input_ids", "attention_mask", "responses"), of="scoring"
        )
        ids, mask = input_ids.to(self._device), attention_mask.to(self._device)
        if self._packed:
            packed = Packed.of(ids, mask, responses.shape[1], in_blocks=attends_in_blocks(self._model))
            self.computed_tokens += packed.input_ids.numel()
            return packed
        shown = Shown.of(ids, mask, responses.shape[1])
        seen = shown.arguments["attention_mask"]
        self.computed_tokens += seen.numel()
        self.computed_pad_tokens += seen.numel() - int(seen.sum())
        return shown

    def _computing(self) -> contextlib.AbstractContextManager[object]:
        if self._autocast is None:
            return contextlib.nullcontext()
        return torch.autocast(self._device.type, dtype=self._autocast)

    # ---------------------------------------------------------------- training

    def train_mini_batch(
        self,
        batch: DataProto,
        loss_fn: Callable[..., Any],
        *,
        micro_batch_size: int | None = None,
        max_tokens: int | None = None,
        lr: float,
    ) -> Mapping[str, float]:
        """Make one optimizer step on this rank's rows; see ``TrainEngine.train_mini_batch`` (collective).

        ``loss_fn`` is called with the model's outputs and the micro-batch, and returns (loss, sums of metrics).
        Raises BatchError on every rank when their numbers of rows differ, UsageError for a model that only scores.
        """
        if self._optimizer is None:
            raise UsageError("train_mini_batch: this engine was made with trainable=False, it only scores")
        batch = self._with_counts(batch)
        micros = list(self._micro_batches(batch, self._cut(batch, micro_batch_size, max_tokens)))
        sums: dict[str, Tensor] = {}
        try:
            for index, micro in enumerate(micros):
                self._dp.reduce_gradients(index == len(micros) - 1)
                loss, metrics = loss_fn(*self._outputs(micro, loss_fn), self._on_device(micro))
                loss.backward()
                for name, value in (("loss", loss), *metrics.items()):
                    sums[name] = sums.get(name, 0.0) + value.detach().double()
            self._dp.reshard()
            return self._step(sums, lr)
        finally:
            self._dp.reshard()
            self._model.zero_grad(set_to_none=True)
            self._optimizer.zero_grad(set_to_none=True)

    def _with_counts(self, batch: DataProto) -> DataProto:
        """Return the batch with the counts of the mini-batch over all ranks in its meta_info."""
        (mask,) = columns(batch, ("response_mask",), of="training")
        mine = BatchCounts.of(mask)
        everyone = self._dp.gather([len(batch), mine.batch_num_tokens, mine.global_batch_size])
        rows = [counts[0] for counts in everyone]
        if len(set(rows)) > 1 or rows[0] == 0:
            raise BatchError(
                f"the dp ranks got {rows} rows of the mini-batch; each needs the same number, 1 or more "
                "(ppo_mini_batch_size x rollout.n must be a multiple of the number of dp ranks)"
            )
        counts = BatchCounts(sum(c[1] for c in everyone), sum(c[2] for c in everyone), self._dp.size)
        # A view of all rows, so that the caller's meta_info stays as it is.
        counted = batch.slice(0, len(batch))
        counted.meta_info = {**batch.meta_info, **counts.as_meta_info()}
        return counted

    def _on_device(self, micro: DataProto) -> DataProto:
        return micro if self._device.type == "cpu" else micro.to(self._device)

    def _step(self, sums: dict[str, Tensor], lr: float) -> dict[str, float]:
        """Clip and step; one exchange settles the gradient's norm and the metrics for all ranks alike."""
        optimizer = self._optimizer
        if optimizer is None:
            raise UsageError("this engine only scores")
        self._dp.finish_gradients(self._model)
        gradients = []
        for local, parameter in zip(self._locals.values(), self._model.parameters(), strict=True):
            if parameter.grad is not None:
                local.grad = shards.local_part(parameter.grad)
                gradients.append(local.grad)
        squares = [norm.double().square() for norm in torch._foreach_norm(gradients)]
        values = torch.stack([torch.stack(squares).sum(), *(sums[name] for name in sums)])
        square, *means = self._dp.sum(values).tolist()
        norm = math.sqrt(square / self._dp.copies)
        finite = math.isfinite(norm)
        if finite:
            if 0.0 < self._grad_clip < norm:
                torch._foreach_mul_(gradients, self._grad_clip / (norm + 1e-6))
            for group in optimizer.param_groups:
                group["lr"] = lr
            optimizer.step()
        self._version += 1
        result = {name: mean / self._dp.size for name, mean in zip(sums, means, strict=True)}
        return {**result, "grad_norm": norm, "lr": lr, "skipped": 0.0 if finite else 1.0}

    # ---------------------------------------------------------------- weights

    def weights(self, *, bucket_bytes: int) -> Iterator[list[tuple[str, Tensor]]]:
        """Yield full tensors under Hugging Face names, bucket by bucket (collective); valid until the next bucket.

        A bucket holds at least one tensor and otherwise at most ``bucket_bytes``; tied weights come once. Without
        sharding the tensors are the parameters themselves: copy them, do not change them.
        """
        return full_weights(self._dp, self._model.named_parameters(), bucket_bytes)

    def sent_weights(self, *, bucket_bytes: int) -> Iterator[list[tuple[str, Tensor]]]:
        """Yield the same for rank 0 to send, and empty buckets on the others; a large tensor in parts of its rows."""
        return sent_weights(self._dp, self._model.named_parameters(), bucket_bytes)

    def weight_specs(self) -> list[tuple[str, str, list[int]]]:
        """Return name, dtype and whole shape of the tensors that ``weights`` yields, in its order; no collective."""
        return [
            (name, str(parameter.dtype).removeprefix("torch."), list(parameter.shape))
            for name, parameter in self._model.named_parameters()
        ]

    # ---------------------------------------------------------------- checkpoints

    def save(self, directory: Path) -> Mapping[str, object]:
        """Write this rank's model and optimizer shards as safetensors; returns this rank's manifest entry.

        The entry holds plain JSON values. Raises CheckpointError when the disk does not take it.
        """
        suffix = f"rank-{self._dp.rank:05d}-of-{self._dp.size:05d}.safetensors"
        named = dict(self._model.named_parameters())
        entry: dict[str, object] = {
            "rank": self._dp.rank,
            "world_size": self._dp.size,
            "weight_version": self._version,
            "tensors": {name: shards.describe(tensor) for name, tensor in named.items()},
            "model": shards.write_shard(directory / f"model-{suffix}", named),
        }
        files = [directory / f"model-{suffix}"]
        if self._optimizer is not None:
            steps, moments = self._moments(self._optimizer)
            entry["optimizer_steps"] = steps
            entry["optimizer_tensors"] = self._describe_moments(steps)
            entry["optimizer"] = shards.write_shard(directory / f"optimizer-{suffix}", moments)
            files.append(directory / f"optimizer-{suffix}")
        return {**entry, "files": describe_files(directory, files)}

    def _describe_moments(self, steps: int) -> dict[str, dict[str, object]]:
        """Return the manifest entries of the moments: those of their parameters; none before the first step."""
        named = self._model.named_parameters() if steps else ()
        return {f"{name}.{moment}": shards.describe(tensor) for name, tensor in named for moment in MOMENTS}

    def _moments(self, optimizer: torch.optim.AdamW) -> tuple[int, dict[str, Tensor]]:
        """Return the number of optimizer steps made and both moments of every parameter (none before the first)."""
        steps, moments = 0, {}
        for name, local in self._locals.items():
            state = optimizer.state.get(local)
            if state:
                steps = int(state["step"])
                moments.update({f"{name}.{moment}": state[moment] for moment in MOMENTS})
        return steps, moments

    def load(self, directory: Path, manifest: Mapping[str, object]) -> None:
        """Restore what ``save`` wrote (``manifest`` is this rank's entry), bit for bit, for the same world.

        Raises CheckpointError, with everything as it was, when a file is missing or damaged or does not fit.
        """
        entry: Mapping[str, Any] = manifest
        place = (entry["rank"], entry["world_size"])
        if place != (self._dp.rank, self._dp.size):
            raise CheckpointError(
                f"this manifest entry is of rank {place[0]} of {place[1]}, but this is rank {self._dp.rank} of "
                f"{self._dp.size}; resume with the number of ranks that wrote the checkpoint"
            )
        named = dict(self._model.named_parameters())
        verify_files(directory, entry["files"])
        weights = shards.read_shard(directory / entry["model"])
        shards.require_equal(
            {name: shards.describe(tensor) for name, tensor in named.items()}, entry["tensors"], weights
        )
        moments: dict[str, Tensor] = {}
        if self._optimizer is not None:
            moments = self._read_moments(directory, entry)
        self._restore(weights, moments, entry)

    def fits(self, manifest: Mapping[str, Any]) -> bool:
        """Say whether an entry is of a world that was spread as this one is, so that ``load`` takes it bit for bit."""
        mine = {name: shards.describe(tensor) for name, tensor in self._model.named_parameters()}
        return {name: entry["placements"] for name, entry in manifest["tensors"].items()} == {
            name: entry["placements"] for name, entry in mine.items()
        }

    def load_resharded(self, saved: Sequence[shards.SavedRank]) -> None:
        """Restore what the ranks of another world saved (all of them, in rank order); each reads only its own rows.

        The weights and the optimizer's state are those of the checkpoint to the bit; how the further updates are summed
        up depends on the number of ranks. Raises CheckpointError, with everything as it was, for a damaged file or
        another model.
        """
        for part in saved:
            verify_files(part.directory, part.entry["files"])
        first: Mapping[str, Any] = saved[0].entry
        mine = {name: shards.describe(tensor) for name, tensor in self._model.named_parameters()}
        theirs = {name: entry["shape"] for name, entry in first["tensors"].items()}
        if theirs != {name: entry["shape"] for name, entry in mine.items()}:
            raise CheckpointError(f"the checkpoint in {saved[0].directory} is of a model with other tensors or shapes")
        rows = {name: self._dp.rows(parameter) for name, parameter in self._model.named_parameters()}
        weights = shards.read_rows(saved, "model", rows)
        moments: dict[str, Tensor] = {}
        if self._optimizer is not None:
            if "optimizer" not in first:
                raise CheckpointError(
                    f"the checkpoint in {saved[0].directory} has no optimizer state: its engine only scored"
                )
            if first["optimizer_steps"]:
                wanted = {f"{name}.{moment}": span for name, span in rows.items() for moment in MOMENTS}
                moments = shards.read_rows(saved, "optimizer", wanted)
        self._restore(weights, moments, first)

    def _restore(self, weights: Mapping[str, Tensor], moments: Mapping[str, Tensor], entry: Mapping[str, Any]) -> None:
        for name, local in self._locals.items():
            local.copy_(weights[name])
        if self._optimizer is not None:
            self._restore_moments(self._optimizer, moments, int(entry["optimizer_steps"]))
        self._version = int(entry["weight_version"])

    def _read_moments(self, directory: Path, entry: Mapping[str, Any]) -> dict[str, Tensor]:
        if "optimizer" not in entry:
            raise CheckpointError(f"the checkpoint in {directory} has no optimizer state: its engine only scored")
        moments = shards.read_shard(directory / entry["optimizer"])
        expected = self._describe_moments(int(entry["optimizer_steps"]))
        shards.require_equal(expected, entry["optimizer_tensors"], moments)
        return moments

    def _restore_moments(self, optimizer: torch.optim.AdamW, moments: Mapping[str, Tensor], steps: int) -> None:
        optimizer.state.clear()
        for name, local in self._locals.items() if moments else ():
            state = {moment: torch.empty_like(local).copy_(moments[f"{name}.{moment}"]) for moment in MOMENTS}
            state["step"] = torch.tensor(float(steps), device=local.device)
            optimizer.state[local] = state

    def export(self, directory: Path) -> None:
        """Write a Hugging Face checkpoint, tokenizer included, from rank 0 (collective).

        Every rank takes part in gathering; only rank 0 holds the whole model, in its CPU memory.
        """
        whole: dict[str, Tensor] = {}
        for bucket in self.weights(bucket_bytes=0):
            for name, tensor in bucket:
                if self._dp.rank == 0:
                    whole[name] = tensor.cpu()
        if self._dp.rank == 0:
            directory.mkdir(parents=True, exist_ok=True)
            with quiet():
                self._model.save_pretrained(directory, state_dict=whole)
            copy_tokenizer(self._folder, directory)
