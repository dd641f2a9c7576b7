"""A channel of a user's own: buckets go through files."""

import os
import shutil
import time
from pathlib import Path
from tempfile import mkdtemp

import torch

from rpcrl.errors import WeightSyncError


class FileChannel:
    """Rank 0 writes each bucket to a file of its own, the others read it; who is done says so with another file."""

    transport = "files"
    buffer_device = "cpu"

    def __init__(self, *, device, timeout_s):
        self._timeout_s = timeout_s
        self._count = 0
        self._open = True
        self._rank = None

    def listen(self, host):
        return {"folder": mkdtemp(prefix="file-channel-", dir=os.environ["PYTEST_DEBUG_TEMPROOT"])}

    def join(self, name, address, rank, world_size):
        self._folder, self._rank, self._world_size = Path(address["folder"]), rank, world_size
        self._meet("joined")

    def broadcast(self, buffer):
        self._count += 1
        path = self._folder / f"bucket-{self._count}"
        if self._rank == 0:
            path.with_suffix(".part").write_bytes(buffer.numpy().tobytes())
            path.with_suffix(".part").rename(path)
        else:
            self._wait(path.exists)
            buffer.copy_(torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8))
        self._meet(f"done-{self._count}")
        if self._rank == 0:
            path.unlink()

    def close(self):
        self._open = False
        if self._rank == 0:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _meet(self, what):
        (self._folder / f"{what}.{self._rank}").touch()
        self._wait(lambda: all((self._folder / f"{what}.{rank}").exists() for rank in range(self._world_size)))

    def _wait(self, ready):
        deadline = time.monotonic() + self._timeout_s
        while not ready():
            if time.monotonic() > deadline or not self._open:
                raise WeightSyncError(f"rank {self._rank} waited for {self._timeout_s} s")
            time.sleep(0.001)
