"""How do outputs of agent loops become the rows of a batch, as a rollout engine returns them?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rpcrl.agents.loop import NO_VERSION, AgentLoopOutput
from rpcrl.errors import BatchError

if TYPE_CHECKING:
    from rpcrl.batch.data_proto import DataProto

__all__ = ["REQUEST_ROW", "RowShape", "rows_of"]

REQUEST_ROW = "request_row"
"""Column: which row of the request an output belongs to; ``output_index`` counts those of one."""

RESERVED = frozenset(
    {
        *("uid", "sample_index", "output_index", REQUEST_ROW, "raw_prompt", "data_source", "ground_truth"),
        *("reward_model", "extra_info", "finish_reason", "num_turns", "min_weight_version", "max_weight_version"),
        *("reward_score", "response_text", "score", "rm_score"),
    }
)
"""Columns that are the prompt's, the sample's or the reward's: no extra field may have such a name."""


@dataclass(frozen=True)
class RowShape:
    """How wide the columns of a batch are, and what fills them up."""

    prompt_length: int
    response_length: int
    pad_token_id: int


def rows_of(outputs: Sequence[Sequence[AgentLoopOutput]], shape: RowShape) -> DataProto:
    """Return one row an output, those of a request side by side, in the order of the requests.

    Tensors as those of ``RolloutEngine.generate`` and ``weight_versions`` [N, R]; the attention mask has a tool's
    tokens, the response mask has not. Non-tensors: ``finish_reason``, ``num_turns``, ``min_weight_version``,
    ``max_weight_version``, ``request_row``, ``output_index``, ``reward_score`` where loops give one, and the outputs'
    extra fields. Raises BatchError when some rows have a score or a field and others have none, or
    when a field has the name of a column that is there anyway.
    """
    import torch

    from rpcrl.batch.data_proto import DataProto
    from rpcrl.engines.batches import positions

    flat = [output for of_request in outputs for output in of_request]
    count, p, r = len(flat), shape.prompt_length, shape.response_length
    prompts = torch.full((count, p), shape.pad_token_id, dtype=torch.int64)
    responses = torch.full((count, r), shape.pad_token_id, dtype=torch.int64)
    attention_mask = torch.zeros(count, p + r, dtype=torch.int64)
    response_mask = torch.zeros(count, r, dtype=torch.int64)
    log_probs = torch.zeros(count, r, dtype=torch.float32)
    versions = torch.full((count, r), NO_VERSION, dtype=torch.int64)
    for row, output in enumerate(flat):
        length = len(output.response_ids)
        start = p - len(output.prompt_ids)
        prompts[row, start:] = torch.tensor(list(output.prompt_ids))
        attention_mask[row, start : p + length] = 1
        responses[row, :length] = torch.tensor(list(output.response_ids), dtype=torch.int64)
        response_mask[row, :length] = torch.tensor(list(output.response_mask), dtype=torch.int64)
        log_probs[row, :length] = torch.tensor(list(output.response_logprobs), dtype=torch.float32)
        versions[row, :length] = torch.tensor(list(output.response_versions), dtype=torch.int64)
    sampled = [[version for version in output.response_versions if version != NO_VERSION] for output in flat]
    # a row that nobody sampled is as new as the others: it is no reason to drop them as stale
    newest = max((version for of_row in sampled for version in of_row), default=NO_VERSION)
    # past the end positions go on counting, as the engines' do
    tail = attention_mask[:, :p].sum(-1, keepdim=True) + torch.arange(r)
    return DataProto.from_dict(
        tensors={
            "prompts": prompts,
            "responses": responses,
            "response_mask": response_mask,
            "input_ids": torch.cat([prompts, responses], -1),
            "attention_mask": attention_mask,
            "position_ids": torch.cat([positions(attention_mask[:, :p]), tail], -1),
            "rollout_log_probs": log_probs,
            "weight_versions": versions,
        },
        non_tensors={
            **_extra_columns(flat),
            "finish_reason": [output.finish_reason for output in flat],
            "num_turns": [output.num_turns for output in flat],
            "min_weight_version": [min(of_row, default=newest) for of_row in sampled],
            "max_weight_version": [max(of_row, default=newest) for of_row in sampled],
            REQUEST_ROW: [row for row, of_request in enumerate(outputs) for _ in of_request],
            "output_index": [index for of_request in outputs for index, _ in enumerate(of_request)],
        },
    )


def _extra_columns(outputs: Sequence[AgentLoopOutput]) -> dict[str, list[Any]]:
    """Return ``reward_score`` and the extra fields; a row that failed (no turn) has None where others have a value."""
    made = [output for output in outputs if output.num_turns]
    columns: dict[str, list[Any]] = {}
    scored = [output.reward_score is not None for output in made]
    if any(scored):
        if not all(scored):
            raise BatchError(
                f"{sum(scored)} of {len(made)} outputs of agent loops have a reward_score; give all one, or none"
            )
        columns["reward_score"] = [0.0 if output.reward_score is None else output.reward_score for output in outputs]
    names = {name for output in made for name in output.extra_fields}
    taken = sorted(names & RESERVED)
    if taken:
        raise BatchError(
            f"agent loops gave the extra field {', '.join(map(repr, taken))}, which is a column of rpcrl's own"
        )
    for name in sorted(names):
        missing = sum(name not in output.extra_fields for output in made)
        if missing:
            raise BatchError(f"{missing} of {len(made)} outputs of agent loops lack the extra field {name!r} of others")
        columns[name] = [output.extra_fields.get(name) for output in outputs]
    return columns
