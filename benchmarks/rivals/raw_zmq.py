"""How fast is ZeroMQ by itself? A ROUTER and bare DEALER processes: no codec, no retry, no liveness, no rights check.

This is the floor that a call on a group is held against. Frames are sent and received without copies. ``tcp`` is plain
here: CURVE is part of what rpcrl adds. ``ping_same_threads`` has rpcrl's threads: on both sides one owns the socket,
and another one asks or works.
"""

from __future__ import annotations

import concurrent.futures
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import zmq

from rpcrl.bench.driver import Action, Setup, Task, Unsupported, serve, shape_of

READY_MS = 60_000
CALLS_IN_FLIGHT = 1_000


class Peers:
    """Echo processes behind one ROUTER."""

    def __init__(self, setup: Setup, *, threads: bool = False) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="rz-")
        self._context: zmq.Context[Any] = zmq.Context()
        self.socket = self._context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self.socket.bind("tcp://127.0.0.1:*" if setup.transport == "tcp" else f"ipc://{self._folder.name}/s")
        address = self.socket.getsockopt(zmq.LAST_ENDPOINT).decode().rstrip("\0")
        self.identities = [f"w{rank}".encode() for rank in range(setup.workers)]
        command = [sys.executable, os.path.abspath(__file__), "threads" if threads else "plain", address]
        self._processes = [subprocess.Popen([*command, identity.decode()]) for identity in self.identities]
        for _ in self.identities:
            if not self.socket.poll(READY_MS):
                raise TimeoutError("a raw ZeroMQ process did not come up")
            self.socket.recv_multipart()

    def close(self) -> None:
        for identity in self.identities:
            self.socket.send_multipart([identity, b"stop"])
        for process in self._processes:
            process.wait(timeout=20)
        self.socket.close()
        self._context.term()
        self._folder.cleanup()

    def exchange(self, kind: bytes, payloads: Sequence[Sequence[np.ndarray]]) -> list[list[zmq.Frame]]:
        for identity, payload in zip(self.identities, payloads, strict=True):
            self.socket.send_multipart([identity, kind, *payload], copy=False)
        replies: dict[bytes, list[zmq.Frame]] = {}
        while len(replies) < len(payloads):
            identity, *frames = self.socket.recv_multipart(copy=False)
            replies[identity.bytes] = frames
        return [replies[identity] for identity in self.identities]


class ThreadedPeers:
    """The same processes with a thread that owns the socket; the caller hands over and waits."""

    def __init__(self, setup: Setup) -> None:
        self._peers = Peers(setup, threads=True)
        self._commands: deque[concurrent.futures.Future[None] | None] = deque()
        self._wake = os.eventfd(0)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def ping(self) -> None:
        done: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._commands.append(done)
        os.eventfd_write(self._wake, 1)
        done.result()

    def close(self) -> None:
        self._commands.append(None)
        os.eventfd_write(self._wake, 1)
        self._thread.join()
        os.close(self._wake)
        self._peers.close()

    def _run(self) -> None:
        socket = self._peers.socket
        poller = zmq.Poller()
        poller.register(socket, zmq.POLLIN)
        poller.register(self._wake, zmq.POLLIN)
        waiting: concurrent.futures.Future[None] | None = None
        missing = 0
        while True:
            events = dict(poller.poll())
            if self._wake in events:
                os.eventfd_read(self._wake)
                waiting = self._commands.popleft()
                if waiting is None:
                    return
                missing = len(self._peers.identities)
                for identity in self._peers.identities:
                    socket.send_multipart([identity, b"ping"])
            if socket in events:
                while socket.getsockopt(zmq.EVENTS) & zmq.POLLIN:
                    socket.recv_multipart()
                    missing -= 1
                    if missing == 0 and waiting is not None:
                        waiting.set_result(None)


class RawZmq:
    """The driver."""

    def __init__(self, setup: Setup) -> None:
        self.about = f"pyzmq {zmq.__version__}, libzmq {zmq.zmq_version()}"
        self._setup = setup
        self._peers = Peers(setup)
        self._threaded: ThreadedPeers | None = None

    def close(self) -> None:
        self._end_threaded()
        self._peers.close()

    def prepare(self, task: Task) -> Action:
        self._end_threaded()
        nothing: list[list[np.ndarray]] = [[] for _ in range(self._setup.workers)]
        if task.case == "ping":
            return lambda: self._drop(self._peers.exchange(b"ping", nothing))
        if task.case == "ping_same_threads":
            self._threaded = ThreadedPeers(self._setup)
            return self._threaded.ping
        if task.case in ("scatter_gather", "broadcast"):
            return self._data(task)
        if task.case == "in_flight":
            return self._in_flight
        if task.case == "cold_start":
            return self._cold_start
        raise Unsupported("nothing of the kind without a protocol on top")

    def _end_threaded(self) -> None:
        if self._threaded is not None:
            self._threaded.close()
            self._threaded = None

    @staticmethod
    def _drop(_: object) -> None:
        return None

    def _data(self, task: Task) -> Action:
        rows, ids, probs = shape_of(task.mib)
        columns = [np.random.randint(0, 50_000, (rows, ids)), np.random.rand(rows, probs).astype(np.float32)]
        workers = self._setup.workers
        kind = {
            ("scatter_gather", "untouched"): b"echo",
            ("scatter_gather", "touched"): b"touch",
            ("broadcast", "untouched"): b"hold",
            ("broadcast", "touched"): b"read",
        }[task.case, task.variant]
        if task.case == "broadcast":
            parts = [columns for _ in range(workers)]
        else:
            split = [np.array_split(column, workers) for column in columns]
            parts = [[column[rank] for column in split] for rank in range(workers)]

        def call() -> None:
            replies = self._peers.exchange(kind, parts)
            if kind == b"touch":
                for frames in replies:
                    for frame, dtype in zip(frames, (np.int64, np.float32), strict=True):
                        np.frombuffer(frame.buffer, dtype=dtype).sum()

        return call

    def _in_flight(self) -> None:
        socket, identities = self._peers.socket, self._peers.identities
        for number in range(CALLS_IN_FLIGHT):
            socket.send_multipart([identities[number % len(identities)], b"ping"])
        for _ in range(CALLS_IN_FLIGHT):
            socket.recv_multipart()

    def _cold_start(self) -> float:
        started = time.perf_counter()
        peers = Peers(self._setup)
        peers.exchange(b"ping", [[] for _ in peers.identities])
        seconds = time.perf_counter() - started
        peers.close()
        return seconds


def _answer(frames: list[zmq.Frame]) -> list[Any]:
    kind, *buffers = frames
    if kind.bytes == b"ping" or kind.bytes == b"hold":
        return [b""]
    if kind.bytes == b"echo":
        return buffers
    arrays = [
        np.frombuffer(buffer.buffer, dtype) for buffer, dtype in zip(buffers, (np.int64, np.float32), strict=True)
    ]
    total = sum(float(array.sum()) for array in arrays)
    return [array + array.dtype.type(1) for array in arrays] if kind.bytes == b"touch" else [repr(total).encode()]


def _connect(address: str, identity: str) -> tuple[zmq.Context[Any], zmq.Socket[Any]]:
    context: zmq.Context[Any] = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.IDENTITY, identity.encode())
    socket.setsockopt(zmq.LINGER, 0)
    socket.connect(address)
    socket.send(b"ready")
    return context, socket


def _serve_plain(address: str, identity: str) -> None:
    context, socket = _connect(address, identity)
    while (frames := socket.recv_multipart(copy=False))[0].bytes != b"stop":
        socket.send_multipart(_answer(frames), copy=False)
    socket.close()
    context.term()


def _serve_threads(address: str, identity: str) -> None:
    inbox: queue.SimpleQueue[list[zmq.Frame]] = queue.SimpleQueue()
    outbox: deque[list[Any]] = deque()
    wake = os.eventfd(0)

    def own_socket() -> None:
        context, socket = _connect(address, identity)
        poller = zmq.Poller()
        poller.register(socket, zmq.POLLIN)
        poller.register(wake, zmq.POLLIN)
        stopped = False
        while not stopped:
            events = dict(poller.poll())
            if wake in events:
                os.eventfd_read(wake)
                while outbox:
                    socket.send_multipart(outbox.popleft())
            if socket in events:
                while socket.getsockopt(zmq.EVENTS) & zmq.POLLIN:
                    frames = socket.recv_multipart(copy=False)
                    stopped = frames[0].bytes == b"stop"
                    inbox.put(frames)
        socket.close()
        context.term()

    thread = threading.Thread(target=own_socket)
    thread.start()
    while (frames := inbox.get())[0].bytes != b"stop":
        outbox.append(_answer(frames))
        os.eventfd_write(wake, 1)
    thread.join()


if __name__ == "__main__":
    if len(sys.argv) == 4:
        {"plain": _serve_plain, "threads": _serve_threads}[sys.argv[1]](sys.argv[2], sys.argv[3])
    else:
        serve(RawZmq)
