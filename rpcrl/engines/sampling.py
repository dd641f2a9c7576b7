"""How is a token drawn so that it depends on nothing but its logits and its place?

Every token uses one number of [0, 1): a hash of (seed, step, prompt uid, sample index, position). Which rank, batch
or order a row is sampled in does not enter, so one worker and eight draw the same tokens. (The logits themselves
may differ in their last bits between batch shapes; a draw changes only if its number falls into that gap.)
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from rpcrl.engines.sampling_settings import SamplingSettings

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["SamplingSettings", "draw", "filter_logits", "noise_keys", "uid_hash", "uniforms"]

# Steele, Lea and Flood 2014, "Fast Splittable Pseudorandom Number Generators": the step of the Weyl sequence and
# the finalizer (variant 13 of Stafford) that turns a counter into 64 well-mixed bits.
WEYL = np.uint64(0x9E3779B97F4A7C15)
MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
MIX_2 = np.uint64(0x94D049BB133111EB)
MASK_64 = (1 << 64) - 1


def uid_hash(uid: str) -> int:
    """Return 64 bits of a prompt's name, the same in every process and on every machine."""
    return int.from_bytes(hashlib.blake2b(uid.encode(), digest_size=8).digest(), "little")


def _mix(state: NDArray[np.uint64]) -> NDArray[np.uint64]:
    state = (state ^ (state >> np.uint64(30))) * MIX_1
    state = (state ^ (state >> np.uint64(27))) * MIX_2
    return state ^ (state >> np.uint64(31))


def noise_keys(
    seed: int,
    global_step: int,
    uids: Sequence[object] | NDArray[np.object_],
    sample_indices: Sequence[int] | NDArray[np.int64],
) -> NDArray[np.uint64]:
    """Return one 64-bit key per row from (seed, step, uid, sample index)."""
    hashes: dict[str, int] = {}
    names = [str(uid) for uid in uids]
    for name in names:
        if name not in hashes:
            hashes[name] = uid_hash(name)
    parts: tuple[NDArray[np.uint64], ...] = (
        np.array([seed & MASK_64], dtype=np.uint64),
        np.array([global_step & MASK_64], dtype=np.uint64),
        np.fromiter((hashes[name] for name in names), dtype=np.uint64, count=len(names)),
        np.asarray(sample_indices, dtype=np.int64).astype(np.uint64),
    )
    key = np.zeros(len(names), dtype=np.uint64)
    for part in parts:
        key = _mix((key ^ part) + WEYL)
    return key


def uniforms(keys: NDArray[np.uint64], position: int | NDArray[np.uint64]) -> NDArray[np.float64]:
    """Return one number of [0, 1) per row for response position ``position`` (one of all, or each row's); 52 bits."""
    offset = (np.atleast_1d(np.asarray(position, dtype=np.uint64)) + np.uint64(1)) * WEYL
    bits: NDArray[np.float64] = (_mix(keys + offset) >> np.uint64(12)).astype(np.float64)
    return bits * 2.0**-52


def filter_logits(logits: Tensor, settings: SamplingSettings) -> Tensor:
    """Return the logits ``[B, V]`` of the distribution to sample from: temperature, then top-k, then top-p."""
    if settings.temperature != 1.0:
        logits = logits / settings.temperature
    vocabulary = logits.shape[-1]
    top_k = settings.top_k if 0 < settings.top_k < vocabulary else 0
    if not top_k and settings.top_p >= 1.0:
        return logits
    ordered, indices = logits.sort(dim=-1, descending=True, stable=True)
    dropped = torch.zeros_like(ordered, dtype=torch.bool)
    if top_k:
        dropped[:, top_k:] = True
    if settings.top_p < 1.0:
        probabilities = torch.softmax(ordered.masked_fill(dropped, float("-inf")).double(), dim=-1)
        before = probabilities.cumsum(-1) - probabilities
        # A token stays while those before it have not reached top_p: the first always does.
        dropped |= before >= settings.top_p
        dropped[:, 0] = False
    return logits.masked_fill(torch.zeros_like(dropped).scatter(-1, indices, dropped), float("-inf"))


def draw(logits: Tensor, settings: SamplingSettings, noise: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return tokens ``[B]`` and their log-probs ``[B]`` (float32) from float32 ``logits`` ``[B, V]``.

    ``noise`` holds one float64 number of [0, 1) per row: the token is where the cumulative probability first exceeds
    it. Log-probs are of the distribution that was sampled from; greedy decoding ignores ``noise`` and the filters
    and reports those of the plain softmax.
    """
    if not settings.do_sample or noise is None:
        log_probs = torch.log_softmax(logits, dim=-1)
        tokens = log_probs.argmax(-1)
    else:
        log_probs = torch.log_softmax(filter_logits(logits, settings), dim=-1)
        cumulative = log_probs.double().exp_().cumsum_(-1)
        # The product with the total stays below it (52-bit numbers), so a token of probability 0 is never drawn.
        threshold = noise.unsqueeze(-1) * cumulative[:, -1:]
        tokens = torch.searchsorted(cumulative, threshold, right=True).squeeze(-1)
    return tokens, log_probs.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
