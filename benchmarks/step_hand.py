"""What does a GRPO step cost when nothing is shared with anybody? One model, written down tightly, one process.

It samples with the weights that it trains, so nothing is synced, and keeps the sampler's log-probs as those of the old
policy. Same model, task, batch and updates as the default job: ``python step_hand.py STEPS``.
"""

from __future__ import annotations

import sys
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache
from turns import Turns

from rpcrl.tasks.sort_digits import base_checkpoint, train_row

PROMPTS, SAMPLES, UPDATES, LENGTH = 32, 8, 4, 8
RATE, WARMUP, CLIP = 5e-4, 5, 0.2


class Hand:
    """A model, its optimizer, and one step."""

    def __init__(self) -> None:
        self.tokenizer: Any = AutoTokenizer.from_pretrained(base_checkpoint(), padding_side="left")
        self.model: Any = AutoModelForCausalLM.from_pretrained(base_checkpoint(), dtype=torch.float32).eval()
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=0.0, betas=(0.9, 0.99), weight_decay=0.0, fused=True
        )
        self.eos, self.pad = self.tokenizer.eos_token_id, self.tokenizer.pad_token_id

    @torch.no_grad()
    def generate(self, ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return tokens, log-probs and mask, each [N, LENGTH]; every prompt is computed once."""
        cache = DynamicCache()
        places = (mask.cumsum(-1) - 1).clamp(min=0)
        out = self.model(
            input_ids=ids, attention_mask=mask, position_ids=places, past_key_values=cache, logits_to_keep=1
        )
        cache.batch_repeat_interleave(SAMPLES)
        logits = out.logits[:, -1].repeat_interleave(SAMPLES, 0)
        mask, place = mask.repeat_interleave(SAMPLES, 0), mask.sum(-1, keepdim=True).repeat_interleave(SAMPLES, 0)
        count = logits.shape[0]
        tokens, log_probs = torch.full((count, LENGTH), self.pad), torch.zeros(count, LENGTH)
        taken, rows = torch.zeros(count, LENGTH), torch.arange(count)
        for at in range(LENGTH):
            every = logits.log_softmax(-1)
            drawn = every.exp().multinomial(1)
            tokens[rows, at], log_probs[rows, at], taken[rows, at] = drawn[:, 0], every.gather(1, drawn)[:, 0], 1.0
            alive = (drawn[:, 0] != self.eos).nonzero()[:, 0]
            if at + 1 == LENGTH or not alive.numel():
                break
            if alive.numel() < rows.numel():
                cache.batch_select_indices(alive)
                rows, drawn, mask, place = rows[alive], drawn[alive], mask[alive], place[alive]
            mask = torch.cat([mask, mask.new_ones(len(rows), 1)], 1)
            out = self.model(input_ids=drawn, attention_mask=mask, position_ids=place, past_key_values=cache)
            logits, place = out.logits[:, -1], place + 1
        return tokens, log_probs, taken

    def update(self, ids: Tensor, mask: Tensor, tokens: Tensor, old: Tensor, taken: Tensor, worth: Tensor) -> float:
        """Make one optimizer step; returns the norm of the gradient."""
        ids, mask = torch.cat([ids, tokens], 1)[:, :-1], torch.cat([mask, taken.long()], 1)[:, :-1]
        places = (mask.cumsum(-1) - 1).clamp(min=0)
        width = tokens.shape[1]
        logits = self.model(
            input_ids=ids, attention_mask=mask, position_ids=places, use_cache=False, logits_to_keep=width
        ).logits
        ratio = (logits.log_softmax(-1).gather(-1, tokens.unsqueeze(-1))[..., 0] - old).exp()
        gain = torch.minimum(ratio * worth, ratio.clamp(1 - CLIP, 1 + CLIP) * worth)
        (-(gain * taken).sum() / taken.sum()).backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(norm)

    def step(self, rows: list[Any], rate: float) -> dict[str, float]:
        """Make one step of PROMPTS × SAMPLES samples and UPDATES updates; returns its figures."""
        began_s = perf_counter()
        texts = [
            self.tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, tokenize=False)
            for row in rows
        ]
        encoded = self.tokenizer(texts, padding=True, add_special_tokens=False, return_tensors="pt")
        ids, mask = encoded["input_ids"], encoded["attention_mask"]
        tokens, old, taken = self.generate(ids, mask)
        generated_s = perf_counter()
        answers = self.tokenizer.batch_decode(tokens, skip_special_tokens=True)
        ended = (tokens == self.eos).any(-1).tolist()
        truths = [row["reward_model"]["ground_truth"] for row in rows for _ in range(SAMPLES)]
        right = [text == truth and end for text, truth, end in zip(answers, truths, ended, strict=True)]
        rewards = torch.tensor(right, dtype=torch.float32)
        groups = rewards.view(-1, SAMPLES)
        worth = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-6)
        columns = [ids.repeat_interleave(SAMPLES, 0), mask.repeat_interleave(SAMPLES, 0), tokens, old, taken]
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        size = len(right) // UPDATES
        for part in zip(*(column.split(size) for column in [*columns, worth.view(-1, 1)]), strict=True):
            norm = self.update(*part)
        ended_s = perf_counter()
        phases = {"phase/gen": generated_s - began_s, "phase/update_actor": ended_s - generated_s}
        return {"step": ended_s - began_s, "grad_norm": norm, "reward": float(rewards.mean()), **phases}


def main() -> None:
    """Make as many steps as the command line says."""
    turns = Turns()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    hand, steps = Hand(), int(sys.argv[1])
    for step in range(steps):
        rows = [train_row(0, step * PROMPTS + index) for index in range(PROMPTS)]
        rate = RATE * (step / WARMUP if step < WARMUP else (steps - step) / (steps - WARMUP))
        turns.wait()
        turns.done(**hand.step(rows, rate))


if __name__ == "__main__":
    main()
