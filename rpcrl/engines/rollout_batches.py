"""How does a batch of prompts become requests, and their outputs a batch again?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from rpcrl.engines.batches import columns, positions
from rpcrl.engines.requests import SampleOutput, SampleRequest
from rpcrl.engines.sampling import SamplingSettings
from rpcrl.errors import BatchError

if TYPE_CHECKING:
    from rpcrl.batch.data_proto import DataProto

__all__ = ["answers", "requests_of"]


def requests_of(prompts: DataProto, *, prefix: str) -> list[SampleRequest]:
    """Return one request a row, named ``prefix`` and the row's number; see ``RolloutEngine.generate``.

    Raises BatchError for prompts that no engine takes.
    """
    input_ids, attention_mask = columns(prompts, ("input_ids", "attention_mask"), of="generate")
    meta: Mapping[str, Any] = prompts.meta_info
    if "response_length" not in meta:
        raise BatchError("generate needs meta_info['response_length'], the largest number of new tokens")
    response_length = int(meta["response_length"])
    if response_length < 1:
        raise BatchError(f"meta_info['response_length']={response_length} must be 1 or more")
    mask = attention_mask.bool()
    if mask.shape[1] == 0 or not bool(mask[:, -1].all()) or bool((mask[:, :-1] & ~mask[:, 1:]).any()):
        raise BatchError("generate needs left-padded prompts of at least one token, without holes in the mask")
    sampling = SamplingSettings(
        do_sample=bool(meta.get("do_sample", True)),
        temperature=float(meta.get("temperature", 1.0)),
        top_k=int(meta.get("top_k", -1)),
        top_p=float(meta.get("top_p", 1.0)),
    )
    rows = len(input_ids)
    uids: Sequence[Any] = [""] * rows
    indices: Sequence[Any] = [0] * rows
    if sampling.do_sample:
        missing = [name for name in ("uid", "sample_index") if name not in prompts.non_tensor_batch]
        if missing:
            raise BatchError(f"sampling needs the non-tensor columns {', '.join(missing)}: they key its noise")
        uids = list(prompts.non_tensor_batch["uid"])
        indices = list(prompts.non_tensor_batch["sample_index"])
    starts = (~mask).sum(-1).tolist()
    return [
        SampleRequest(
            request_id=f"{prefix}{row}",
            prompt_ids=ids[start:],
            max_new_tokens=response_length,
            sampling=sampling,
            seed=int(meta.get("seed", 0)),
            step=int(meta.get("global_steps", 0)),
            uid=str(uids[row]),
            sample_index=int(indices[row]),
        )
        for row, (ids, start) in enumerate(zip(input_ids.tolist(), starts, strict=True))
    ]


def answers(prompts: DataProto, outputs: Sequence[SampleOutput], *, pad: int, version: int) -> DataProto:
    """Return the batch that ``RolloutEngine.generate`` promises from the outputs of its rows, in their order."""
    from rpcrl.batch.data_proto import DataProto

    ids, attention_mask = columns(prompts, ("input_ids", "attention_mask"), of="generate")
    mask = attention_mask.to(torch.int64)
    width = int(prompts.meta_info["response_length"])
    lengths = torch.tensor([len(output.token_ids) for output in outputs], dtype=torch.int64)
    response_mask = (torch.arange(width) < lengths.unsqueeze(1)).to(torch.int64)
    real = response_mask.bool()
    responses = torch.full(response_mask.shape, pad, dtype=ids.dtype)
    responses[real] = _flat([output.token_ids for output in outputs], ids.dtype)
    log_probs = torch.zeros(response_mask.shape, dtype=torch.float32)
    log_probs[real] = _flat([output.log_probs for output in outputs], torch.float32)
    after_prompt = mask.sum(-1, keepdim=True) + torch.arange(width)
    reasons = np.array([output.finish_reason for output in outputs], dtype=object)
    return DataProto.from_dict(
        tensors={
            "prompts": ids,
            "responses": responses,
            "response_mask": response_mask,
            "input_ids": torch.cat([ids, responses], dim=-1),
            "attention_mask": torch.cat([mask, response_mask], dim=-1),
            "position_ids": torch.cat([positions(mask), after_prompt], dim=-1),
            "rollout_log_probs": log_probs,
        },
        non_tensors={**prompts.non_tensor_batch, "finish_reason": reasons},
        meta_info={**prompts.meta_info, "weight_version": version},
    )


def _flat(rows: Sequence[Sequence[Any]], dtype: torch.dtype) -> Tensor:
    return torch.tensor([value for row in rows for value in row], dtype=dtype)
