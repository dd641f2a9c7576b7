"""What does sampling with vLLM inside a worker cost beside vLLM called directly, and what does a weight update?

- Tokens: 32 prompts of 32 tokens, 128 new tokens each, sampled. ``rpcrl``: the batch goes to a rollout worker in
  another process and its responses come back (``generate_sequences``). ``vllm``: the same settings given to vLLM's
  engine in this process, whole outputs asked for. ``hf``: Transformers' ``generate`` on the same model here.
- Weights in: a random Llama of 135 million parameters, float32 to float32. ``rpcrl``: ``update_weights`` from buckets
  of 64 MiB. ``vllm``: ``reload_weights`` of the same tensors. ``memcpy``: a copy of the same bytes.

The systems take turns. vLLM must be installed (``make vllm``).
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from report import options, report

from rpcrl.bench.measure import Case, Row, row_of, timed

PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 32, 32, 128
VOCABULARY = 4096
SMALL = {
    "hidden_size": 256, "intermediate_size": 800, "num_hidden_layers": 11, "num_attention_heads": 4,
    "num_key_value_heads": 4, "head_dim": 64, "max_position_embeddings": 256, "initializer_range": 0.02,
}  # fmt: skip
LARGE = {
    "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
    "num_key_value_heads": 3, "head_dim": 64, "max_position_embeddings": 256, "initializer_range": 0.02,
}  # fmt: skip
BUCKET_BYTES = 64 << 20


def in_turn(cases: dict[str, Any], rounds: int) -> dict[str, list[float]]:
    """Call each of the cases once a round, another one first each time; returns the seconds of each."""
    samples: dict[str, list[float]] = {name: [] for name in cases}
    order = list(cases)
    for number in range(rounds):
        for name in order[number % len(order) :] + order[: number % len(order)]:
            samples[name] += timed(cases[name])(1)
    return samples


def open_worker(controller: Any, folder: Path) -> Any:
    """Start one process with actor and rollout, and give the rollout weights; returns the rollout's view."""
    from rpcrl import ResourcePool, WorkerGroup
    from rpcrl.config.run import Actor, ActorRolloutRef, Rollout
    from rpcrl.roles.actor import ActorWorker
    from rpcrl.roles.rollout import RolloutWorker
    from rpcrl.runtime.worker_group import ClassWithInitArgs

    roles = ActorRolloutRef(
        actor=Actor(), rollout=Rollout(name="vllm", kv_cache_megabytes=128, max_model_len=PROMPT_TOKENS + NEW_TOKENS)
    )
    common = {"model_path": str(folder), "device": "cpu", "threads": 1}
    classes = {
        "actor": ClassWithInitArgs(ActorWorker, roles, **common, seed=0),
        "rollout": ClassWithInitArgs(RolloutWorker, roles, **common),
    }
    views = WorkerGroup(ResourcePool([1], device=None), classes, name="bench", controller=controller).spawn()
    views["rollout"].update_weights(1)
    return views["rollout"]


def prompts() -> Any:
    import numpy as np
    import torch

    from rpcrl.batch.data_proto import DataProto

    ids = torch.randint(16, VOCABULARY, (PROMPTS, PROMPT_TOKENS), generator=torch.Generator().manual_seed(0))
    return DataProto.from_dict(
        tensors={"input_ids": ids, "attention_mask": torch.ones_like(ids)},
        non_tensors={
            "uid": np.array([str(row) for row in range(PROMPTS)], dtype=object),
            "sample_index": np.zeros(PROMPTS, dtype=object),
        },
        meta_info={"response_length": NEW_TOKENS, "seed": 0, "global_steps": 0},
    )


def directly(engine: Any, batch: Any) -> int:
    """Give the batch to vLLM itself, as its own documentation does; returns the tokens."""
    from vllm.inputs.engine import tokens_input
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    llm = engine._llm
    for row, ids in enumerate(batch.batch["input_ids"].tolist()):
        parameters = SamplingParams(
            temperature=1.0, seed=row, max_tokens=NEW_TOKENS, logprobs=0, stop_token_ids=sorted(engine.stop_ids),
            ignore_eos=True, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY,
        )  # fmt: skip
        llm.add_request(str(row), tokens_input(ids), parameters)
    tokens = 0
    while llm.has_unfinished_requests():
        tokens += sum(len(output.outputs[0].token_ids) for output in llm.step())
    return tokens


def by_transformers(model: Any, batch: Any) -> int:
    import torch

    ids = batch.batch["input_ids"]
    with torch.inference_mode():
        output = model.generate(
            input_ids=ids, attention_mask=batch.batch["attention_mask"], do_sample=True, max_new_tokens=NEW_TOKENS,
            top_k=0, pad_token_id=0,
        )  # fmt: skip
    new = output[:, ids.shape[1] :]
    return int((new != 0).sum())


def tokens_per_second(folder: Path, rounds: int) -> tuple[list[Row], dict[str, object]]:
    import torch

    from rpcrl import Controller
    from rpcrl.engines.hf_model import load_model, use_threads
    from rpcrl.engines.vllm_rollout import VllmRolloutEngine
    from rpcrl.engines.vllm_start import VllmSettings

    engine = VllmRolloutEngine(
        folder, settings=VllmSettings(max_model_len=PROMPT_TOKENS + NEW_TOKENS, kv_cache_bytes=128 << 20)
    )
    use_threads(1)
    model, batch = load_model(folder, dtype=torch.float32), prompts()
    counts: dict[str, list[int]] = {"rpcrl": [], "vllm": [], "hf": []}
    with Controller() as controller:
        rollout = open_worker(controller, folder)
        calls = {
            "rpcrl": lambda: int(rollout.generate_sequences(batch).batch["response_mask"].sum()),
            "vllm": lambda: directly(engine, batch),
            "hf": lambda: by_transformers(model, batch),
        }

        def counted(name: str) -> Any:
            return lambda: counts[name].append(calls[name]())

        cases = {name: counted(name) for name in calls}
        in_turn(cases, 1)
        for kept in counts.values():
            kept.clear()
        samples = in_turn(cases, rounds)
    engine.close()
    rows = [row_of(Case(name, "generate", lambda _: [], variant="9.6M fp32"), times) for name, times in samples.items()]
    rates = {
        name: sorted(count / seconds for count, seconds in zip(counts[name], samples[name], strict=True))[rounds // 2]
        for name in samples
    }
    more: dict[str, object] = {f"tokens_per_s_{name}": round(rate) for name, rate in rates.items()}
    more["rpcrl_against_vllm"] = round(rates["rpcrl"] / rates["vllm"], 3)
    more["rpcrl_against_hf"] = round(rates["rpcrl"] / rates["hf"], 3)
    return rows, more


def buckets_of(tensors: list[tuple[str, Any]]) -> list[list[tuple[str, Any]]]:
    buckets: list[list[tuple[str, Any]]] = [[]]
    filled = 0
    for name, tensor in tensors:
        if buckets[-1] and filled + tensor.nbytes > BUCKET_BYTES:
            buckets.append([])
            filled = 0
        buckets[-1].append((name, tensor))
        filled += tensor.nbytes
    return buckets


def weights_in(folder: Path, rounds: int, variant: str) -> tuple[list[Row], dict[str, object]]:
    import torch

    from rpcrl.engines.hf_model import load_model
    from rpcrl.engines.vllm_rollout import VllmRolloutEngine
    from rpcrl.engines.vllm_start import VllmSettings

    model = load_model(folder, dtype=torch.float32)
    tensors = [(name, parameter.detach()) for name, parameter in model.named_parameters()]
    size = sum(tensor.nbytes for _, tensor in tensors)
    target = [torch.empty_like(tensor) for _, tensor in tensors]
    engine = VllmRolloutEngine(folder, load_weights=False, settings=VllmSettings(kv_cache_bytes=64 << 20))
    versions = iter(range(1, 10**6))

    def reload(worker: Any) -> None:
        from vllm.config import set_current_vllm_config

        with set_current_vllm_config(worker.vllm_config):
            worker.reload_weights(weights_iterator=iter(tensors))

    cases = {
        "rpcrl": lambda: engine.update_weights(iter(buckets_of(tensors)), version=next(versions)),
        "vllm": lambda: engine._llm.collective_rpc(reload),
        "memcpy": lambda: [one.copy_(two) for one, (_, two) in zip(target, tensors, strict=True)],
    }
    in_turn(cases, 1)
    samples = in_turn(cases, rounds)
    engine.close()
    mib = round(size / 2**20)
    rows = [
        row_of(Case(name, "weights in", lambda _: [], variant=variant, mib=mib), times)
        for name, times in samples.items()
    ]
    p50 = {row.system: row.p50_s for row in rows}
    return rows, {
        "update_against_reload": round(p50["rpcrl"] / p50["vllm"], 3),
        "own_share_in_memcpys": round((p50["rpcrl"] - p50["vllm"]) / p50["memcpy"], 2),
    }


def main() -> None:
    chosen = options(__doc__ or "")
    from rpcrl.engines.vllm_probe import require_vllm
    from rpcrl.errors import UsageError
    from rpcrl.testing.tiny_model import write_tiny_llama

    try:
        version = require_vllm()
    except UsageError as error:
        sys.exit(str(error))
    rounds = 3 if chosen.quick else 11
    began_s = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="rpcrl-bench-") as scratch:
        small = write_tiny_llama(Path(scratch) / "small", vocabulary=VOCABULARY, **SMALL)
        rows, more = tokens_per_second(small, rounds)
        size = 8192 if chosen.quick else 49152
        large = write_tiny_llama(Path(scratch) / "large", vocabulary=size, **LARGE)
        weight_rows, weight_figures = weights_in(large, rounds, "108M fp32" if chosen.quick else "135M fp32")
    more |= weight_figures
    report(
        "Sampling and weight updates", [*rows, *weight_rows], chosen.json, vllm=version,
        seconds=round(time.perf_counter() - began_s), **more,
    )  # fmt: skip


if __name__ == "__main__":
    main()
