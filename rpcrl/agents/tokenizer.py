"""How does a process without torch turn text into tokens? With the model folder's own tokenizer.json and chat template.

Transformers' tokenizers load torch (300 MB and seconds for each process). What is here gives the same tokens, and the
same text from the same template.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from rpcrl.errors import UsageError

__all__ = ["LightTokenizer"]


class LightTokenizer:
    """The tokenizer of a model folder. Raises UsageError when the folder has no tokenizer.json."""

    def __init__(self, folder: str | Path) -> None:
        from tokenizers import Tokenizer

        self.folder = Path(folder)
        file = self.folder / "tokenizer.json"
        if not file.is_file():
            raise UsageError(f"agent loops read the model's tokenizer, and {self.folder} has no tokenizer.json")
        self._tokenizer = Tokenizer.from_file(str(file))
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        settings = self.folder / "tokenizer_config.json"
        self._settings: dict[str, Any] = json.loads(settings.read_text(encoding="utf-8")) if settings.is_file() else {}
        self.eos_token = self._special("eos_token")
        self.pad_token = self._special("pad_token") or self.eos_token
        self.chat_template = self._template()

    @property
    def eos_token_id(self) -> int | None:
        """Id of the token that ends a text."""
        return self.token_id(self.eos_token) if self.eos_token else None

    @property
    def pad_token_id(self) -> int | None:
        """Id of the token that fills rows up: the padding token, else the end."""
        return self.token_id(self.pad_token) if self.pad_token else None

    def token_id(self, token: str) -> int | None:
        """Return the id of a token, None when the vocabulary has none."""
        found: int | None = self._tokenizer.token_to_id(token)
        return found

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text, with none added: special tokens count where the text names them."""
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of tokens."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens))

    def chat(self, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Mapping[str, Any]] | None = None) -> str:
        """Return messages as the model's chat template writes them, with the opening of the answer.

        Raises UsageError when the folder has no template.
        """
        return self.render(messages, tools=tools, add_generation_prompt=True)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
    ) -> str:
        """Return messages as the chat template writes them. Raises UsageError when the folder has no template."""
        if not self.chat_template:
            raise UsageError(f"{self.folder} has no chat template; put a chat_template.jinja into it")
        template = _environment().from_string(self.chat_template)
        names = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
        special = {name: self._special(name) for name in names if self._special(name) is not None}
        return str(
            template.render(
                messages=list(messages), tools=tools, add_generation_prompt=add_generation_prompt, **special
            )
        )

    def next_turn(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """Return what stands between an answer of the model, with its end, and the opening of its next one.

        ``messages`` are what is said to it meanwhile: a tool's result, another question. The answer itself is never
        written anew, so the tokens of the conversation stay those that were sampled. Raises UsageError for a template
        that does not simply go on after an answer.
        """
        question, answer = {"role": "user", "content": "question"}, {"role": "assistant", "content": "answer"}
        opened = f"{self.chat([question])}answer"
        whole = self.chat([question, answer, *messages])
        if not whole.startswith(opened):
            raise UsageError(
                f"the chat template of {self.folder} writes an answer that lies behind otherwise than one that is "
                "being given; write the tokens between two turns yourself"
            )
        rest = whole[len(opened) :]
        return rest.removeprefix(self.eos_token) if self.eos_token else rest

    def _special(self, name: str) -> str | None:
        value = self._settings.get(name)
        return value.get("content") if isinstance(value, dict) else value

    def _template(self) -> str | None:
        file = self.folder / "chat_template.jinja"
        if file.is_file():
            return file.read_text(encoding="utf-8")
        template = self._settings.get("chat_template")
        if isinstance(template, list):  # several by name
            template = {entry["name"]: entry["template"] for entry in template}.get("default")
        return template


def _environment() -> Any:
    """Return jinja's sandbox, set up as Transformers sets it up: templates are written for that."""
    from jinja2.exceptions import TemplateError
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment
