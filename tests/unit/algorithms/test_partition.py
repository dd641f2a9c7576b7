"""Rows that are dealt out by length: every row once, sums near one another, never over the limit."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rpcrl.algorithms.partition import balanced_order, fit_groups, karmarkar_karp, split_to
from rpcrl.errors import UsageError

LENGTHS = st.lists(st.integers(0, 500), min_size=1, max_size=60)


def sums(lengths: list[int], groups: list[list[int]]) -> list[int]:
    return [sum(lengths[row] for row in rows) for rows in groups]


@given(LENGTHS, st.data())
def test_every_row_is_dealt_once_and_no_part_is_empty(lengths: list[int], data: st.DataObject) -> None:
    parts = data.draw(st.integers(1, len(lengths)))
    groups = karmarkar_karp(lengths, parts)
    assert len(groups) == parts
    assert all(groups)
    assert sorted(itertools.chain(*groups)) == list(range(len(lengths)))
    assert groups == karmarkar_karp(lengths, parts)


@given(st.integers(1, 8), st.integers(1, 12), st.data())
def test_parts_of_equal_size_differ_by_one_row_at_most(parts: int, each: int, data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(0, 500), min_size=parts * each, max_size=parts * each))
    groups = karmarkar_karp(lengths, parts, equal_size=True)
    assert [len(rows) for rows in groups] == [each] * parts
    found = sums(lengths, groups)
    assert max(found) - min(found) <= max(lengths) - min(lengths)


@given(st.lists(st.integers(1, 30), min_size=2, max_size=9))
def test_two_parts_are_near_the_best_there_are(lengths: list[int]) -> None:
    """Differencing is not optimal; its largest part is at most 7/6 of the best one (Fischetti and Martello 1987)."""
    best = min(
        max(sum(chosen), sum(lengths) - sum(chosen))
        for size in range(len(lengths) + 1)
        for chosen in itertools.combinations(lengths, size)
    )
    assert max(sums(lengths, karmarkar_karp(lengths, 2))) <= best * 7 / 6


def test_the_example_of_the_method() -> None:
    # 8 7 6 5 4: differences leave 2, though 0 is possible
    assert sorted(sums([8, 7, 6, 5, 4], karmarkar_karp([8, 7, 6, 5, 4], 2))) == [14, 16]


def test_it_beats_dealing_in_order() -> None:
    lengths = [500, 400, 300, 200, 100, 50, 40, 10]
    order = balanced_order(lengths, 2)
    halves = sums(lengths, [order[:4], order[4:]])
    assert abs(halves[0] - halves[1]) <= 50
    in_order = sums(lengths, [[0, 1, 2, 3], [4, 5, 6, 7]])
    assert abs(in_order[0] - in_order[1]) == 1200


@given(LENGTHS, st.integers(0, 200))
def test_groups_fit_and_cannot_be_fewer_than_the_sum_demands(lengths: list[int], spare: int) -> None:
    limit = max(lengths) + spare
    groups = fit_groups(lengths, limit)
    assert sorted(itertools.chain(*groups)) == list(range(len(lengths)))
    assert max(sums(lengths, groups)) <= limit
    if limit:
        assert len(groups) >= -(-sum(lengths) // limit)
    for count in range(len(groups), len(lengths) + 1):
        more = split_to(groups, count)
        assert len(more) == count
        assert all(more)
        assert max(sums(lengths, more)) <= limit


def test_what_cannot_be_dealt_is_refused() -> None:
    with pytest.raises(UsageError, match="2 rows cannot be dealt to 3 parts"):
        karmarkar_karp([1, 2], 3)
    with pytest.raises(UsageError, match="3 rows do not divide into 2 parts"):
        karmarkar_karp([1, 2, 3], 2, equal_size=True)
    with pytest.raises(UsageError, match="-1 tokens"):
        karmarkar_karp([1, -1], 2)
    with pytest.raises(UsageError, match="a row has 9 tokens, and a micro-batch may have 8"):
        fit_groups([1, 9], 8)
    with pytest.raises(UsageError, match="2 rows cannot make 3 groups"):
        split_to([[0, 1]], 3)


def test_rows_that_do_not_divide_keep_their_order() -> None:
    assert balanced_order([3, 1, 2], 2) == [0, 1, 2]
