"""Are systems found, started, asked and given up as the benchmark says?"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from rpcrl.bench.dispatch import DATA_CASES, KIB, Plan, check_plan, run_plan, tasks_of
from rpcrl.bench.driver import Setup, Task, shape_of
from rpcrl.bench.systems import Running, System, SystemFailed, find_system, start_all
from rpcrl.errors import UsageError

DRIVER = """
from rpcrl.bench.driver import Unsupported, serve
import sys

class Fake:
    about = "fake 1"
    def __init__(self, setup):
        print("noise on standard output")
        self.workers = setup.workers
    def prepare(self, task):
        if task.case == "copy":
            raise Unsupported("no copies")
        if task.case == "broadcast":
            def die():
                print("the last words", file=sys.stderr)
                raise SystemExit(3)
            return die
        return lambda: float(self.workers)
    def close(self):
        pass

serve(Fake)
"""


def fake(tmp_path: Path, name: str = "ray") -> System:
    script = tmp_path / "fake_driver.py"
    script.write_text(DRIVER, encoding="utf-8")
    return System(name, (sys.executable, str(script)))


@pytest.mark.parametrize("mib", [KIB, 1.0, 64.0, 256.0])
def test_a_batch_has_the_size_that_is_said(mib: float) -> None:
    rows, ids, probs = shape_of(mib)
    assert rows * (ids * 8 + probs * 4) == mib * 2**20
    assert rows >= 16
    assert ids * 8 == probs * 4


def test_every_data_case_is_measured_untouched_and_touched() -> None:
    tasks = tasks_of(Plan((), (2,), ("ipc",), tuple(DATA_CASES)))
    for case, sizes in DATA_CASES.items():
        for mib in sizes:
            assert {task.variant for task in tasks if (task.case, task.mib) == (case, mib)} == {"untouched", "touched"}


def test_an_answer_is_what_the_driver_measured_and_noise_does_not_disturb_it(tmp_path: Path) -> None:
    (running,), failed = start_all([fake(tmp_path)], Setup(7, "ipc"))
    try:
        assert failed == {}
        assert running.about == "fake 1"
        assert running.prepare(Task("ping", "", 0.0))
        assert running.run(3) == [7.0, 7.0, 7.0]
        copy = Task("copy", "", 1.0)
        assert not running.prepare(copy)
        assert running.reasons[copy] == "no copies"
    finally:
        running.close()


def test_a_driver_that_ends_is_reported_with_its_last_words(tmp_path: Path) -> None:
    running = Running(fake(tmp_path), Setup(1, "ipc"))
    try:
        running.wait_ready()
        running.prepare(Task("broadcast", "touched", 1.0))
        with pytest.raises(SystemFailed, match="the last words"):
            running.run(1)
    finally:
        running.close()


def test_a_system_that_fails_is_named_and_the_others_go_on(tmp_path: Path) -> None:
    broken = System("monarch", (sys.executable, "-c", "raise SystemExit('no such thing')"))
    plan = Plan((fake(tmp_path), broken), (2,), ("ipc",), ("broadcast", "ping"), (1.0,), rounds=3)
    report = run_plan(plan)
    assert "no such thing" in report.not_measured["monarch, 2 workers"]
    assert "the last words" in report.not_measured["ray, from broadcast on"]
    assert report.rows == []

    report = run_plan(Plan((fake(tmp_path), broken), (2,), ("ipc",), ("ping", "copy"), rounds=3))
    assert [(row.system, row.case, row.p50_s) for row in report.rows] == [("ray", "ping", 2.0)]
    assert report.no_such_case == {"ray": {"copy": "no copies"}}


def test_what_cannot_be_measured_is_refused_before_anything_starts() -> None:
    absent = System("ray", (), "not installed: make bench-rivals")
    plan = Plan((absent,), (0, 4096), ("ipc", "udp"), ("ping", "pong", "copy"), (1e-9, 1e9))
    with pytest.raises(UsageError) as refused:
        check_plan(plan)
    text = str(refused.value)
    for part in (
        "nothing was started",
        "--workers 0,4096",
        "pong",
        "udp",
        "--rivals ray",
        "bench-rivals",
        "--mib 1e-09",
    ):
        assert part in text
    assert "--mib 1e+09: 1 systems with" in text


def test_a_missing_rival_says_how_to_get_it(tmp_path: Path) -> None:
    assert "make bench-rivals" in find_system("ray", tmp_path, {}).missing
    assert "has no module monarch" in find_system("monarch", tmp_path, {"monarch": "/bin/false"}).missing
    assert find_system("raw_zmq", tmp_path, {}).missing == ""
    with pytest.raises(UsageError, match="known: rpcrl"):
        find_system("grpc", tmp_path, {})
