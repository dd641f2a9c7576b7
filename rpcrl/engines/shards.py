"""How do one rank's tensors reach the disk and come back bit for bit?

Each rank writes one safetensors file for the model and one for the optimizer. What they hold (names, global and
local shapes, placements, dtypes) stands in a manifest entry of plain JSON values; nothing is ever unpickled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rpcrl.errors import CheckpointError

__all__ = ["SavedRank", "describe", "local_part", "read_rows", "read_shard", "require_equal", "write_shard"]


def local_part(tensor: Tensor) -> Tensor:
    """Return what this rank holds of a tensor: its shard, or all of a tensor that is not sharded."""
    to_local = getattr(tensor, "to_local", None)
    local: Tensor = tensor if to_local is None else to_local()
    return local.detach()


def describe(tensor: Tensor) -> dict[str, object]:
    """Return a tensor's manifest entry: global and local shape, placements over the dp mesh, dtype."""
    placements = getattr(tensor, "placements", None)
    return {
        "shape": list(tensor.shape),
        "local_shape": list(local_part(tensor).shape),
        "placements": ["Replicate()"] if placements is None else [str(placement) for placement in placements],
        "dtype": str(tensor.dtype).removeprefix("torch."),
    }


def write_shard(path: Path, tensors: Mapping[str, Tensor]) -> str:
    """Write tensors as safetensors; returns the file's name. ``describe_files`` syncs and lists it.

    Raises CheckpointError naming the file when it cannot be written.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file({name: local_part(tensor).cpu().contiguous() for name, tensor in tensors.items()}, path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"cannot write the checkpoint shard {path}: {error}; the earlier checkpoints are as they were"
        ) from error
    return path.name


def read_shard(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a shard whose file has been verified."""
    from safetensors.torch import load_file

    tensors: dict[str, Tensor] = load_file(path)
    return tensors


@dataclass(frozen=True)
class SavedRank:
    """What one rank of the world that wrote a checkpoint has saved."""

    directory: Path
    entry: Mapping[str, Any]


def read_rows(saved: Sequence[SavedRank], kind: str, wanted: Mapping[str, tuple[int, int]]) -> dict[str, Tensor]:
    """Return rows ``start … stop`` of tensors that lie in the shards of another world; only those are read.

    ``kind`` is model or optimizer; ``saved`` are all its ranks, in order. Raises CheckpointError for a tensor that is
    not there or has fewer rows.
    """
    from safetensors import safe_open

    found: dict[str, list[Tensor]] = {name: [] for name in wanted}
    offsets = dict.fromkeys(wanted, 0)
    for rank, part in enumerate(saved):
        described = part.entry["tensors" if kind == "model" else "optimizer_tensors"]
        with safe_open(part.directory / str(part.entry[kind]), framework="pt") as file:
            for name, (start, stop) in wanted.items():
                if name not in described:
                    raise CheckpointError(f"the checkpoint in {part.directory} has no tensor {name}")
                if described[name]["placements"] == ["Replicate()"] and rank:
                    continue  # each rank holds all of it; the first one's is read
                rows = described[name]["local_shape"][0]
                first = offsets[name]
                offsets[name] += rows
                low, high = max(start, first), min(stop, first + rows)
                if low < high:
                    found[name].append(file.get_slice(name)[low - first : high - first])
                elif start == stop and not found[name]:
                    found[name].append(file.get_slice(name)[0:0])
    for name, (_, stop) in wanted.items():
        if offsets[name] < stop:
            raise CheckpointError(f"the checkpoint's {name} has {offsets[name]} rows, the model's has {stop} or more")
    return {name: torch.cat(parts) for name, parts in found.items()}


def require_equal(
    expected: Mapping[str, Mapping[str, object]], stored: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> None:
    """Raise CheckpointError unless manifest and file hold exactly the tensors that this rank needs."""
    names = sorted(set(expected) ^ set(stored)) + sorted(set(stored) ^ set(tensors))
    if names:
        raise CheckpointError(f"the checkpoint and the model differ in the tensors {', '.join(names[:8])}")
    for name, entry in expected.items():
        if dict(stored[name]) != dict(entry) or list(tensors[name].shape) != entry["local_shape"]:
            raise CheckpointError(
                f"the checkpoint's {name} is {stored[name]}, this rank needs {dict(entry)}; a checkpoint is loaded "
                "into the same model and the same number of ranks"
            )
        if tensors[name].dtype is not getattr(torch, str(entry["dtype"])):
            raise CheckpointError(f"the checkpoint's {name} has dtype {tensors[name].dtype}, not {entry['dtype']}")
