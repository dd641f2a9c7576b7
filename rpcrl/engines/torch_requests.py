"""How does the embedded engine sample requests that come and go one by one?

All running requests are the rows of one batch with one key-value cache. A row that has ended leaves it; one that has
come is computed from its prompt (and from what it had before an abort) and joins it, padded on the left to the width of
the others. Keys and values are of the weights that computed them: once those have changed the cache is dropped, and
every row is computed again from its tokens, so that no log-prob mixes two versions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from rpcrl.engines.kv_cache import has_plain_attention
from rpcrl.engines.requests import FinishReason, SampleOutput, SampleRequest
from rpcrl.engines.sampling import SamplingSettings, draw, noise_keys, uniforms
from rpcrl.errors import UsageError

__all__ = ["RequestBatch"]

Forward = Callable[[Tensor, Tensor, Tensor, Any], Tensor]
"""(ids [n, t], mask [n, width], positions [n, t], cache) → float32 logits [n, V] of the last column."""


@dataclass(eq=False)
class _Row:
    """One request on its way."""

    request: SampleRequest
    key: np.uint64
    stop: frozenset[int]
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    def output(self, reason: FinishReason) -> SampleOutput:
        return SampleOutput(self.request.request_id, self.tokens, self.log_probs, self.versions, reason)


@dataclass
class _Cached:
    """Keys and values of some rows: ``mask`` [n, width] says which columns are a row's, ``lengths`` [n] how many."""

    cache: DynamicCache
    mask: Tensor
    lengths: Tensor

    @property
    def num_bytes(self) -> int:
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in self.cache.layers if layer.is_initialized)

    def select(self, rows: list[int]) -> None:
        """Keep only some rows."""
        indices = torch.tensor(rows, dtype=torch.int64, device=self.mask.device)
        self.cache.batch_select_indices(indices)
        self.mask, self.lengths = self.mask[indices], self.lengths[indices]

    def join(self, other: _Cached) -> None:
        """Take the rows of ``other`` behind these; columns that are nobody's are cut off at the left."""
        width = max(int(self.lengths.max()), int(other.lengths.max()))
        self.mask = torch.cat([_to_width(part.mask, width, dim=1) for part in (self, other)])
        self.lengths = torch.cat([self.lengths, other.lengths])
        for mine, theirs in zip(self.cache.layers, other.cache.layers, strict=True):
            mine.keys = torch.cat([_to_width(states, width, dim=2) for states in (mine.keys, theirs.keys)])
            mine.values = torch.cat([_to_width(states, width, dim=2) for states in (mine.values, theirs.values)])


def _to_width(tensor: Tensor, width: int, *, dim: int) -> Tensor:
    """Cut off or add zeros at the left of ``dim``."""
    have = tensor.shape[dim]
    if have >= width:
        return tensor.narrow(dim, have - width, width)
    missing = [*tensor.shape]
    missing[dim] = width - have
    return torch.cat([tensor.new_zeros(missing), tensor], dim)


class RequestBatch:
    """The requests of one engine, waiting (in order of arrival) and running; at most ``max_rows`` run at once."""

    def __init__(self, forward: Forward, config: Any, *, stop: frozenset[int], device: torch.device, max_rows: int):
        self._forward = forward
        self._config = config
        self._joins = has_plain_attention(config)
        self._stop = stop
        self._device = device
        self._max_rows = max_rows
        self._waiting: list[_Row] = []
        self._running: list[_Row] = []
        self._cached: _Cached | None = None

    def __len__(self) -> int:
        return len(self._waiting) + len(self._running)

    def add(self, requests: Sequence[SampleRequest]) -> None:
        """Take requests; raises UsageError, with none taken, when one of them cannot be sampled."""
        known = {row.request.request_id for row in (*self._waiting, *self._running)}
        for request in requests:
            if request.request_id in known:
                raise UsageError(
                    f"request {request.request_id!r} is being sampled already; each needs an id of its own"
                )
            known.add(request.request_id)
            self._check(request)
        self._waiting += [self._row(request) for request in requests]

    def abort(self, request_ids: Sequence[str] | None) -> list[SampleOutput]:
        """End the named requests, or all; returns what each has."""
        rows = [*self._running, *self._waiting]
        named = None if request_ids is None else set(request_ids)
        ended = [row for row in rows if named is None or row.request.request_id in named]
        self._waiting = [row for row in self._waiting if row not in ended]
        self._keep([index for index, row in enumerate(self._running) if row not in ended])
        return [row.output("abort") for row in ended]

    def drop_cache(self) -> int:
        """Forget all keys and values; the requests go on by computing them again. Returns the freed bytes."""
        freed = 0 if self._cached is None else self._cached.num_bytes
        self._cached = None
        # those that ran go first again
        self._waiting, self._running = [*self._running, *self._waiting], []
        return freed

    @torch.inference_mode()
    def step(self, version: int) -> list[SampleOutput]:
        """Sample one token of each running request by weights of ``version``; returns those that have ended."""
        if self._waiting and self._running and not self._joins:
            self.drop_cache()
        ended: list[SampleOutput] = []
        if self._running and self._cached is not None:
            logits = self._decode(self._running, self._cached)
            alive, done = self._draw(self._running, logits, version)
            ended += done
            self._keep(alive)
        room = self._max_rows - len(self._running)
        arrived, self._waiting = self._waiting[:room], self._waiting[room:]
        if arrived:
            logits, cached = self._prefill(arrived)
            alive, done = self._draw(arrived, logits, version)
            ended += done
            if len(alive) < len(arrived):
                cached.select(alive)
            self._join([arrived[index] for index in alive], cached)
        return ended

    # ------------------------------------------------------------------------------------------------- rows

    def _check(self, request: SampleRequest) -> None:
        name = f"request {request.request_id!r}"
        if not request.prompt_ids:
            raise UsageError(f"{name} has no prompt token; it needs one or more")
        prior = len(request.prior_ids)
        if not len(request.prior_log_probs) == len(request.prior_versions) == prior:
            raise UsageError(
                f"{name} brings {prior} tokens with {len(request.prior_log_probs)} log-probs and "
                f"{len(request.prior_versions)} versions; each token needs one of both"
            )
        if request.max_new_tokens <= prior:
            raise UsageError(
                f"{name} has max_new_tokens={request.max_new_tokens}, of which {prior} are there already; nothing is "
                "left to sample"
            )
        if prior and request.prior_ids[-1] in self._stop | set(request.stop_ids):
            raise UsageError(f"{name} goes on behind the stop token {request.prior_ids[-1]}; it has ended")
        limit = getattr(self._config, "max_position_embeddings", None)
        longest = len(request.prompt_ids) + request.max_new_tokens
        if limit is not None and longest > limit:
            raise UsageError(
                f"{name} may reach {longest} tokens (prompt {len(request.prompt_ids)} + max_new_tokens "
                f"{request.max_new_tokens}), but the model has max_position_embeddings={limit}; lower "
                "data.max_prompt_length or data.max_response_length"
            )

    def _row(self, request: SampleRequest) -> _Row:
        return _Row(
            request,
            noise_keys(request.seed, request.step, [request.uid], [request.sample_index])[0],
            self._stop | set(request.stop_ids),
            list(request.prior_ids),
            list(request.prior_log_probs),
            list(request.prior_versions),
        )

    def _keep(self, alive: list[int]) -> None:
        """Keep only some of the running rows."""
        if len(alive) == len(self._running):
            return
        self._running = [self._running[index] for index in alive]
        if not alive:
            self._cached = None
        elif self._cached is not None:
            self._cached.select(alive)

    def _join(self, rows: list[_Row], cached: _Cached) -> None:
        if not rows:
            return
        if self._cached is None:
            self._cached = cached
        else:
            self._cached.join(cached)
        self._running += rows

    # ----------------------------------------------------------------------------------------------- tensors

    def _prefill(self, rows: list[_Row]) -> tuple[Tensor, _Cached]:
        """Return the logits after each row's tokens, and their cache; equal rows are computed once."""
        sequences = [(*row.request.prompt_ids, *row.tokens) for row in rows]
        place: dict[tuple[int, ...], int] = {}
        again = [place.setdefault(sequence, len(place)) for sequence in sequences]
        width = max(map(len, place))
        ids = torch.zeros((len(place), width), dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for sequence, index in place.items():
            ids[index, width - len(sequence) :] = torch.tensor(sequence)
            mask[index, width - len(sequence) :] = 1
        ids, mask = ids.to(self._device), mask.to(self._device)
        cached = _Cached(DynamicCache(config=self._config), mask, mask.sum(-1))
        logits = self._forward(ids, mask, (mask.cumsum(-1) - 1).clamp(min=0), cached.cache)
        if len(place) < len(rows):
            cached.select(again)
            logits = logits[torch.tensor(again, device=self._device)]
        return logits, cached

    def _decode(self, rows: list[_Row], cached: _Cached) -> Tensor:
        """Return the logits behind each row's last token, which joins the cache."""
        ids = torch.tensor([[row.tokens[-1]] for row in rows], dtype=torch.int64, device=self._device)
        cached.mask = torch.cat([cached.mask, torch.ones_like(ids)], 1)
        logits = self._forward(ids, cached.mask, cached.lengths.unsqueeze(1), cached.cache)
        cached.lengths = cached.lengths + 1
        return logits

    def _draw(self, rows: list[_Row], logits: Tensor, version: int) -> tuple[list[int], list[SampleOutput]]:
        """Give each row its next token; returns (indices of those that go on, outputs of those that have ended)."""
        by_settings: dict[SamplingSettings, list[int]] = {}
        for index, row in enumerate(rows):
            by_settings.setdefault(row.request.sampling, []).append(index)
        for settings, members in by_settings.items():
            noise = None
            if settings.do_sample:
                keys = np.array([rows[index].key for index in members], dtype=np.uint64)
                positions = np.array([len(rows[index].tokens) for index in members], dtype=np.uint64)
                noise = torch.from_numpy(uniforms(keys, positions)).to(self._device)
            some = logits if len(members) == len(rows) else logits[torch.tensor(members, device=self._device)]
            tokens, log_probs = draw(some, settings, noise)
            for index, token, log_prob in zip(members, tokens.tolist(), log_probs.tolist(), strict=True):
                rows[index].tokens.append(token)
                rows[index].log_probs.append(log_prob)
                rows[index].versions.append(version)
        alive, ended = [], []
        for index, row in enumerate(rows):
            if row.tokens[-1] in row.stop:
                ended.append(row.output("stop"))
            elif len(row.tokens) >= row.request.max_new_tokens:
                ended.append(row.output("length"))
            else:
                alive.append(index)
        return alive, ended
