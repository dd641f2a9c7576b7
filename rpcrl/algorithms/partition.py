"""How are rows of uneven lengths dealt out so that every part has about the same number of tokens?

Multiway number partitioning by the largest differencing method (Karmarkar and Karp 1982). Pure functions on lists of
integers; nothing here loads torch.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from rpcrl.errors import UsageError

__all__ = ["balanced_order", "fit_groups", "karmarkar_karp", "split_to"]

_Parts = list[tuple[int, list[int]]]
"""Sum and rows of each part, the largest sum first."""


def _merged(one: _Parts, two: _Parts) -> _Parts:
    """Put the largest parts of one side to the smallest of the other, so that their differences cancel."""
    joined = [
        (sum_one + sum_two, rows_one + rows_two)
        for (sum_one, rows_one), (sum_two, rows_two) in zip(one, reversed(two), strict=True)
    ]
    return sorted(joined, key=lambda part: -part[0])


def karmarkar_karp(lengths: Sequence[int], parts: int, *, equal_size: bool = False) -> list[list[int]]:
    """Return ``parts`` lists of row numbers whose sums of ``lengths`` are near one another.

    Every row is in one list; with at least as many rows as parts no list is empty. ``equal_size`` gives every part
    the same number of rows. The answer depends on the lengths alone: rows and parts are in ascending order of their
    first row. Raises UsageError for fewer than one part, fewer rows than parts, a negative length, or
    ``equal_size`` with rows that do not divide.
    """
    count = len(lengths)
    if parts < 1 or count < parts:
        raise UsageError(f"{count} rows cannot be dealt to {parts} parts: each part needs a row")
    if equal_size and count % parts:
        raise UsageError(f"{count} rows do not divide into {parts} parts of the same size")
    if min(lengths) < 0:
        raise UsageError(f"a row has {min(lengths)} tokens; lengths are 0 or more")
    falling = sorted(range(count), key=lambda row: (-lengths[row], row))
    heap: list[tuple[int, int, _Parts]] = []

    def push(state: _Parts, tie: int) -> None:
        heapq.heappush(heap, (state[-1][0] - state[0][0], tie, state))

    width = parts if equal_size else 1
    for start in range(0, count, width):
        rows = falling[start : start + width]
        state: _Parts = [(lengths[row], [row]) for row in rows]
        push(state + [(0, [])] * (parts - len(rows)), start)
    tie = count
    while len(heap) > 1:
        one, two = heapq.heappop(heap)[2], heapq.heappop(heap)[2]
        push(_merged(one, two), tie)
        tie += 1
    groups = [sorted(rows) for _, rows in heap[0][2]]
    # Rows of length 0 cancel nothing and may leave a part without any.
    return sorted(split_to([rows for rows in groups if rows], parts))


def split_to(groups: Sequence[list[int]], count: int) -> list[list[int]]:
    """Cut the groups with the most rows in two until there are ``count``; raises UsageError where rows run out."""
    result = [list(rows) for rows in groups]
    while len(result) < count:
        widest = max(range(len(result)), key=lambda index: len(result[index]))
        rows = result[widest]
        if len(rows) < 2:
            raise UsageError(f"{len(result)} rows cannot make {count} groups")
        result[widest : widest + 1] = [rows[: len(rows) // 2], rows[len(rows) // 2 :]]
    return result


def fit_groups(lengths: Sequence[int], limit: int) -> list[list[int]]:
    """Return as few balanced groups of rows as differencing finds, none with more than ``limit`` tokens.

    Raises UsageError when a single row has more.
    """
    longest = max(lengths)
    if longest > limit:
        raise UsageError(
            f"a row has {longest} tokens, and a micro-batch may have {limit} (ppo_max_token_len_per_gpu or "
            "log_prob_max_token_len_per_gpu): make it at least max_prompt_length + max_response_length"
        )
    fewest = max(-(-sum(lengths) // limit), 1) if limit else 1
    for count in range(fewest, len(lengths)):
        groups = karmarkar_karp(lengths, count)
        if max(sum(lengths[row] for row in rows) for rows in groups) <= limit:
            return groups
    return [[row] for row in range(len(lengths))]


def balanced_order(lengths: Sequence[int], parts: int) -> list[int]:
    """Return an order of the rows in which ``parts`` equal consecutive runs have about the same number of tokens.

    Rows that do not divide into the parts stay as they are.
    """
    if len(lengths) % parts or len(lengths) < parts:
        return list(range(len(lengths)))
    return [row for rows in karmarkar_karp(lengths, parts, equal_size=True) for row in rows]
