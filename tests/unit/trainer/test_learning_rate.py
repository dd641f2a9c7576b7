import pytest

from rpcrl.errors import UsageError
from rpcrl.trainer.learning_rate import learning_rate


def rates(schedule, *, total=10, warmup=4):
    return [
        learning_rate(step, total_steps=total, peak=1.0, warmup_steps=warmup, schedule=schedule)
        for step in range(1, total + 1)
    ]


def test_linear_warms_up_and_falls_to_just_above_zero():
    assert rates("linear") == pytest.approx([1 / 4, 2 / 4, 3 / 4, 1, 1, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6])


def test_constant_stays():
    assert rates("constant") == pytest.approx([0.25, 0.5, 0.75] + [1.0] * 7)


def test_without_warm_up_the_first_step_has_the_peak():
    assert rates("linear", total=4, warmup=0) == pytest.approx([1, 0.75, 0.5, 0.25])


def test_a_warm_up_longer_than_the_run_is_only_warm_up():
    assert rates("linear", total=2, warmup=4) == pytest.approx([0.25, 0.5])


def test_an_unknown_schedule_is_refused():
    with pytest.raises(UsageError, match="lr_scheduler_type='cosine' is not one of linear, constant"):
        rates("cosine")
