"""Is the learning rate right at the joints?"""

from __future__ import annotations

import pytest

from rpcrl.engines.schedule import learning_rate
from rpcrl.errors import UsageError


def rates(kind: str, **settings: float) -> list[float]:
    return [learning_rate(step, lr=5e-4, total_steps=100, warmup_steps=5, kind=kind, **settings) for step in range(101)]


def test_warm_up_rises_to_the_full_rate_and_no_step_stands_still() -> None:
    linear = rates("linear")
    assert linear[:6] == pytest.approx([1e-4, 2e-4, 3e-4, 4e-4, 5e-4, 5e-4])
    assert linear[99] == pytest.approx(5e-4 / 95)
    assert linear[100] == 0.0
    assert min(linear[:100]) > 0.0


def test_constant_and_cosine() -> None:
    assert rates("constant")[5:] == [5e-4] * 96
    cosine = rates("cosine", min_lr_ratio=0.1)
    assert cosine[5] == pytest.approx(5e-4)
    assert cosine[100] == pytest.approx(5e-5)
    assert (cosine[52] + cosine[53]) / 2 == pytest.approx(5e-4 * 0.55)
    assert cosine[5:] == sorted(cosine[5:], reverse=True)


def test_no_warm_up_and_steps_beyond_the_end() -> None:
    assert learning_rate(0, lr=1.0, total_steps=10) == 1.0
    assert learning_rate(50, lr=1.0, total_steps=10) == 0.0


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(UsageError, match="lr_scheduler_type='step'"):
        learning_rate(0, lr=1.0, total_steps=1, kind="step")
    with pytest.raises(UsageError, match="from 0"):
        learning_rate(-1, lr=1.0, total_steps=1)
