"""Where a call's time went: the phases add up, also when the worker's clock is another one."""

from __future__ import annotations

import time

import pytest

from rpcrl.runtime.timing import CallTiming, Stopwatch
from rpcrl.shm.buffers import Hold, Placed
from rpcrl.wire.messages import Encoded

PHASES = ("encode_s", "send_s", "queue_s", "run_s", "return_s", "collect_s")


def phases(timing: CallTiming) -> list[float]:
    return [getattr(timing, name) for name in PHASES]


def measured(monkeypatch: pytest.MonkeyPatch, worker: tuple[float, ...]) -> CallTiming:
    clock = iter([10.0, 11.0, 20.0, 21.0, 23.0])  # called, encoded, received, collecting, collected
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    watch = Stopwatch()
    watch.encoded([], [], copied=False)
    watch.received(3, worker)
    watch.collecting()
    watch.collected()
    assert watch.timing is not None
    return watch.timing


def test_on_one_host_the_worker_s_marks_split_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    timing = measured(monkeypatch, (12.0, 14.0, 18.0))
    assert phases(timing) == [1.0, 1.0, 2.0, 4.0, 2.0, 2.0]
    assert timing.index == 3
    # one second between the reply and the moment when somebody asked
    assert sum(phases(timing)) == timing.total_s - 1.0


def test_another_host_s_clock_splits_the_way_evenly(monkeypatch: pytest.MonkeyPatch) -> None:
    assert phases(measured(monkeypatch, (1012.0, 1014.0, 1018.0))) == [1.0, 1.5, 2.0, 4.0, 1.5, 2.0]


def test_without_marks_nothing_is_invented(monkeypatch: pytest.MonkeyPatch) -> None:
    assert phases(measured(monkeypatch, ())) == [1.0, 4.5, 0.0, 0.0, 4.5, 2.0]


def test_bytes_are_counted_where_they_go() -> None:
    memory = memoryview(bytes(1000))
    placed = Placed(1, 0, memory, Hold())
    share = Encoded(b"tree", (placed, bytes(10)))
    watch = Stopwatch()
    watch.encoded([share], [share, share, share], copied=True)
    watch.received(0, ())
    watch.collected()
    timing = watch.timing
    assert timing is not None
    assert (timing.encodes, timing.shared_bytes, timing.copied_bytes) == (1, 1000, 1010)
    assert timing.sent_bytes == 3 * (4 + 10)
