"""Does the harness count what it says it counts?"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def harness() -> ModuleType:
    spec = importlib.util.spec_from_file_location("benchmarks_harness", ROOT / "benchmarks" / "harness.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("share", "expected"), [(0.5, 50.0), (0.99, 99.0), (1.0, 100.0), (0.0, 1.0)])
def test_percentiles_are_samples(harness: ModuleType, share: float, expected: float) -> None:
    samples = [float(value) for value in range(100, 0, -1)]
    assert harness.percentile(samples, share) == expected


def test_rivals_take_turns_and_each_goes_first_equally_often(harness: ModuleType) -> None:
    order: list[str] = []
    cases = [harness.Case(name, "c", lambda name=name: order.append(name)) for name in "abc"]
    rows = harness.measure(cases, rounds=6, warm_up=0)
    rounds = [order[start : start + 3] for start in range(0, 18, 3)]
    assert all(sorted(round_) == ["a", "b", "c"] for round_ in rounds)
    assert [round_[0] for round_ in rounds] == ["a", "b", "c", "a", "b", "c"]
    assert [row.n for row in rows] == [6, 6, 6]


def test_warm_up_is_not_counted_and_the_budget_ends_the_rounds(harness: ModuleType) -> None:
    calls: list[int] = []
    rows = harness.measure([harness.Case("s", "c", lambda: calls.append(1))], rounds=100, warm_up=5, budget_s=0.0)
    assert rows[0].n == 3
    assert len(calls) == 8


def test_the_file_holds_rows_and_environment(harness: ModuleType, tmp_path: Path) -> None:
    rows = harness.measure([harness.Case("s", "c", int, "v", 2, 16.0)], rounds=3)
    harness.report("title", rows, str(tmp_path / "out.json"), extra=1)
    document = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    assert set(document["rows"][0]) == {"system", "case", "variant", "workers", "mib", "p50_s", "p99_s", "n"}
    assert document["rows"][0] | {"p50_s": 0, "p99_s": 0} == {
        "system": "s",
        "case": "c",
        "variant": "v",
        "workers": 2,
        "mib": 16.0,
        "p50_s": 0,
        "p99_s": 0,
        "n": 3,
    }
    assert {"cpu", "cores", "commit", "load_1min", "python", "packages"} <= set(document["environment"])
    assert document["extra"] == 1
