"""The canary sees old weights, rounding and nonsense, and tells them apart."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from rpcrl.engines.canary import CanaryEngine, canary_tokens, check_canary
from rpcrl.errors import WeightSyncError


class Scores:
    """An engine whose log-probs are given."""

    def __init__(self, values: Sequence[float], *, longest: int = 64) -> None:
        self.values = list(values)
        self.vocabulary = 24
        self.longest = longest
        self.trouble = ""

    def score(self, token_ids: Sequence[int]) -> list[float]:
        return self.values

    def distrust(self, why: str) -> None:
        self.trouble = why


def test_the_text_fits_the_engine() -> None:
    for longest, count in ((64, 32), (9, 8), (1, 2)):
        engine = Scores([], longest=longest)
        assert isinstance(engine, CanaryEngine)
        tokens = canary_tokens(engine)
        assert len(tokens) == count
        assert all(0 <= token < 24 for token in tokens)
        assert tokens == canary_tokens(engine)
    assert len(set(canary_tokens(Scores([])))) > 12


@pytest.mark.parametrize(
    ("gaps", "exact", "alright"),
    [
        ([1e-5, -2e-4], True, True),
        ([0.0, 2e-3], True, False),
        ([0.0, 2e-3], False, True),
        ([0.9, -0.1, 0.0, 0.0], False, True),
        ([0.9, -0.5, 0.1, 0.0], False, False),
        ([0.0, math.nan], True, False),
        ([0.0, math.nan], False, False),
    ],
)
def test_what_is_a_difference(gaps: list[float], exact: bool, alright: bool) -> None:
    expected = [-1.0 - place for place in range(len(gaps))]
    engine = Scores([value + gap for value, gap in zip(expected, gaps, strict=True)])
    tokens = list(range(len(gaps) + 1))
    if alright:
        check_canary(engine, tokens, expected, version=2, exact=exact)
        assert not engine.trouble
    else:
        with pytest.raises(WeightSyncError, match=r"sync of version 2.*rollout\.canary=false"):
            check_canary(engine, tokens, expected, version=2, exact=exact)
        assert "do not say what the trainer's say" in engine.trouble
