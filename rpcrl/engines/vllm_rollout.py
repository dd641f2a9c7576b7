"""How does vLLM sample inside a worker process, stepped by the worker and with weights that change between two steps?

The engine core runs in this process and thread, without vLLM's own processes and without scheduling ahead: each step
returns the tokens that the weights of this moment have sampled, so a token's version is known, and an update between
two steps is exact. Keys and values of old weights never serve new ones: an update forgets them all, and requests in
flight compute theirs again.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rpcrl import env
from rpcrl.engines.base import NamedTensors
from rpcrl.engines.hf_model import (
    load_config,
    model_folder,
    pad_token_id,
    quiet,
    stop_token_ids,
    torch_dtype,
    use_threads,
)
from rpcrl.engines.requests import SampleOutput, SampleRequest
from rpcrl.engines.rollout_batches import answers, requests_of
from rpcrl.engines.vllm_process import claim_process, engine_variables, release_process, trainer_keeps_its_process
from rpcrl.engines.vllm_requests import Running, check_request, request_params, scoring_params
from rpcrl.engines.vllm_start import VllmSettings, kv_cache_bytes, open_engine
from rpcrl.engines.waking import TAGS
from rpcrl.errors import UsageError
from rpcrl.logs import get_logger

if TYPE_CHECKING:
    from rpcrl.batch.data_proto import DataProto

__all__ = ["VllmRolloutEngine"]

log = get_logger(__name__)


class VllmRolloutEngine:
    """A rollout engine (``rpcrl.engines.base.RolloutEngine``) over vLLM; one a process, until ``close``."""

    def __init__(
        self,
        model_path: str | Path,
        *,
        dtype: str = "float32",
        device: str = "cpu",
        tokenizer: Any = None,
        load_weights: bool = True,
        threads: int = 1,
        settings: VllmSettings | None = None,
    ) -> None:
        """Start vLLM on ``model_path``; awake, with the folder's weights unless ``load_weights`` is False.

        A process group that the trainer needs must be there already. Raises UsageError, before anything heavy loads,
        for a folder that is no model; and when vLLM is missing, untested or incomplete, when the process has an engine,
        and when the KV cache does not hold one sequence.
        """
        from rpcrl.engines.vllm_probe import require_vllm
        from rpcrl.engines.vllm_weights import HfWeights

        self._folder = model_folder(model_path)
        self._settings = settings or VllmSettings()
        self._device = device
        use_threads(threads)
        self._dtype = torch_dtype(dtype)
        began_s = time.perf_counter()
        with quiet(reports=False):
            self._names = HfWeights(self._folder, self._dtype)
        self._limit = self._settings.max_model_len or int(load_config(self._folder).max_position_embeddings)
        self._stop = stop_token_ids(self._folder, tokenizer)
        self._pad = pad_token_id(self._folder, tokenizer)
        env.put(engine_variables(device=device, eager=self._settings.enforce_eager))
        claim_process(str(self._folder))
        try:
            with trainer_keeps_its_process():
                self.vllm_version = require_vllm()
                """Name and version of the installed distribution."""
                self._llm: Any = open_engine(
                    self._folder, self._settings, dtype=dtype, device=device, limit=self._limit, load=load_weights
                )
        except BaseException:
            release_process()
            raise
        self.start_s = time.perf_counter() - began_s
        """How long the start took, with the import of vLLM."""
        self._awake = set(TAGS)
        self._trouble = "" if load_weights else "hold nothing since the start"
        self._version = 0
        self._running: dict[str, Running] = {}
        self._ended: list[SampleOutput] = []
        self._batches = 0
        self._try_out()

    def _try_out(self) -> None:
        """Run the model once: what vLLM has no kernel for on this device is an error now, not at the first batch."""
        trouble, self._trouble = self._trouble, ""
        try:
            self.score([0, 0])
        except RuntimeError as error:
            self.close()
            raise UsageError(
                f"vLLM started on {self._folder} and cannot run the model on this {self._device}: {error}; the engine "
                "rollout.name=torch runs every model of Transformers"
            ) from error
        self._trouble = trouble

    # ---------------------------------------------------------------- what it is

    @property
    def weight_version(self) -> int:
        """Version of the weights that would sample now."""
        return self._version

    @property
    def awake(self) -> frozenset[str]:
        """Which of ``weights`` and ``kv_cache`` are resident (on CPUs: in use)."""
        return frozenset(self._awake)

    @property
    def stop_ids(self) -> frozenset[int]:
        """Token ids that end a response."""
        return self._stop

    @property
    def frees_memory(self) -> bool:
        """Whether sleeping gives memory back: vLLM can on GPUs, and on CPUs it cannot."""
        return self._device == "cuda"

    def account(self) -> dict[str, object]:
        """Return what the engine is and takes: version, seconds of its start, bytes of weights and of the KV cache."""
        return {
            "engine": "vllm",
            "version": self.vllm_version,
            "start_s": round(self.start_s, 3),
            "weights_bytes": self._names.size_bytes,
            "kv_cache_bytes": kv_cache_bytes(self._llm),
            "sleep_frees_memory": self.frees_memory,
        }

    # ---------------------------------------------------------------- memory and weights

    def sleep(self, tags: Sequence[str] = TAGS) -> int:
        """Free what the tags name; returns the freed bytes.

        On CPUs vLLM frees nothing: 0 comes back, and the engine only refuses to sample.
        Raises UsageError while requests are in flight: abort them first.
        """
        wanted = [tag for tag in self._checked(tags) if tag in self._awake]
        if wanted and self._running:
            raise UsageError(f"sleep: {len(self._running)} requests are in flight; abort them first")
        freed = 0
        if wanted and self.frees_memory:
            freed = self._free(set(wanted))
        self._awake.difference_update(wanted)
        if "weights" in wanted:
            self._trouble = "hold nothing since they were woken up"
        return freed

    def _free(self, tags: set[str]) -> int:
        """Free memory of a GPU; returns the bytes."""
        before, _ = torch.cuda.mem_get_info()
        if tags == {"kv_cache"}:
            self._llm.model_executor.discard(("kv_cache",))
        else:
            # Level 2: the weights are forgotten, the buffers kept. It takes everything that is awake with it.
            self._llm.sleep(level=2)
            if "kv_cache" in self._awake - tags:
                self._llm.wake_up(["kv_cache"])
        freed = int(torch.cuda.mem_get_info()[0] - before)
        sizes = {"weights": self._names.size_bytes, "kv_cache": kv_cache_bytes(self._llm)}
        expected = sum(sizes[tag] for tag in tags)
        if freed < expected * 0.9:
            log.warning(
                "the rollout's sleep freed %d MiB, and %s have %d MiB: something else holds on to them",
                freed >> 20,
                " and ".join(sorted(tags)),
                expected >> 20,
            )
        return freed

    def wake_up(self, tags: Sequence[str] = TAGS) -> None:
        """Take the memory back; weights hold nothing until ``update_weights``.

        When the memory cannot be had, everything this call took is freed again and the error is raised.
        """
        wanted = [tag for tag in self._checked(tags) if tag not in self._awake]
        taken: list[str] = []
        try:
            for tag in sorted(wanted, reverse=True):  # weights first
                self._take(tag)
                taken.append(tag)
        except BaseException:
            if taken and self.frees_memory:
                self._free(set(taken))
            raise
        self._awake.update(wanted)

    def _take(self, tag: str) -> None:
        if not self.frees_memory:
            return
        try:
            self._llm.wake_up([tag])
        except BaseException:
            # vLLM has taken a part of it and still counts all of it as asleep: its own sleep would not free that part.
            self._llm.collective_rpc("discard", args=((tag,),))
            raise

    def update_weights(self, buckets: Iterable[NamedTensors], *, version: int) -> None:
        """Take new weights in place, forget every cached key and value, and carry ``version``.

        Requests in flight go on with the new weights. Raises UsageError when the weights are asleep, and for unknown,
        missing or misshapen names. If ``buckets`` is a list (or the mistake is in the first bucket) nothing was changed
        then; otherwise the engine refuses to sample until a complete update.
        """
        from rpcrl.engines.vllm_weights import load_in_place

        if "weights" not in self._awake:
            raise UsageError("update_weights: the rollout's weights are asleep; call wake_up(['weights']) first")
        before = self._trouble
        progress: list[int] = []

        def counted() -> Iterable[list[tuple[str, torch.Tensor]]]:
            for bucket in self._names.checked(buckets):
                progress.append(len(bucket))
                yield bucket

        self._trouble = "are mixed: an update broke off"
        try:
            self._llm.collective_rpc(load_in_place, args=(counted(),))
        except BaseException:
            if not progress:
                self._trouble = before
            raise
        self.reset_caches()
        self._trouble = ""
        self._version = version

    def check_weights(self, shapes: Mapping[str, Sequence[int]]) -> None:
        """Raise UsageError, with nothing changed, when these are not the weights that ``update_weights`` needs."""
        self._names.store.check(shapes)

    def reset_caches(self) -> None:
        """Forget every kept key and value; requests in flight compute theirs again."""
        if not self._llm.reset_prefix_cache(reset_running_requests=True):
            raise UsageError("vLLM did not reset its prefix cache: later requests could be served from old weights")

    @staticmethod
    def _checked(tags: Sequence[str]) -> list[str]:
        names = [tags] if isinstance(tags, str) else list(tags)
        unknown = [name for name in names if name not in TAGS]
        if unknown:
            raise UsageError(f"tags {unknown} are not among {list(TAGS)}")
        return names

    # ---------------------------------------------------------------- the canary

    @property
    def vocabulary(self) -> int:
        """Number of token ids that the model knows."""
        return self._names.vocabulary

    @property
    def longest(self) -> int:
        """Most tokens of prompt and response together."""
        return self._limit

    def score(self, token_ids: Sequence[int]) -> list[float]:
        """Return the log-prob of each token but the first, given those before it, at temperature 1."""
        self._require_ready("score")
        name = "score"
        self._submit(name, token_ids, scoring_params())
        found: Any = None
        while found is None:
            found = next((output for output in self._advance() if output.request_id == name), None)
        after_first = found.prompt_logprobs[1:]
        return [float(entry[token].logprob) for entry, token in zip(after_first, token_ids[1:], strict=True)]

    def distrust(self, why: str) -> None:
        """Refuse to sample until the next complete update."""
        self._trouble = why

    # ---------------------------------------------------------------- sampling

    def generate(self, prompts: DataProto) -> DataProto:
        """Sample one response per row; see ``RolloutEngine.generate`` for columns and meta_info.

        vLLM draws by a seed for each row: tokens do not depend on batching or rank, but are not those of the engine
        torch. Requests in flight advance meanwhile, and those that end come out of the next ``step``.
        Raises UsageError when asleep or without weights, BatchError for prompts that do not fit.
        """
        self._require_ready("generate")
        self._batches += 1
        requests = requests_of(prompts, prefix=f"generate {self._batches}, row ")
        names = {request.request_id: row for row, request in enumerate(requests)}
        self._add(requests, whole=True)
        outputs: list[SampleOutput | None] = [None] * len(requests)
        missing = len(requests)
        while missing:
            for output in self._step():
                row = names.get(output.request_id)
                if row is None:
                    self._ended.append(output)
                else:
                    outputs[row] = output
                    missing -= 1
        done = [output for output in outputs if output is not None]
        return answers(prompts, done, pad=self._pad, version=self._version)

    def add(self, requests: Sequence[SampleRequest]) -> None:
        """Take requests; they advance with the next ``step``. Raises UsageError, with none taken, for bad ones."""
        self._require_ready("add")
        self._add(requests, whole=False)

    def _add(self, requests: Sequence[SampleRequest], *, whole: bool) -> None:
        seen: set[str] = set()
        for request in requests:
            if request.request_id in self._running or request.request_id in seen:
                raise UsageError(f"request {request.request_id!r} is being sampled already")
            check_request(request, limit=self._limit, vocabulary=self.vocabulary, stop_ids=self._stop)
            seen.add(request.request_id)
        for request in requests:
            params = request_params(request, stop_ids=self._stop, whole=whole)
            self._submit(request.request_id, [*request.prompt_ids, *request.prior_ids], params)
            self._running[request.request_id] = Running.of(request)

    def _submit(self, name: str, token_ids: Sequence[int], params: Any) -> None:
        from vllm.inputs.engine import tokens_input

        self._llm.add_request(name, tokens_input(list(token_ids)), params)

    @property
    def num_unfinished(self) -> int:
        """Requests that were added and have neither ended nor been aborted."""
        return len(self._running)

    def step(self) -> list[SampleOutput]:
        """Advance every running request by about one token; returns those that have ended with it."""
        self._require_ready("step")
        earlier, self._ended = self._ended, []
        return earlier + (self._step() if self._running else [])

    def _step(self) -> list[SampleOutput]:
        ended = []
        for output in self._advance():
            running = self._running.get(output.request_id)
            if running is None:
                continue
            reason = running.take(output.outputs[0], self._version)
            if reason is not None:
                del self._running[output.request_id]
                ended.append(running.output(reason))
        return ended

    def _advance(self) -> list[Any]:
        with torch.inference_mode():
            outputs: list[Any] = self._llm.step()
        return outputs

    def abort(self, request_ids: Sequence[str] | None = None) -> list[SampleOutput]:
        """End requests (None: all) with reason "abort" and what they have so far; unknown ids are ignored."""
        wanted = list(self._running) if request_ids is None else [name for name in request_ids if name in self._running]
        if wanted:
            self._llm.abort_request(wanted)
        return [self._running.pop(name).output("abort") for name in wanted]

    def _require_ready(self, call: str) -> None:
        asleep = [tag for tag in TAGS if tag not in self._awake]
        if asleep:
            raise UsageError(f"{call}: {' and '.join(asleep)} of the rollout asleep; call wake_up first")
        if self._trouble:
            raise UsageError(f"{call}: the rollout's weights {self._trouble}; call update_weights first")

    def close(self) -> None:
        """End the engine and let the process have another one.

        Not for a worker: vLLM destroys every process group of torch.distributed in this process. Closing twice does
        nothing.
        """
        llm, self._llm = self._llm, None
        if llm is None:
            return
        import gc

        from vllm.distributed import cleanup_dist_env_and_memory

        self._running.clear()
        self._ended.clear()
        llm.model_executor.shutdown()
        del llm
        gc.collect()
        cleanup_dist_env_and_memory()
        release_process()
