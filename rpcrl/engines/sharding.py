"""How is a model spread over the dp ranks, and what do they agree on?

FSDP2 (``fully_shard``) over the worker's default process group, or (``Replicas``) a whole copy on each rank. A world of
one needs no process group and shards nothing; everything else is the same code.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rpcrl.engines.hf_model import decoder_layers
from rpcrl.engines.shards import local_part
from rpcrl.errors import UsageError

__all__ = ["SHARD_ABOVE", "SHARD_LAYERS_ABOVE", "STRATEGIES", "DataParallel", "Replicas", "data_parallel"]

SHARD_ABOVE = 50_000_000
"""Number of parameters above which ``strategy="auto"`` shards a model.

Below it a copy on each rank costs less than a gigabyte (weights, gradients, moments), and saves gathering the weights.
"""


SHARD_LAYERS_ABOVE = 50_000_000
"""Number of parameters above which every decoder layer is its own unit of sharding.

Below it the whole model is one unit: a gather per layer costs more than the memory of a small model is worth.
"""


BUCKET_BYTES = 32 * 1024 * 1024
"""Gradients of replicas that are added up at once; their copies are short-lived memory."""


class DataParallel:
    """The dp ranks that train one model together."""

    def __init__(self, device: torch.device) -> None:
        active = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank() if active else 0
        self.size = dist.get_world_size() if active else 1
        self.device = device
        self._units: list[Any] = []
        self._reducing = True
        self._reduce: torch.dtype | None = None

    @property
    def gathers(self) -> bool:
        """Whether a whole parameter has to be put together."""
        return self.size > 1

    @property
    def copies(self) -> int:
        """Number of ranks that hold the same element of a parameter and its gradient."""
        return 1

    def shard(self, model: Any, *, compute: torch.dtype | None = None, reduce: torch.dtype = torch.float32) -> bool:
        """Shard a model's parameters in place over the ranks; says whether it then computes in ``compute`` by itself.

        ``reduce`` is what gradients are added up in. Both count only below the parameters' own type.
        """
        if self.size == 1:
            return False
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

        # It warns of in-place changes of the model's output, which is a view; here nothing changes it.
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
        wide = next(model.parameters()).dtype
        policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=None if wide is torch.float64 else reduce)
        mesh = init_device_mesh(self.device.type, (self.size,), mesh_dim_names=("dp",))
        if sum(parameter.numel() for parameter in model.parameters()) > SHARD_LAYERS_ABOVE:
            for layer in decoder_layers(model):
                fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, reshard_after_forward=False, mp_policy=policy)
        self._units = [module for module in model.modules() if isinstance(module, FSDPModule)]
        return compute is not None

    def finish_gradients(self, model: Any) -> None:
        """Do after the last backward pass of a mini-batch what it has not done by itself: nothing."""

    def reduce_gradients(self, wanted: bool) -> None:
        """Say whether the next backward pass adds up gradients over the ranks (the last micro-batch) or not."""
        if wanted != self._reducing:
            for unit in self._units:
                unit.set_requires_gradient_sync(wanted, recurse=False)
                unit.set_reshard_after_backward(wanted, recurse=False)
            self._reducing = wanted

    def reshard(self) -> None:
        """Free the full parameters that a forward pass without backward has left."""
        for unit in self._units:
            unit.reshard()

    def rows(self, parameter: Tensor) -> tuple[int, int]:
        """Return which rows of a parameter this rank holds: from, and up to but not including."""
        local = local_part(parameter).shape[0]
        if getattr(parameter, "placements", None) is None:
            return 0, local
        # fully_shard cuts the first dimension into chunks of this many rows; the last ranks' may be short or empty.
        start = min(self.rank * -(-parameter.shape[0] // self.size), parameter.shape[0])
        return start, start + local

    def gather(self, values: Sequence[int]) -> list[list[int]]:
        """Return every rank's ``values``, in rank order (collective)."""
        mine = torch.tensor(list(values), dtype=torch.int64, device=self.device)
        if self.size == 1:
            return [mine.tolist()]
        everyone = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(everyone, mine)
        return [other.tolist() for other in everyone]

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum of a tensor over the ranks (collective)."""
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def full(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return whole parameters on every rank (collective): one exchange for all of them.

        A single rank's are the parameters themselves, not copies.
        """
        if self.size == 1:
            return [tensor.detach() for tensor in tensors]
        locals_ = [local_part(tensor) for tensor in tensors]
        # fully_shard cuts the first dimension into chunks of this many rows; the last ranks' may be short or empty.
        widths = [-(-tensor.shape[0] // self.size) * (tensor.numel() // tensor.shape[0]) for tensor in tensors]
        mine = torch.zeros(sum(widths), dtype=locals_[0].dtype, device=self.device)
        everyone = torch.empty(self.size, sum(widths), dtype=mine.dtype, device=self.device)
        for slot, local in zip(torch.split(mine, widths), locals_, strict=True):
            slot[: local.numel()] = local.reshape(-1)
        # Into the rows of one tensor: the collective for a whole tensor was renamed between the versions of torch that
        # rpcrl runs on, and its old name warns on the newer ones.
        dist.all_gather(list(everyone.unbind()), mine)
        _free(mine)
        # Copied, a single tensor too, so that what went through the collective can be given back here.
        columns = torch.split(everyone, widths, dim=1)
        parts = [part.clone(memory_format=torch.contiguous_format).view(-1) for part in columns]
        del columns
        _free(everyone)
        return [part[: tensor.numel()].view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]

    def rows_on_first(self, tensor: Tensor, rows: int) -> Iterator[list[Tensor]]:
        """Yield a parameter ``rows`` rows at a time, in order, on rank 0; on others as often nothing (collective)."""
        local = local_part(tensor)
        width = -(-tensor.shape[0] // self.size)
        for start in range(0, tensor.shape[0], rows):
            stop = min(start + rows, tensor.shape[0])
            part = (
                None
                if self.rank
                else torch.empty(stop - start, *tensor.shape[1:], dtype=local.dtype, device=self.device)
            )
            for rank in range(start // width, (stop - 1) // width + 1):
                first, last = max(start, rank * width), min(stop, (rank + 1) * width)
                own = local[first - rank * width : last - rank * width] if rank == self.rank else None
                if part is None:
                    if own is not None:
                        dist.send(own.contiguous(), 0)
                elif own is not None:
                    part[first - start : last - start].copy_(own)
                else:
                    dist.recv(part[first - start : last - start], rank)
            yield [] if part is None else [part]

    def full_on_first(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return whole parameters on rank 0, and nothing on the others (collective).

        Shards go straight to their places: no rank holds more than its own ones, and rank 0 the whole tensors.
        """
        if self.size == 1:
            return [tensor.detach() for tensor in tensors]
        if self.rank:
            for tensor in tensors:
                local = local_part(tensor).contiguous()
                if local.numel():
                    dist.send(local, 0)
            return []
        whole = [torch.empty(tensor.shape, dtype=tensor.dtype, device=self.device) for tensor in tensors]
        for target, tensor in zip(whole, tensors, strict=True):
            local = local_part(tensor)
            target[: local.shape[0]].copy_(local)
        for rank in range(1, self.size):
            for target in whole:
                # fully_shard cuts the first dimension into chunks of this many rows; the last may be short or empty.
                rows = -(-target.shape[0] // self.size)
                part = target[rank * rows : (rank + 1) * rows]
                if part.numel():
                    dist.recv(part, rank)
        return whole


def _free(exchanged: Tensor) -> None:
    """Give back the memory of a tensor that went through a finished collective, which nobody reads any more.

    Dropping the last name is not enough: gloo's thread holds what it exchanged until some time after the call returned.
    """
    exchanged.untyped_storage().resize_(0)


class Replicas(DataParallel):
    """Ranks that each hold the whole model and average their gradients: data parallelism without sharding.

    It exchanges each gradient once a mini-batch where FSDP2 also gathers the parameters; every rank pays for the
    whole optimizer state.
    """

    @property
    def gathers(self) -> bool:
        """Every rank has whole ones."""
        return False

    @property
    def copies(self) -> int:
        """Every rank holds every element."""
        return self.size

    def shard(self, model: Any, *, compute: torch.dtype | None = None, reduce: torch.dtype = torch.float32) -> bool:
        """Leave the model whole; the ranks have loaded the same weights."""
        self._reduce = None if next(model.parameters()).dtype is torch.float64 else reduce
        return False

    def reduce_gradients(self, wanted: bool) -> None:
        """Gradients are added up after the last backward pass, not in it."""

    def finish_gradients(self, model: Any) -> None:
        """Average the gradients over the ranks, in buckets (collective)."""
        if self.size == 1:
            return
        for parameter in model.parameters():
            if parameter.requires_grad and parameter.grad is None:
                # Unused here, maybe used on another rank.
                parameter.grad = torch.zeros_like(parameter)
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        bucket: list[Tensor] = []
        for gradient in [*gradients, None]:
            filled = sum(tensor.numel() * tensor.element_size() for tensor in bucket)
            if bucket and (gradient is None or filled + gradient.numel() * gradient.element_size() > BUCKET_BYTES):
                self._average(bucket)
                bucket = []
            if gradient is not None:
                bucket.append(gradient)

    def _average(self, gradients: list[Tensor]) -> None:
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        flat = flat if self._reduce is None else flat.to(self._reduce)
        dist.all_reduce(flat.div_(self.size))
        for gradient, part in zip(gradients, torch.split(flat, [tensor.numel() for tensor in gradients]), strict=True):
            gradient.copy_(part.view_as(gradient))

    def full(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the parameters themselves, which every rank holds whole."""
        return [tensor.detach() for tensor in tensors]

    def full_on_first(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the parameters themselves on rank 0, and nothing on the others."""
        return [] if self.rank else self.full(tensors)


STRATEGIES: Mapping[str, type[DataParallel]] = {"fsdp2": DataParallel, "ddp": Replicas}


def data_parallel(strategy: str, device: torch.device, *, num_parameters: int) -> DataParallel:
    """Return the ranks of the default process group, to train a model of that size by ``strategy``.

    Raises UsageError for an unknown strategy.
    """
    if strategy == "auto":
        strategy = "fsdp2" if num_parameters > SHARD_ABOVE else "ddp"
    if strategy not in STRATEGIES:
        raise UsageError(f"actor.strategy={strategy!r} is not one of auto, {', '.join(STRATEGIES)}")
    return STRATEGIES[strategy](device)
