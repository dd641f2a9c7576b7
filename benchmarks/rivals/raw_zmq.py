"""How fast is ZeroMQ by itself? A ROUTER and bare DEALER processes: no codec, no retry, no liveness, no rights check.

This is the floor that a call on a group is held against. Frames are sent and received without copies, a worker
echoes the buffer that it got, and both ends read every byte in the ``touched`` variant.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import numpy as np
import zmq

READY_MS = 20_000


class RawZmq:
    """A set of echo processes behind one ROUTER on a Unix socket."""

    def __init__(self, workers: int) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="rz-")
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        address = f"ipc://{self._folder.name}/s"
        self._socket.bind(address)
        self._identities = [f"w{rank}".encode() for rank in range(workers)]
        command = [sys.executable, str(Path(__file__).resolve()), address]
        self._processes = [subprocess.Popen([*command, identity.decode()]) for identity in self._identities]
        for _ in self._identities:
            if not self._socket.poll(READY_MS):
                self.close()
                raise TimeoutError("a raw ZeroMQ process did not come up")
            self._socket.recv_multipart()

    def __enter__(self) -> RawZmq:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the processes and close the sockets."""
        for identity in self._identities:
            self._socket.send_multipart([identity, b"stop"])
        for process in self._processes:
            process.wait(timeout=10)
        self._socket.close()
        self._context.term()
        self._folder.cleanup()

    def ping(self) -> None:
        """One empty round trip to every worker."""
        self._exchange(b"ping", [[] for _ in self._identities])

    def scatter_gather(self, chunks: Sequence[np.ndarray], *, touch: bool) -> list[np.ndarray]:
        """Send ``chunks[rank]`` to each worker and return what comes back, in rank order."""
        kind = b"touch" if touch else b"echo"
        replies = self._exchange(kind, [[chunk] for chunk in chunks])
        received = [np.frombuffer(frames[0].buffer, dtype=np.float32) for frames in replies]
        if touch:
            for array in received:
                array.sum()
        return received

    def _exchange(self, kind: bytes, payloads: Sequence[Sequence[np.ndarray]]) -> list[list[zmq.Frame]]:
        for identity, payload in zip(self._identities, payloads, strict=True):
            self._socket.send_multipart([identity, kind, *payload], copy=False)
        replies: dict[bytes, list[zmq.Frame]] = {}
        while len(replies) < len(payloads):
            identity, *frames = self._socket.recv_multipart(copy=False)
            replies[identity.bytes] = frames
        return [replies[identity] for identity in self._identities]


def _serve(address: str, identity: str) -> None:
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.IDENTITY, identity.encode())
    socket.setsockopt(zmq.LINGER, 0)
    socket.connect(address)
    socket.send(b"ready")
    while True:
        kind, *buffers = socket.recv_multipart(copy=False)
        if kind.bytes == b"stop":
            break
        if kind.bytes == b"touch":
            np.frombuffer(buffers[0].buffer, dtype=np.float32).sum()
        socket.send_multipart(buffers or [b""], copy=False)
    socket.close()
    context.term()


if __name__ == "__main__":
    _serve(*sys.argv[1:])
