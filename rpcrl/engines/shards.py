"""How do one rank's tensors reach the disk and come back bit for bit?

Each rank writes one safetensors file for the model and one for the optimizer. What they hold (names, global and
local shapes, placements, dtypes, hashes) stands in a manifest entry of plain JSON values; nothing is ever unpickled.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rpcrl.errors import CheckpointError

__all__ = ["describe", "local_part", "read_shard", "require_equal", "sha256_of", "write_shard"]

HASH_CHUNK_BYTES = 1 << 20


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


def sha256_of(path: Path) -> str:
    """Return the hex digest of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(HASH_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def write_shard(path: Path, tensors: Mapping[str, Tensor]) -> dict[str, object]:
    """Write tensors as safetensors, synced to the disk; returns the file's manifest entry (name, bytes, sha256).

    Raises CheckpointError naming the file when it cannot be written.
    """
    from safetensors.torch import save_file

    try:
        save_file({name: local_part(tensor).cpu().contiguous() for name, tensor in tensors.items()}, path)
        with path.open("rb") as file:
            os.fsync(file.fileno())
        return {"file": path.name, "size_bytes": path.stat().st_size, "sha256": sha256_of(path)}
    except OSError as error:
        raise CheckpointError(f"cannot write the checkpoint shard {path}: {error}") from error


def read_shard(directory: Path, entry: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the tensors of a shard. Raises CheckpointError when it is missing or not what was written."""
    from safetensors.torch import load_file

    path = directory / str(entry["file"])
    if not path.is_file():
        raise CheckpointError(f"the checkpoint shard {path} is missing")
    digest = sha256_of(path)
    if digest != entry["sha256"]:
        raise CheckpointError(
            f"the checkpoint shard {path} is damaged: its sha256 is {digest[:16]}…, the manifest says "
            f"{str(entry['sha256'])[:16]}… ({path.stat().st_size} bytes, {entry['size_bytes']} expected)"
        )
    tensors: dict[str, Tensor] = load_file(path)
    return tensors


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
