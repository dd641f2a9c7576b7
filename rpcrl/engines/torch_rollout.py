"""How does the embedded rollout engine sample: a key-value-cache loop over the Transformers module?

Whole batches are sampled here: equal prompts are computed once, and a finished row leaves at once. Single requests are
sampled by ``torch_requests``. The module is the engine's own copy: weights arrive by ``update_weights`` under Hugging
Face names.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from rpcrl.engines.base import NamedTensors
from rpcrl.engines.batches import columns, positions
from rpcrl.engines.hf_model import (
    build_model,
    load_config,
    load_model,
    model_folder,
    pad_token_id,
    stop_token_ids,
    torch_dtype,
    use_threads,
)
from rpcrl.engines.parameters import ParameterStore
from rpcrl.engines.sampling import SamplingSettings, draw, noise_keys, uniforms
from rpcrl.errors import BatchError, UsageError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from rpcrl.batch.data_proto import DataProto
    from rpcrl.engines.requests import SampleOutput, SampleRequest

__all__ = ["TorchRolloutEngine"]

TAGS = ("weights", "kv_cache")


@dataclass(frozen=True)
class _Request:
    """What one ``generate`` call asks for, apart from the prompts."""

    sampling: SamplingSettings
    response_length: int
    keys: NDArray[np.uint64]


class TorchRolloutEngine:
    """A rollout engine (``rpcrl.engines.base.RolloutEngine``) over a Transformers causal LM."""

    def __init__(
        self,
        model_path: str | Path,
        *,
        dtype: str = "float32",
        device: str = "cpu",
        tokenizer: Any = None,
        load_weights: bool = True,
        max_rows: int = 1024,
        threads: int = 1,
    ) -> None:
        """Build the module of ``model_path``; awake, with the folder's weights unless ``load_weights`` is False.

        ``max_rows`` sequences are sampled at once; more are done one part after the other. ``tokenizer`` adds its
        end-of-text id to the stop ids. Raises UsageError for a folder that is no model, before anything heavy loads.
        """
        folder = model_folder(model_path)
        if max_rows < 1:
            raise UsageError(f"TorchRolloutEngine(max_rows={max_rows}) must be 1 or more")
        use_threads(threads)
        self._device = torch.device(device)
        wanted = torch_dtype(dtype)
        module = load_model(folder, dtype=wanted) if load_weights else build_model(load_config(folder), dtype=wanted)
        self._module = module.to(self._device).requires_grad_(False)
        self._store = ParameterStore(self._module)
        self._stop = stop_token_ids(folder, tokenizer)
        self._stop_tensor = torch.tensor(sorted(self._stop), dtype=torch.int64, device=self._device)
        self._pad = pad_token_id(folder, tokenizer)
        self._max_rows = max_rows
        from rpcrl.engines.kv_cache import KvPool

        self._pool = KvPool(self._module.config)
        from rpcrl.engines.torch_requests import RequestBatch

        self._requests = RequestBatch(
            self._forward, self._module.config, stop=self._stop, device=self._device, max_rows=max_rows
        )
        self._awake = set(TAGS)
        self._usable = load_weights
        self._version = 0

    @property
    def weight_version(self) -> int:
        """Version of the weights that would sample now."""
        return self._version

    @property
    def awake(self) -> frozenset[str]:
        """Which of ``weights`` and ``kv_cache`` are resident."""
        return frozenset(self._awake)

    @property
    def stop_ids(self) -> frozenset[int]:
        """Token ids that end a response."""
        return self._stop

    def account(self) -> dict[str, object]:
        """Return what the engine is, and the bytes of its weights."""
        return {"engine": "torch", "weights_bytes": self._store.size_bytes, "sleep_frees_memory": True}

    # ---------------------------------------------------------------- memory and weights

    def sleep(self, tags: Sequence[str] = TAGS) -> int:
        """Free what the tags name; returns the freed bytes (0 for what is asleep already)."""
        freed = 0
        for tag in self._checked(tags):
            if tag == "weights" and tag in self._awake:
                freed += self._store.free()
                self._usable = False
            elif tag in self._awake:
                freed += self._free_caches()
            self._awake.discard(tag)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        return freed

    def wake_up(self, tags: Sequence[str] = TAGS) -> None:
        """Take the memory back; weights hold nothing until ``update_weights``.

        When the memory cannot be had, everything this call took is freed again and the error is raised: the engine
        is as asleep as before. Cache memory is taken by the first batch that needs it.
        """
        wanted = [tag for tag in self._checked(tags) if tag not in self._awake]
        if "weights" in wanted:
            self._store.allocate()
        self._awake.update(wanted)

    def update_weights(self, buckets: Iterable[NamedTensors], *, version: int) -> None:
        """Take new weights in place, forget every cached key and value, and carry ``version``.

        Raises UsageError when the weights are asleep, and for unknown, missing or misshapen names. If ``buckets`` is
        a list (or the mistake is in the first bucket) nothing was changed then; otherwise, as the message says, the
        engine refuses to sample until a complete update.
        """
        if "weights" not in self._awake:
            raise UsageError("update_weights: the rollout's weights are asleep; call wake_up(['weights']) first")
        was_usable, self._usable = self._usable, False
        try:
            self._store.update(buckets)
        except BaseException:
            self._usable = was_usable and not self._store.torn
            raise
        self._free_caches()
        self._usable = True
        self._version = version

    def weight_place(self, name: str) -> Tensor | None:
        """Return the parameter of that name, for a running ``update_weights`` to be written to piece by piece."""
        return self._store.place(name)

    def check_weights(self, shapes: Mapping[str, Sequence[int]]) -> None:
        """Raise UsageError, with nothing changed, when these are not the weights that ``update_weights`` needs."""
        self._store.check(shapes)

    def reset_caches(self) -> None:
        """Forget every cached key and value; requests in flight compute theirs again."""
        self._free_caches()

    def _free_caches(self) -> int:
        return self._pool.free() + self._requests.drop_cache()

    @staticmethod
    def _checked(tags: Sequence[str]) -> list[str]:
        names = [tags] if isinstance(tags, str) else list(tags)
        unknown = [name for name in names if name not in TAGS]
        if unknown:
            raise UsageError(f"tags {unknown} are not among {list(TAGS)}")
        return names

    # ---------------------------------------------------------------- single requests

    @property
    def num_unfinished(self) -> int:
        """Requests that were added and have neither ended nor been aborted."""
        return len(self._requests)

    def add(self, requests: Sequence[SampleRequest]) -> None:
        """Take requests; raises UsageError, with none taken, when one of them cannot be sampled."""
        self._requests.add(requests)

    def step(self) -> list[SampleOutput]:
        """Sample one token of each of at most ``max_rows`` requests; returns those that have ended.

        Raises UsageError, with the requests as they were, when asleep or without weights.
        """
        self._require_ready("step")
        return self._requests.step(self._version)

    def abort(self, request_ids: Sequence[str] | None = None) -> list[SampleOutput]:
        """End requests (None: all) and return what they have so far; unknown ids are ignored."""
        return self._requests.abort(request_ids)

    # ---------------------------------------------------------------- whole batches

    def generate(self, prompts: DataProto) -> DataProto:
        """Sample one response per row; see ``RolloutEngine.generate`` for columns and meta_info.

        ``do_sample``, ``temperature``, ``top_p``, ``top_k``, ``seed`` and ``global_steps`` default to True, 1, 1, -1,
        0 and 0. With ``do_sample`` False the log-probs are those of the plain softmax. Raises UsageError when asleep
        or without weights, BatchError for prompts that do not fit.
        """
        self._require_ready("generate")
        input_ids, attention_mask = columns(prompts, ("input_ids", "attention_mask"), of="generate")
        request = self._request(prompts, input_ids.shape[0])
        self._check_prompts(attention_mask, request.response_length)
        ids = input_ids.to(self._device)
        mask = attention_mask.to(self._device, torch.int64)
        rows, response_length = ids.shape[0], request.response_length
        responses = torch.full((rows, response_length), self._pad, dtype=ids.dtype, device=self._device)
        log_probs = torch.zeros((rows, response_length), dtype=torch.float32, device=self._device)
        lengths = torch.full((rows,), response_length, dtype=torch.int64, device=self._device)
        stopped = torch.zeros(rows, dtype=torch.bool, device=self._device)
        with torch.inference_mode():
            for start in range(0, rows, self._max_rows):
                part = slice(start, start + self._max_rows)
                outputs = (responses[part], log_probs[part], lengths[part], stopped[part])
                self._sample_rows(ids[part], mask[part], request, request.keys[part], outputs)
        return self._assemble(prompts, ids, mask, responses, log_probs, lengths, stopped)

    def _require_ready(self, doing: str) -> None:
        asleep = [tag for tag in TAGS if tag not in self._awake]
        if asleep:
            raise UsageError(f"{doing}: {' and '.join(asleep)} of the rollout asleep; call wake_up first")
        if not self._usable:
            raise UsageError(
                f"{doing}: the rollout's weights hold nothing since they were woken up (or an update broke off); "
                "call update_weights first"
            )

    def _request(self, prompts: DataProto, rows: int) -> _Request:
        meta: Mapping[str, Any] = prompts.meta_info
        if "response_length" not in meta:
            raise BatchError("generate needs meta_info['response_length'], the largest number of new tokens")
        response_length = int(meta["response_length"])
        if response_length < 1:
            raise BatchError(f"meta_info['response_length']={response_length} must be 1 or more")
        sampling = SamplingSettings(
            do_sample=bool(meta.get("do_sample", True)),
            temperature=float(meta.get("temperature", 1.0)),
            top_k=int(meta.get("top_k", -1)),
            top_p=float(meta.get("top_p", 1.0)),
        )
        keys = np.zeros(rows, dtype=np.uint64)
        if sampling.do_sample:
            missing = [name for name in ("uid", "sample_index") if name not in prompts.non_tensor_batch]
            if missing:
                raise BatchError(f"sampling needs the non-tensor columns {', '.join(missing)}: they key its noise")
            keys = noise_keys(
                int(meta.get("seed", 0)),
                int(meta.get("global_steps", 0)),
                prompts.non_tensor_batch["uid"],
                [int(index) for index in prompts.non_tensor_batch["sample_index"]],
            )
        return _Request(sampling, response_length, keys)

    def _check_prompts(self, attention_mask: Tensor, response_length: int) -> None:
        mask = attention_mask.bool()
        if mask.shape[1] == 0 or not bool(mask[:, -1].all()) or bool((mask[:, :-1] & ~mask[:, 1:]).any()):
            raise BatchError("generate needs left-padded prompts of at least one token, without holes in the mask")
        limit = getattr(self._module.config, "max_position_embeddings", None)
        longest = int(mask.sum(-1).max()) + response_length if mask.shape[0] else 0
        if limit is not None and longest > limit:
            raise BatchError(
                f"prompt and response reach {longest} tokens (longest prompt {longest - response_length} + "
                f"response_length {response_length}), but the model has max_position_embeddings={limit}; "
                "lower data.max_prompt_length or data.max_response_length"
            )

    def _sample_rows(
        self,
        ids: Tensor,
        mask: Tensor,
        request: _Request,
        keys: NDArray[np.uint64],
        outputs: tuple[Tensor, Tensor, Tensor, Tensor],
    ) -> None:
        """Fill ``outputs`` (responses, log-probs, lengths, stopped) for one part of the rows."""
        responses, log_probs, lengths, stopped = outputs
        first = int(mask.argmax(-1).min())
        ids, mask = ids[:, first:], mask[:, first:]
        logits, cache = self._prefill(ids, mask, request.response_length)
        rows = torch.arange(ids.shape[0], device=self._device)
        next_position = mask.sum(-1, keepdim=True)
        attention = torch.nn.functional.pad(mask, (0, request.response_length), value=1)
        for position in range(request.response_length):
            noise = None
            if request.sampling.do_sample:
                noise = torch.from_numpy(uniforms(keys, position)).to(self._device)
            tokens, chosen = draw(logits, request.sampling, noise)
            responses[rows, position] = tokens
            log_probs[rows, position] = chosen
            done = torch.isin(tokens, self._stop_tensor)
            if bool(done.any()):
                finished = rows[done]
                lengths[finished] = position + 1
                stopped[finished] = True
                alive = (~done).nonzero().flatten()
                if alive.numel() == 0:
                    return
                rows, tokens, next_position = rows[alive], tokens[alive], next_position[alive]
                attention, keys = attention[alive], keys[alive.cpu().numpy()]
                if position + 1 < request.response_length:
                    cache.batch_select_indices(alive)
            if position + 1 == request.response_length:
                return
            seen = ids.shape[1] + position + 1
            logits = self._forward(tokens.unsqueeze(1), attention[:, :seen], next_position, cache)
            next_position = next_position + 1

    def _prefill(self, ids: Tensor, mask: Tensor, response_length: int) -> tuple[Tensor, Any]:
        """Return the logits after each prompt ``[n, V]`` and the cache; equal prompts are computed once."""
        cache = self._pool.begin(ids.shape[1] + response_length)
        tokens = np.ascontiguousarray(torch.where(mask.bool(), ids, -1).cpu().numpy())
        whole_rows = tokens.view(np.dtype((np.void, tokens.dtype.itemsize * tokens.shape[1]))).ravel()
        _, chosen, inverse = np.unique(whole_rows, return_index=True, return_inverse=True)
        if chosen.shape[0] == ids.shape[0]:
            return self._forward(ids, mask, positions(mask), cache), cache
        some = torch.from_numpy(chosen).to(self._device)
        again = torch.from_numpy(inverse.reshape(-1)).to(self._device)
        logits = self._forward(ids[some], mask[some], positions(mask[some]), cache)
        cache.batch_select_indices(again)
        return logits[again], cache

    def _forward(self, ids: Tensor, mask: Tensor, position_ids: Tensor, cache: Any) -> Tensor:
        """Return float32 logits ``[n, V]`` of the last column."""
        output = self._module(
            input_ids=ids,
            attention_mask=mask,
            position_ids=position_ids,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        logits: Tensor = output.logits[:, -1].float()
        return logits

    def _assemble(
        self,
        prompts: DataProto,
        ids: Tensor,
        mask: Tensor,
        responses: Tensor,
        log_probs: Tensor,
        lengths: Tensor,
        stopped: Tensor,
    ) -> DataProto:
        from rpcrl.batch.data_proto import DataProto

        steps = torch.arange(responses.shape[1], device=self._device)
        response_mask = (steps < lengths.unsqueeze(1)).to(torch.int64)
        after_prompt = mask.sum(-1, keepdim=True) + steps
        tensors = {
            "prompts": ids,
            "responses": responses,
            "response_mask": response_mask,
            "input_ids": torch.cat([ids, responses], dim=-1),
            "attention_mask": torch.cat([mask, response_mask], dim=-1),
            "position_ids": torch.cat([positions(mask), after_prompt], dim=-1),
            "rollout_log_probs": log_probs,
        }
        reasons = np.where(stopped.cpu().numpy(), "stop", "length").astype(object)
        return DataProto.from_dict(
            tensors={name: value.cpu() for name, value in tensors.items()},
            non_tensors={**prompts.non_tensor_batch, "finish_reason": reasons},
            meta_info={**prompts.meta_info, "weight_version": self._version},
        )
