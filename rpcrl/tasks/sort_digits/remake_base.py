"""How was the shipped base checkpoint made? ``python -m rpcrl.tasks.sort_digits.remake_base DIR`` makes it again.

A Llama of 108,352 parameters learns for 600 steps from demonstrations whose digits are sorted up or down by the
throw of a coin, *whatever the word says*. It can sort afterwards, and the two words mean nothing to it. The seed is
pinned: several were tried, and one was taken from which GRPO learns well with each of the RL seeds 0 to 4 (see
``docs/default-job.md``). Remade on another machine the floats differ in the last bits, and after 600 steps in more
than these; the job learns from such a base too, but its curve is not the shipped one's.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch

from rpcrl.tasks.sort_digits.prompts import MAX_DIGITS, WORDS, Prompt, heldout_prompts, train_prompt

__all__ = ["BASE_SEED", "build_tokenizer", "greedy_answers", "main", "new_model", "remake_base", "skill_and_accuracy"]

BASE_SEED = 10
NUM_STEPS = 600
DEMOS_PER_STEP = 64
LEARNING_RATE = 5e-3
WARMUP_STEPS = 20
FINAL_LR_FRACTION = 0.1
MAX_NEW_TOKENS = MAX_DIGITS + 2
_IGNORED = -100

_CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% if not loop.last %} {% endif %}{% endfor %}"
_SPECIAL_TOKENS = ("<pad>", "<eos>", "<unk>")


def build_tokenizer() -> Any:
    """Return the tokenizer of 16 tokens, one a word; its chat template is the messages' text and nothing else."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    tokens = [*_SPECIAL_TOKENS, *(str(digit) for digit in range(10)), *WORDS, "="]
    inner = Tokenizer(WordLevel({token: number for number, token in enumerate(tokens)}, unk_token="<unk>"))
    inner.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        padding_side="left",
        model_max_length=64,
        chat_template=_CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def new_model(seed: int) -> Any:
    """Return a fresh model with weights drawn from ``seed``; torch's global generator is left as it was."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=24,  # 16 tokens, padded to a multiple of 8
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=64,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    model.generation_config.do_sample = False
    return model


def remake_base(directory: Path, *, seed: int = BASE_SEED, num_steps: int = NUM_STEPS) -> dict[str, float]:
    """Train a base from scratch and write it to ``directory`` in bfloat16; returns its held-out figures.

    Takes about 12 CPU seconds on one thread. The files are what ``rpcrl/tasks/sort_digits/base`` holds.
    """
    tokenizer = build_tokenizer()
    model = new_model(seed)
    _warm_start(model, tokenizer, seed=seed, num_steps=num_steps)
    model.to(torch.bfloat16)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    _forget_version(directory)
    return skill_and_accuracy(model.to(torch.float32), tokenizer)


def skill_and_accuracy(model: Any, tokenizer: Any) -> dict[str, float]:
    """Return greedy figures on the held-out prompts.

    ``skill`` counts answers sorted in either direction, ``accuracy`` those sorted as the word says, and
    ``accuracy_ascending`` and ``accuracy_descending`` the latter by word.
    """
    prompts = heldout_prompts()
    answers = greedy_answers(model, tokenizer, prompts)
    right = [float(answer == prompt.answer) for prompt, answer in zip(prompts, answers, strict=True)]
    sorted_somehow = [
        answer in {prompt.sorted_digits(descending=False), prompt.sorted_digits(descending=True)}
        for prompt, answer in zip(prompts, answers, strict=True)
    ]
    figures = {"skill": sum(sorted_somehow) / len(prompts), "accuracy": sum(right) / len(prompts)}
    for word in WORDS:
        own = [value for prompt, value in zip(prompts, right, strict=True) if prompt.word == word]
        figures[f"accuracy_{word}"] = sum(own) / len(own)
    return figures


@torch.no_grad()
def greedy_answers(model: Any, tokenizer: Any, prompts: tuple[Prompt, ...]) -> list[str]:
    """Return the greedy answer to each prompt as text; an answer that does not end is the empty string."""
    inputs = tokenizer([prompt.text for prompt in prompts], padding=True, return_tensors="pt")
    output = model.generate(
        input_ids=inputs["input_ids"],
        attention_mask=inputs["attention_mask"],
        max_new_tokens=MAX_NEW_TOKENS,
        do_sample=False,
    )
    responses = output[:, inputs["input_ids"].shape[1] :]
    texts = tokenizer.batch_decode(responses, skip_special_tokens=True)
    ended = (responses == tokenizer.eos_token_id).any(dim=1).tolist()
    return [text if done else "" for text, done in zip(texts, ended, strict=True)]


def _warm_start(model: Any, tokenizer: Any, *, seed: int, num_steps: int) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    coin = torch.Generator().manual_seed(seed)
    model.train()
    for step in range(num_steps):
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * _lr_factor(step, num_steps)
        # Stream -1 - seed: the RL seeds 0, 1, … read other prompts than the warm start.
        prompts = [train_prompt(-1 - seed, step * DEMOS_PER_STEP + i) for i in range(DEMOS_PER_STEP)]
        flips = (torch.rand(DEMOS_PER_STEP, generator=coin) < 0.5).tolist()
        input_ids, attention_mask, labels = _demonstrations(tokenizer, prompts, flips)
        loss = model(input_ids=input_ids, attention_mask=attention_mask, labels=labels, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    model.eval()


def _demonstrations(
    tokenizer: Any, prompts: list[Prompt], descending: list[bool]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return right-padded input_ids, attention_mask and labels, each [n, T]; only the answer and its end are learnt."""
    rows, labels = [], []
    for prompt, down in zip(prompts, descending, strict=True):
        asked = tokenizer.encode(prompt.text)
        answer = [*tokenizer.encode(prompt.sorted_digits(descending=down)), tokenizer.eos_token_id]
        rows.append(torch.tensor(asked + answer))
        labels.append(torch.tensor([_IGNORED] * len(asked) + answer))
    pad = torch.nn.utils.rnn.pad_sequence
    padded = pad(rows, batch_first=True, padding_value=tokenizer.pad_token_id)
    mask = pad([torch.ones_like(row) for row in rows], batch_first=True, padding_value=0)
    return padded, mask, pad(labels, batch_first=True, padding_value=_IGNORED)


def _lr_factor(step: int, num_steps: int) -> float:
    warm = min(1.0, (step + 1) / WARMUP_STEPS)
    decay = 1.0 - (1.0 - FINAL_LR_FRACTION) * step / num_steps
    return warm * decay


def _forget_version(directory: Path) -> None:
    """Drop the library's version from the JSON files: a remade folder then differs in its weights only."""
    for name in ("config.json", "generation_config.json"):
        path = directory / name
        content = json.loads(path.read_text())
        content.pop("transformers_version", None)
        path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")


def main(arguments: list[str] | None = None) -> int:
    """Remake the base checkpoint in a folder and print its figures."""
    parser = argparse.ArgumentParser(prog="python -m rpcrl.tasks.sort_digits.remake_base", description=__doc__)
    parser.add_argument("directory", type=Path, help="where to write the checkpoint")
    parser.add_argument("--seed", type=int, default=BASE_SEED, help=f"seed of the warm start (default {BASE_SEED})")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    figures = remake_base(options.directory, seed=options.seed)
    sys.stdout.write(json.dumps({"directory": str(options.directory), "seed": options.seed, **figures}) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
