"""Does one controller pay the same for each worker, however many there are, and keep nothing of what is over?"""

from __future__ import annotations

import gc
import sys
import threading
import tracemalloc

import pytest

from rpcrl.bench.peers import LightPeers


def lines_per_worker(count: int) -> float:
    """Return how many lines of Python all threads run for one call to each of ``count`` workers, per worker.

    Lines and not seconds: the machine is shared. A loop over all workers for each message would be a line each.
    """
    lines = 0
    tracing = False

    def trace(frame: object, event: str, _: object) -> object:
        nonlocal lines
        if tracing and event == "line":
            lines += 1
        return trace

    threading.settrace(trace)  # type: ignore[arg-type]
    try:
        with LightPeers(count) as peers:
            peers.call_all()
            sys.settrace(trace)  # type: ignore[arg-type]
            tracing = True
            for _ in range(2):
                peers.call_all()
            tracing = False
            sys.settrace(None)
    finally:
        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type]
    return lines / 2 / count


@pytest.mark.parametrize(("few", "many"), [(32, 256), pytest.param(64, 1024, marks=pytest.mark.slow)])
def test_the_work_for_each_worker_does_not_grow(few: int, many: int) -> None:
    alone = lines_per_worker(few)
    assert alone > 50, "the trace does not see the controller's thread"
    assert lines_per_worker(many) <= 1.5 * alone


@pytest.mark.parametrize("calls", [20_000, pytest.param(1_000_000, marks=pytest.mark.slow)])
def test_memory_stays_flat_over_many_calls(calls: int) -> None:
    workers = 10
    with LightPeers(workers) as peers:
        half = calls // workers // 2
        tracemalloc.start()
        try:
            kept_bytes = []
            for _ in range(2):
                for _ in range(half):
                    peers.call_all()
                gc.collect()
                kept_bytes.append(tracemalloc.get_traced_memory()[0])
        finally:
            tracemalloc.stop()
    # The smallest object, kept for each call of the group, is 16 bytes and its place in a list 8.
    assert kept_bytes[1] - kept_bytes[0] < 12 * half, kept_bytes
