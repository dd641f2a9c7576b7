"""The light tokenizer against Transformers' own: the same tokens, the same text of the same template."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from rpcrl.agents.tokenizer import LightTokenizer
from rpcrl.errors import UsageError
from rpcrl.tasks.sort_digits import base_checkpoint
from rpcrl.testing.tiny_model import write_tiny_llama

TEMPLATE = """{%- if tools %}tools: {{ tools | tojson }}
{% endif %}
{%- for message in messages %}
    {%- if loop.index0 > 8 %}{% break %}{% endif %}
    {%- if message.role == 'bad' %}{{ raise_exception('no such role') }}{% endif %}
<{{ message['role'] }}> {{ message['content'] | trim }}{{ eos_token }}
{% endfor %}
{%- if add_generation_prompt %}<assistant>{% endif %}"""
CHAT = [
    {"role": "system", "content": " Sort. <b> "},
    {"role": "user", "content": "descending 1 5 3 = ü"},
]
TOOLS = [{"type": "function", "function": {"name": "add", "description": "größer & <b>"}}]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = write_tiny_llama(tmp_path / "model")
    (made / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    return made


def test_texts_and_tokens_are_those_of_transformers(folder: Path):
    light, whole = LightTokenizer(folder), AutoTokenizer.from_pretrained(folder)
    for text in ("descending 1 5 3 = <eos>", "what is this", ""):
        ids = whole.encode(text, add_special_tokens=False)
        assert light.encode(text) == ids
        for skip in (True, False):
            assert light.decode(ids, skip_special_tokens=skip) == whole.decode(ids, skip_special_tokens=skip)
    assert (light.eos_token_id, light.pad_token_id) == (whole.eos_token_id, whole.pad_token_id)
    assert light.token_id("descending") == whole.convert_tokens_to_ids("descending")
    assert light.token_id("nowhere") is None


@pytest.mark.parametrize("tools", [None, TOOLS])
def test_the_template_writes_what_it_writes_there(folder: Path, tools: list[dict[str, object]] | None):
    light, whole = LightTokenizer(folder), AutoTokenizer.from_pretrained(folder)
    expected = whole.apply_chat_template(CHAT, tools=tools, add_generation_prompt=True, tokenize=False)
    assert light.chat(CHAT, tools=tools) == expected
    assert light.render(CHAT) == whole.apply_chat_template(CHAT, tokenize=False)
    assert "<system> Sort. <b><eos>" in expected
    with pytest.raises(Exception, match="no such role"):
        light.chat([{"role": "bad", "content": ""}])


CHATML = """{% for message in messages %}<{{ message.role }}> {{ message.content }}<eos>
{% endfor %}{% if add_generation_prompt %}<assistant> {% endif %}"""


def test_between_two_answers_stands_what_the_template_writes_there(folder: Path):
    (folder / "chat_template.jinja").write_text(CHATML)
    light = LightTokenizer(folder)
    first = light.chat(CHAT)
    told = [{"role": "tool", "content": "24"}]
    whole = light.chat([*CHAT, {"role": "assistant", "content": "12 + 12"}, *told])
    assert f"{first}12 + 12<eos>{light.next_turn(told)}" == whole
    assert light.next_turn([]) == "\n<assistant> "
    (folder / "chat_template.jinja").write_text("{{ messages[-1].content }}{% if add_generation_prompt %}:{% endif %}")
    with pytest.raises(UsageError, match="write the tokens between two turns yourself"):
        LightTokenizer(folder).next_turn(told)


def test_a_template_in_the_settings_is_found_too(folder: Path):
    (folder / "chat_template.jinja").unlink()
    file = folder / "tokenizer_config.json"
    settings = json.loads(file.read_text())
    with pytest.raises(UsageError, match="has no chat template"):
        LightTokenizer(folder).chat(CHAT)
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "{{ messages[0].role }}"}]
    for template in ("{{ messages[0].role }}", named):
        file.write_text(json.dumps({**settings, "chat_template": template}))
        assert LightTokenizer(folder).chat(CHAT) == "system"


def test_the_shipped_model_needs_nothing_else():
    light, whole = LightTokenizer(base_checkpoint()), AutoTokenizer.from_pretrained(base_checkpoint())
    messages = [{"role": "user", "content": "ascending 5 2 9 1 ="}]
    text = whole.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert light.chat(messages) == text
    assert light.encode(text) == whole.encode(text, add_special_tokens=False)


def test_a_folder_without_a_tokenizer_is_named(tmp_path: Path):
    with pytest.raises(UsageError, match=r"has no tokenizer.json"):
        LightTokenizer(tmp_path)


@pytest.mark.skipif("RPCRL_SMOLLM2" not in os.environ, reason="RPCRL_SMOLLM2 names no folder of SmolLM2")
def test_smollm2_reads_the_same(tmp_path: Path):
    folder = os.environ["RPCRL_SMOLLM2"]
    light, whole = LightTokenizer(folder), AutoTokenizer.from_pretrained(folder)
    text = whole.apply_chat_template(CHAT, add_generation_prompt=True, tokenize=False)
    assert light.chat(CHAT) == text
    ids = whole.encode(text, add_special_tokens=False)
    assert light.encode(text) == ids
    assert light.decode(ids) == whole.decode(ids, skip_special_tokens=True)
