"""Does the measuring count what it says it counts?"""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from collections.abc import Callable

import pytest

from rpcrl.bench.measure import MAX_CALLS_A_TURN, Case, Row, measure, percentile, row_of, timed
from rpcrl.bench.picture import draw


def never(_: int) -> list[float]:
    return []


@pytest.mark.parametrize(("share", "expected"), [(0.5, 50.0), (0.99, 99.0), (1.0, 100.0), (0.0, 1.0)])
def test_percentiles_are_samples(share: float, expected: float) -> None:
    samples = [float(value) for value in range(100, 0, -1)]
    assert percentile(samples, share) == expected


def test_rivals_take_turns_and_each_goes_first_equally_often() -> None:
    order: list[str] = []

    def noting(name: str) -> Callable[[int], list[float]]:
        return timed(lambda: order.append(name))

    rows = measure([Case(name, "c", noting(name)) for name in "abc"], rounds=6, warm_up=0, per_turn=1)
    rounds = [order[start : start + 3] for start in range(0, 18, 3)]
    assert all(sorted(round_) == ["a", "b", "c"] for round_ in rounds)
    assert [round_[0] for round_ in rounds] == ["a", "b", "c", "a", "b", "c"]
    assert [row.n for row in rows] == [6, 6, 6]


def test_warm_up_is_not_counted_and_the_budget_ends_the_rounds() -> None:
    calls: list[int] = []
    case = Case("s", "c", timed(lambda: calls.append(1)))
    rows = measure([case], rounds=100, warm_up=5, budget_s=0.0, per_turn=1)
    assert rows[0].n == 3
    assert len(calls) == 8


def test_short_calls_are_made_many_times_a_turn_and_long_ones_once() -> None:
    counts: list[tuple[str, int]] = []

    def pretending(name: str, seconds: float) -> Callable[[int], list[float]]:
        def sample(count: int) -> list[float]:
            counts.append((name, count))
            return [seconds] * count

        return sample

    measure([Case("s", n, pretending(n, s)) for n, s in (("short", 1e-6), ("long", 1.0))], rounds=3, warm_up=1)
    assert counts[:4] == [("short", 1), ("long", 1), ("short", MAX_CALLS_A_TURN), ("long", 1)]


def test_a_case_that_gave_nothing_has_no_samples() -> None:
    assert measure([Case("s", "c", never)], rounds=3)[0].n == 0


def test_a_row_in_a_file_has_exactly_its_fields() -> None:
    row = row_of(Case("s", "c", never, "touched", 2, 16.0, "ipc"), [1.0, 2.0, 3.0, 4.0])
    names = {"system", "case", "variant", "workers", "mib", "p50_s", "p99_s", "n", "transport"}
    assert set(row.plain()) == names
    assert row.plain() | {"p50_s": 0, "p99_s": 0} == {
        "system": "s",
        "case": "c",
        "variant": "touched",
        "workers": 2,
        "mib": 16.0,
        "transport": "ipc",
        "p50_s": 0,
        "p99_s": 0,
        "n": 4,
    }
    assert row.spread == (3.0 - 1.0) / 2.0


def test_the_picture_is_valid_and_a_longer_median_has_a_longer_bar() -> None:
    rows = [
        Row("rpcrl", "ping", "", 8, 0.0, 0.01, 0.02, 3),
        Row("raw_zmq", "ping", "", 8, 0.0, 0.001, 0.02, 3),
        Row("a<b", "scatter_gather", "touched", 8, 64.0, 0.1, 0.2, 3),
    ]
    root = ElementTree.fromstring(draw(rows, "a & b", "<machine>"))
    space = "{http://www.w3.org/2000/svg}"
    bars = [each for each in root.iter(f"{space}rect") if each.find(f"{space}title") is not None]
    widths = [float(each.attrib["width"]) for each in bars]
    assert len(widths) == 3
    assert widths[1] < widths[0] < widths[2]
    texts = [each.text for each in root.iter(f"{space}text")]
    assert "a & b" in texts
    assert "scatter_gather 64 MiB touched × 8" in texts


def test_a_picture_of_nothing_is_a_picture() -> None:
    assert ElementTree.fromstring(draw([], "t", "s")).tag.endswith("svg")
