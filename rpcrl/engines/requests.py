"""What is one response asked for, and what has become of it?

The unit of everything that is not a whole batch: asynchronous training, agent loops, partial rollouts. A request may be
aborted and asked for again: it then carries the tokens that it has, with the log-prob and the weight version of each,
and goes on behind them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from rpcrl.engines.sampling_settings import SamplingSettings

__all__ = ["FinishReason", "SampleOutput", "SampleRequest"]

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True)
class SampleRequest:
    """One response to one prompt. ``(seed, step, uid, sample_index)`` keys its noise."""

    request_id: str
    """Unique among the unfinished requests of an engine."""
    prompt_ids: Sequence[int]
    max_new_tokens: int
    """Longest response, tokens, those of ``prior_ids`` counted."""
    sampling: SamplingSettings = field(default_factory=SamplingSettings)
    stop_ids: Sequence[int] = ()
    """Token ids that end the response, beside those of the model."""
    seed: int = 0
    step: int = 0
    uid: str = ""
    sample_index: int = 0
    prior_ids: Sequence[int] = ()
    """The response so far, from before an abort."""
    prior_log_probs: Sequence[float] = ()
    prior_versions: Sequence[int] = ()

    def resumed(self, output: SampleOutput) -> SampleRequest:
        """Return the request that goes on where an aborted one has ended."""
        return replace(
            self,
            prior_ids=output.token_ids,
            prior_log_probs=output.log_probs,
            prior_versions=output.versions,
        )


@dataclass(frozen=True)
class SampleOutput:
    """The whole response, from its first token, also when it was sampled in several goes.

    ``token_ids``, ``log_probs`` (of the distribution that was sampled from) and ``versions`` (of the weights that
    sampled the token) have one entry a token; the stop token is among them.
    """

    request_id: str
    token_ids: Sequence[int]
    log_probs: Sequence[float]
    versions: Sequence[int]
    finish_reason: FinishReason
