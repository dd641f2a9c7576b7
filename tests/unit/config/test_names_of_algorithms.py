"""The names that a configuration may hold are names that the code below it has."""

from __future__ import annotations

import inspect
from typing import get_args

from rpcrl.algorithms.advantages import get_advantage
from rpcrl.algorithms.aggregate import LOSS_AGG_MODES
from rpcrl.algorithms.kl import KL_PENALTIES
from rpcrl.algorithms.losses import get_policy_loss
from rpcrl.config import algorithm_rules
from rpcrl.config.functions import needed_arguments
from rpcrl.config.registry import ADVANTAGES, POLICY_LOSSES
from rpcrl.config.run import Model, Optim
from rpcrl.engines.hf_model import DTYPES
from rpcrl.engines.schedule import SCHEDULES


def test_loss_aggregations_and_kl_estimators_are_the_same() -> None:
    assert algorithm_rules.LOSS_AGG_MODES == LOSS_AGG_MODES
    assert algorithm_rules.KL_TYPES == KL_PENALTIES


def test_what_is_called_built_in_is_there() -> None:
    for name in ADVANTAGES.built_in:
        assert get_advantage(name).__module__ == "rpcrl.algorithms.advantages"
    for name in POLICY_LOSSES.built_in:
        assert get_policy_loss(name).__module__ == "rpcrl.algorithms.losses"


def test_the_settings_that_an_estimator_reads_are_those_of_its_signature() -> None:
    assert set(algorithm_rules.READ_BY_ESTIMATORS) == set(ADVANTAGES.built_in)
    settings = {"gamma", "lam", "norm_adv_by_std_in_grpo"}
    for name, read in algorithm_rules.READ_BY_ESTIMATORS.items():
        assert set(inspect.signature(get_advantage(name)).parameters) & settings == read, name
    assert "values" in needed_arguments(get_advantage("gae"))


def test_schedules_and_dtypes_are_known_below() -> None:
    assert get_args(Optim.model_fields["lr_scheduler_type"].annotation) == SCHEDULES
    assert set(get_args(Model.model_fields["dtype"].annotation)) <= set(DTYPES)
