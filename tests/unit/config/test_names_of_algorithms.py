"""The names that a configuration may hold are names that the code below it has."""

from __future__ import annotations

from typing import get_args

from rpcrl.algorithms.advantages import register_advantage
from rpcrl.algorithms.aggregate import LOSS_AGG_MODES
from rpcrl.algorithms.kl import KL_PENALTIES
from rpcrl.config import rules
from rpcrl.config.run import Model, Optim
from rpcrl.engines.hf_model import DTYPES
from rpcrl.engines.schedule import SCHEDULES


def test_loss_aggregations_and_kl_estimators_are_the_same() -> None:
    assert rules.LOSS_AGG_MODES == LOSS_AGG_MODES
    assert rules.KL_TYPES == KL_PENALTIES


def test_the_advantage_estimators_are_registered() -> None:
    registry = register_advantage.__self__  # type: ignore[attr-defined]
    assert set(rules.ADV_ESTIMATORS) <= set(registry)


def test_schedules_and_dtypes_are_known_below() -> None:
    assert get_args(Optim.model_fields["lr_scheduler_type"].annotation) == SCHEDULES
    assert set(get_args(Model.model_fields["dtype"].annotation)) <= set(DTYPES)
