"""What does vLLM do to the process that it runs in, and what of it is taken back?

It runs inside the worker, beside the trainer. Starting an engine sets environment variables that later code and every
child process would read, replaces ``torch.set_num_threads``, and seeds every random generator; a second engine, or the
end of the first, takes the process groups of torch.distributed away, the trainer's among them. So there is one engine a
process, and what its start has changed is put back.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from rpcrl import env
from rpcrl.errors import UsageError
from rpcrl.logs import get_logger

__all__ = ["ProcessState", "claim_process", "engine_variables", "release_process", "trainer_keeps_its_process"]

log = get_logger(__name__)

KEPT_PREFIX = "VLLM_"
"""vLLM reads its own variables again later: they stay as it has set them."""
ENGINE_VARIABLES = {
    # The engine steps in this process: the weights that change between two steps are the trainer's own memory.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
}
CPU_VARIABLES = {
    # "auto" pins every engine of a machine to its first core.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # Log-probs go through a compiled function even with enforce_eager: 4 to 20 s of compiling at the first sample.
    "TORCHDYNAMO_DISABLE": "1",
}

_owner: str | None = None
"""Who has the one engine of this process."""


def claim_process(model: str) -> None:
    """Take this process for an engine. Raises UsageError when there is one already."""
    global _owner
    if _owner is not None:
        raise UsageError(
            f"this process has a vLLM engine already (for {_owner}), and a second one would end the first one's "
            "process groups; give the second rollout a process of its own"
        )
    _owner = model


def release_process() -> None:
    """Let the process be taken again, when its engine is gone."""
    global _owner
    _owner = None


def engine_variables(*, device: str, eager: bool) -> dict[str, str]:
    """Return the variables that vLLM must find; set before it is imported, and never over a user's own."""
    wanted = dict(ENGINE_VARIABLES)
    if env.get("VLLM_LOGGING_LEVEL") is None:
        wanted["VLLM_LOGGING_LEVEL"] = "ERROR"
    if device == "cpu":
        wanted |= CPU_VARIABLES
        if not eager:
            del wanted["TORCHDYNAMO_DISABLE"]
    needed = {"VLLM_ENABLE_V1_MULTIPROCESSING"}
    return {name: value for name, value in wanted.items() if name in needed or env.get(name) is None}


def _default_group() -> Any:
    """Return torch.distributed's default group; None without one."""
    initialized = dist.is_initialized()
    return dist.group.WORLD if initialized else None


@dataclass(frozen=True)
class ProcessState:
    """What an engine's start must not change for the rest of the process."""

    variables: dict[str, str]
    python_random: Any
    numpy_random: Any
    torch_random: torch.Tensor
    cuda_random: torch.Tensor | None
    set_num_threads: Any
    threads: int
    dtype: torch.dtype
    gradients: bool
    group: Any
    """The default process group; None without one."""

    @classmethod
    def of_now(cls) -> ProcessState:
        """Look at the process."""
        has_context = torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        return cls(
            env.snapshot(),
            random.getstate(),
            np.random.get_state(),
            torch.get_rng_state(),
            torch.cuda.get_rng_state() if has_context else None,
            torch.set_num_threads,
            torch.get_num_threads(),
            torch.get_default_dtype(),
            torch.is_grad_enabled(),
            _default_group(),
        )

    def restore(self) -> list[str]:
        """Put everything back; returns what was not as before. Raises UsageError when the trainer's group is gone."""
        changed = self._restore_variables()
        if torch.set_num_threads is not self.set_num_threads:
            torch.set_num_threads = self.set_num_threads
            changed.append("torch.set_num_threads")
        if torch.get_num_threads() != self.threads:
            torch.set_num_threads(self.threads)
            changed.append("torch's number of threads")
        if torch.get_default_dtype() != self.dtype:
            torch.set_default_dtype(self.dtype)
            changed.append("torch's default dtype")
        if torch.is_grad_enabled() != self.gradients:
            torch.set_grad_enabled(self.gradients)
            changed.append("torch's grad mode")
        if not torch.equal(torch.get_rng_state(), self.torch_random):
            changed.append("torch's random state")
        random.setstate(self.python_random)
        np.random.set_state(self.numpy_random)
        torch.set_rng_state(self.torch_random)
        if self.cuda_random is not None:
            torch.cuda.set_rng_state(self.cuda_random)
        if self.group is not None and _default_group() is not self.group:
            raise UsageError(
                "the start of the vLLM engine has taken the trainer's default process group away; the trainer could "
                "not go on in this process"
            )
        return changed

    def _restore_variables(self) -> list[str]:
        after = env.snapshot()
        differing = {
            name
            for name in {*self.variables, *after}
            if self.variables.get(name) != after.get(name) and not name.startswith(KEPT_PREFIX)
        }
        env.put({name: self.variables[name] for name in differing if name in self.variables})
        env.drop(*(name for name in differing if name not in self.variables))
        return sorted(differing)


@contextlib.contextmanager
def trainer_keeps_its_process() -> Iterator[None]:
    """Put the process back as it was before the body; tells the log what the body had changed."""
    before, began_s = ProcessState.of_now(), time.perf_counter()
    try:
        yield
    finally:
        changed = before.restore()
    log.debug("vLLM started in %.1f s; put back: %s", time.perf_counter() - began_s, ", ".join(changed) or "nothing")
