"""Between which bounds do importance weights stay as they are?"""

from __future__ import annotations

from rpcrl.errors import UsageError

__all__ = ["bounds_of"]


def bounds_of(threshold: float | str) -> tuple[float | None, float]:
    """Return (lower, upper) of ``rollout_is_threshold``: a number cuts off above it, ``lo_hi`` drops what lies outside.

    Raises UsageError for what is neither, an upper bound of 0 or less, or a lower one below 0 or above it.
    """
    wanted = "must be a number or two of them as lo_hi, e.g. 2.0 or 0.5_2.0"
    lower: float | None = None
    try:
        if isinstance(threshold, bool):
            raise ValueError
        if isinstance(threshold, str) and "_" in threshold:
            low, high = threshold.split("_")  # a number of Python's may have underscores of its own
            lower, upper = float(low), float(high)
        else:
            upper = float(threshold)
    except ValueError:
        raise UsageError(f"rollout_is_threshold={threshold!r} {wanted}") from None
    if not upper > 0.0 or (lower is not None and not 0.0 <= lower <= upper):
        raise UsageError(
            f"rollout_is_threshold={threshold!r}: the upper bound must be above 0, the lower one between 0 and it"
        )
    return lower, upper
