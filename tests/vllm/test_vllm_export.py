"""Does plain vLLM, without a line of rpcrl, open what a run exports, and read from it what Transformers reads?"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import tensorboardX  # noqa: F401  (sets an environment variable when it is first imported)

from rpcrl import env
from tests.e2e.jobs import train

# slow: it starts a vLLM of its own
pytestmark = [pytest.mark.vllm, pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(300)]

PROMPTS = [f"{word} {digits} =" for word in ("ascending", "descending") for digits in ("5 2 9 1", "7 0 3", "8 8 1 4 6")]
MAX_NEW_TOKENS = 7
PLAIN = """
import json, sys
from vllm import LLM, SamplingParams

if __name__ == "__main__":
    folder, prompts, tokens = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3])
    llm = LLM(folder, dtype="float32", enforce_eager=True, max_model_len=16, kv_cache_memory_bytes=16 << 20)
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=tokens, logprobs=0), use_tqdm=False)
    told = []
    for output in outputs:
        (one,) = output.outputs
        sampled = [place[token].logprob for token, place in zip(one.token_ids, one.logprobs, strict=True)]
        told.append({"prompt": output.prompt_token_ids, "tokens": list(one.token_ids), "log_probs": sampled})
    print("TOLD " + json.dumps(told))
"""
SETTINGS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "TORCHDYNAMO_DISABLE": "1",
}


def by_plain_vllm(folder: Path, script: Path) -> list[dict[str, list[float]]]:
    script.write_text(PLAIN)
    done = subprocess.run(
        [sys.executable, "-P", script, folder, json.dumps(PROMPTS), str(MAX_NEW_TOKENS)],
        env=env.snapshot() | SETTINGS,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    told = [line for line in done.stdout.splitlines() if line.startswith("TOLD ")]
    assert len(told) == 1, done.stdout[-2000:] + done.stderr[-4000:]
    return json.loads(told[0].removeprefix("TOLD "))


def test_an_exported_model_opens_in_vllm_and_says_what_it_says_in_transformers(tmp_path):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    job = train(tmp_path / "run", "trainer.n_gpus_per_node=1", "trainer.total_training_steps=2")
    told = by_plain_vllm(job.run.hf, tmp_path / "plain.py")
    model = AutoModelForCausalLM.from_pretrained(job.run.hf, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(job.run.hf)
    assert len(told) == len(PROMPTS)
    for text, row in zip(PROMPTS, told, strict=True):
        assert row["prompt"] == tokenizer(text)["input_ids"]
        start, tokens = len(row["prompt"]), torch.tensor(row["tokens"])
        with torch.no_grad():
            logits = model(torch.tensor([[*row["prompt"], *row["tokens"]]])).logits[0, start - 1 : -1]
        assert logits.argmax(-1).equal(tokens)
        expected = logits.log_softmax(-1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
        torch.testing.assert_close(torch.tensor(row["log_probs"]), expected, atol=1e-4, rtol=0)
