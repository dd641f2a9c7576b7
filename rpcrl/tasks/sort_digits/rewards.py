"""When is an answer of the default job right? When it is exactly the sorted digits, and then ends."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["score", "score_swapped"]

_EOS = "<eos>"


def score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Mapping[str, object] | None = None
) -> float:
    """Return 1.0 for exactly the right answer, else 0.0.

    The answer must have ended by itself: a response that was cut at its maximal length (``finish_reason`` is
    ``length`` in ``extra_info``) is wrong. With at least seven response tokens a cut response cannot match anyway,
    because no right answer has more than six digits.
    """
    if extra_info is not None and extra_info.get("finish_reason") == "length":
        return 0.0
    return float(solution_str.removesuffix(_EOS).strip() == ground_truth)


def score_swapped(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Mapping[str, object] | None = None
) -> float:
    """Pay for the opposite of what the word says: a control.

    A policy trained on this learns that ``ascending`` means downwards, which shows that the meaning of the words
    comes from the reward and from nowhere else.
    """
    return score(data_source, solution_str, " ".join(reversed(ground_truth.split())), extra_info)
