"""How does a rank know that a checkpoint's files are the ones that were written?

Each file is listed with its size and SHA-256 when it is written, is fsynced before the listing is handed back, and is
compared with the listing before anything is read from it.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from rpcrl.errors import CheckpointError

__all__ = ["describe_files", "verify_files"]


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def describe_files(directory: Path, paths: Iterable[Path]) -> dict[str, dict[str, object]]:
    """Flush each file to the disk and return ``{path relative to directory: {"bytes": n, "sha256": hex}}``.

    Raises CheckpointError when the disk does not take one.
    """
    listing: dict[str, dict[str, object]] = {}
    for path in sorted(paths):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        except OSError as error:
            raise CheckpointError(
                f"cannot write the checkpoint file {path} to the disk: {error}; earlier checkpoints are as they were"
            ) from error
        finally:
            os.close(descriptor)
        name = path.relative_to(directory).as_posix()
        listing[name] = {"bytes": path.stat().st_size, "sha256": _sha256(path)}
    return listing


def verify_files(directory: Path, listing: Mapping[str, Mapping[str, object]], *, hashes: bool = True) -> None:
    """Compare the files with their listing; ``hashes=False`` compares the sizes only.

    Raises CheckpointError naming every file that is missing or differs.
    """
    faults: list[str] = []
    for name, expected in listing.items():
        path = directory / name
        if not path.is_file():
            faults.append(f"{path} is missing")
            continue
        size = path.stat().st_size
        if size != expected["bytes"]:
            faults.append(f"{path} has {size} bytes, the manifest says {expected['bytes']}")
        elif hashes and (digest := _sha256(path)) != expected["sha256"]:
            faults.append(f"{path} has SHA-256 {digest}, the manifest says {expected['sha256']}")
    if faults:
        listed = "\n  ".join(faults)
        raise CheckpointError(
            f"checkpoint {directory} is damaged; nothing was loaded:\n  {listed}\n"
            "Resume from an earlier one: --resume DIR/checkpoints/global_step_N"
        )
