"""Which values would fit, and how are they told? The numbers that stand in remedies."""

from __future__ import annotations

from collections.abc import Collection

__all__ = ["divisors_beside", "near", "or_"]


def near(value: int, step: int) -> tuple[int, ...]:
    """Return the multiples of ``step`` beside ``value``, the lower one only if it is positive."""
    below = value // step * step
    return tuple(candidate for candidate in (below, below + step) if candidate > 0)


def divisors_beside(value: int, wanted: int) -> tuple[int, ...]:
    """Return the divisors of ``value`` next to ``wanted``, below and above."""
    divisors = [candidate for candidate in range(1, value + 1) if value % candidate == 0]
    below = [candidate for candidate in divisors if candidate < wanted][-1:]
    above = [candidate for candidate in divisors if candidate > wanted][:1]
    return (*below, *above)


def or_(values: Collection[object]) -> str:
    """Return the values as ``a or b``."""
    return " or ".join(str(value) for value in values)
