"""Is the shipped base checkpoint the one that was pinned? Its bytes are checked each time it is asked for."""

from __future__ import annotations

import hashlib
from pathlib import Path

from rpcrl.errors import CheckpointError

__all__ = ["BASE_DIR", "BASE_SHA256", "base_checkpoint", "verify_checkpoint"]

BASE_DIR = Path(__file__).parent / "base"
"""Folder of the shipped base: a Hugging Face checkpoint in bfloat16 of 108,352 parameters, about 220 KB."""

BASE_SHA256 = {
    "chat_template.jinja": "defc495c1d8452ca6c2d6a826afec9aa42ceecf622cf69b448cfa73dfcc5f784",
    "config.json": "ecc74826b4eb96a4bb9523eeea5579a3405764252d6f7fc974ea60abbfec1921",
    "generation_config.json": "0d68ec28b55b2b2524942b18ee8be2c27bff7baa1e4024245efff321c6886ea7",
    "model.safetensors": "dc3913ebafc0e6a19c60aa72d40c174d2259b3bd009fab0599e82bc62ffa067b",
    "tokenizer.json": "327e2dc9097830a37a291397f471771e2d8d3d71499613ed7ad4c4f7af910ad9",
    "tokenizer_config.json": "0521635bb0b37b618843ce752b96e9119623291e784b981f8997c8cf43abee58",
}
"""SHA-256 of each shipped file."""


def base_checkpoint() -> Path:
    """Return the folder of the shipped base checkpoint, after checking its bytes.

    Raises CheckpointError when a file is missing or is not the pinned one.
    """
    verify_checkpoint(BASE_DIR)
    return BASE_DIR


def verify_checkpoint(directory: Path) -> None:
    """Check that ``directory`` holds exactly the pinned bytes; raises CheckpointError naming the first wrong file."""
    for name, expected in BASE_SHA256.items():
        path = directory / name
        try:
            found = hashlib.sha256(path.read_bytes()).hexdigest()
        except OSError as error:
            raise CheckpointError(
                f"the shipped base checkpoint of sort_digits lacks {name} ({path}: {error.strerror}); "
                "install rpcrl again, or remake one with `python -m rpcrl.tasks.sort_digits.remake_base DIR` "
                "and set model.path=DIR"
            ) from error
        if found != expected:
            raise CheckpointError(
                f"{path} is not the pinned base checkpoint: its SHA-256 is {found[:16]}…, expected "
                f"{expected[:16]}…; install rpcrl again, or set model.path to the checkpoint that you mean"
            )
