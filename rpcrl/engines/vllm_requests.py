"""What is asked of vLLM for one response, and how is its answer put together token by token?"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from rpcrl.engines.requests import FinishReason, SampleOutput, SampleRequest
from rpcrl.engines.sampling import noise_keys, uid_hash
from rpcrl.errors import UsageError

__all__ = ["Running", "check_request", "request_params", "scoring_params"]

SEED_BITS = 63
"""torch's generators take seeds up to here without a sign."""


def check_request(request: SampleRequest, *, limit: int, vocabulary: int, stop_ids: Iterable[int]) -> None:
    """Raise UsageError when an engine with ``limit`` tokens a sequence cannot take the request."""
    name, prior = request.request_id, len(request.prior_ids)
    if not request.prompt_ids:
        raise UsageError(f"request {name!r} has an empty prompt")
    if request.max_new_tokens < 1:
        raise UsageError(f"request {name!r}: max_new_tokens={request.max_new_tokens} must be 1 or more")
    if prior >= request.max_new_tokens:
        raise UsageError(
            f"request {name!r} has {prior} of its max_new_tokens={request.max_new_tokens} already: nothing is left to "
            "sample"
        )
    if not prior == len(request.prior_log_probs) == len(request.prior_versions):
        raise UsageError(
            f"request {name!r} has {prior} tokens from before an abort, with {len(request.prior_log_probs)} log-probs "
            f"and {len(request.prior_versions)} versions; each token needs both"
        )
    if prior and request.prior_ids[-1] in {*stop_ids, *request.stop_ids}:
        raise UsageError(f"request {name!r} goes on behind {request.prior_ids[-1]}, which is a stop token")
    longest = len(request.prompt_ids) + request.max_new_tokens
    if longest > limit:
        raise UsageError(
            f"prompt and response reach {longest} tokens (prompt {len(request.prompt_ids)} + response "
            f"{request.max_new_tokens}), but the engine was started for sequences of {limit}; lower "
            "data.max_prompt_length or data.max_response_length, or raise rollout.max_model_len (at most the model's "
            "max_position_embeddings)"
        )
    outside = [token for token in (*request.prompt_ids, *request.prior_ids) if not 0 <= token < vocabulary]
    if outside:
        raise UsageError(f"request {name!r}: token ids {outside[:8]} are outside of the model's {vocabulary}")


def row_seed(request: SampleRequest) -> int:
    """Return the seed of a row's noise, from its key and from how much of the response is there already."""
    (key,) = noise_keys(request.seed, request.step, [request.uid], [request.sample_index]).tolist()
    if request.prior_ids:
        # A generator cannot be wound forward: what is sampled after an abort has a stream of its own.
        key = uid_hash(f"{key}+{len(request.prior_ids)}")
    return int(key) >> (64 - SEED_BITS)


def request_params(request: SampleRequest, *, stop_ids: Iterable[int], whole: bool) -> Any:
    """Return vLLM's parameters; ``whole`` lets it answer once, at the end, instead of with every token."""
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    sampling = request.sampling
    sampled: dict[str, Any] = {"temperature": 0.0}
    if sampling.do_sample:
        sampled = {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k if sampling.top_k > 0 else 0,
            "seed": row_seed(request),
        }
    return SamplingParams(
        **sampled,
        max_tokens=request.max_new_tokens - len(request.prior_ids),
        logprobs=0,
        flat_logprobs=True,
        # Only our stop ids count, not those that vLLM finds in the model's folder.
        stop_token_ids=sorted({*stop_ids, *request.stop_ids}),
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY if whole else RequestOutputKind.DELTA,
    )


def scoring_params() -> Any:
    """Return vLLM's parameters for the log-probs of a prompt; one token is sampled, as vLLM needs it."""
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    return SamplingParams(
        temperature=0.0,
        max_tokens=1,
        prompt_logprobs=0,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


@dataclass
class Running:
    """A request in flight, with the response so far."""

    request_id: str
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, request: SampleRequest) -> Running:
        """Begin with what the request has from before an abort."""
        return cls(
            request.request_id, list(request.prior_ids), list(request.prior_log_probs), list(request.prior_versions)
        )

    def take(self, completion: Any, version: int) -> FinishReason | None:
        """Add what a step has sampled; returns why the response has ended, None if it has not."""
        tokens = list(completion.token_ids)
        log_probs = list(completion.logprobs.logprobs) if tokens else []
        if len(log_probs) != len(tokens):
            raise UsageError(
                f"vLLM returned {len(tokens)} tokens with {len(log_probs)} log-probs for request {self.request_id!r}"
            )
        self.token_ids += tokens
        self.log_probs += log_probs
        self.versions += [version] * len(tokens)
        reason = completion.finish_reason
        if reason is None or reason == "stop" or reason == "length":
            ended: FinishReason | None = reason
            return ended
        raise UsageError(f"vLLM ended request {self.request_id!r} with finish_reason={reason!r}")

    def output(self, reason: FinishReason) -> SampleOutput:
        """Return the response as it is now."""
        return SampleOutput(self.request_id, self.token_ids, self.log_probs, self.versions, reason)
