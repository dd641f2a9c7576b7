"""How do rows of a batch become requests, and the outputs of those a batch again?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from rpcrl.engines.batches import columns, positions
from rpcrl.engines.requests import SampleOutput, SampleRequest
from rpcrl.engines.sampling import SamplingSettings
from rpcrl.errors import BatchError

if TYPE_CHECKING:
    from rpcrl.batch.data_proto import DataProto

__all__ = ["NO_VERSION", "batch_of", "requests_of"]

NO_VERSION = -1
"""In ``weight_versions``: no token."""


def requests_of(prompts: DataProto, names: Iterator[str]) -> list[SampleRequest]:
    """Return one request per row of what ``RolloutEngine.generate`` takes; ``names`` yields their ids.

    Raises BatchError when a column or ``meta_info["response_length"]`` is missing.
    """
    input_ids, attention_mask = columns(prompts, ("input_ids", "attention_mask"), of="sample")
    meta: Any = prompts.meta_info
    if "response_length" not in meta:
        raise BatchError("sample needs meta_info['response_length'], the largest number of new tokens")
    missing = [name for name in ("uid", "sample_index") if name not in prompts.non_tensor_batch]
    if missing:
        raise BatchError(f"sample needs the non-tensor columns {', '.join(missing)}: they key its noise")
    settings = SamplingSettings(
        do_sample=bool(meta.get("do_sample", True)),
        temperature=float(meta.get("temperature", 1.0)),
        top_k=int(meta.get("top_k", -1)),
        top_p=float(meta.get("top_p", 1.0)),
    )
    return [
        SampleRequest(
            request_id=next(names),
            prompt_ids=ids[mask.bool()].tolist(),
            max_new_tokens=int(meta["response_length"]),
            sampling=settings,
            seed=int(meta.get("seed", 0)),
            step=int(meta.get("global_steps", 0)),
            uid=str(uid),
            sample_index=int(index),
        )
        for ids, mask, uid, index in zip(
            input_ids,
            attention_mask,
            prompts.non_tensor_batch["uid"],
            prompts.non_tensor_batch["sample_index"],
            strict=True,
        )
    ]


def batch_of(prompts: DataProto, outputs: Sequence[SampleOutput], *, pad_token_id: int) -> DataProto:
    """Return the rows of ``prompts`` with their outputs, as ``RolloutEngine.generate`` does.

    In place of one ``weight_version`` for all, each token has its own in ``weight_versions`` [N, R] int64 (NO_VERSION
    where there is none), and each row has the non-tensor ``min_weight_version`` and ``max_weight_version``.
    """
    from rpcrl.batch.data_proto import DataProto

    ids, prompt_mask = columns(prompts, ("input_ids", "attention_mask"), of="sample")
    shape = (len(outputs), int(prompts.meta_info["response_length"]))
    responses = torch.full(shape, pad_token_id, dtype=ids.dtype)
    log_probs = torch.zeros(shape, dtype=torch.float32)
    versions = torch.full(shape, NO_VERSION, dtype=torch.int64)
    mask = torch.zeros(shape, dtype=torch.int64)
    for row, output in enumerate(outputs):
        length = len(output.token_ids)
        responses[row, :length] = torch.tensor(output.token_ids, dtype=ids.dtype)
        log_probs[row, :length] = torch.tensor(output.log_probs)
        versions[row, :length] = torch.tensor(output.versions, dtype=torch.int64)
        mask[row, :length] = 1
    whole_mask = torch.cat([prompt_mask.to(torch.int64), mask], -1)
    after_prompt = prompt_mask.to(torch.int64).sum(-1, keepdim=True) + torch.arange(shape[1])
    return DataProto.from_dict(
        tensors={
            "prompts": ids,
            "responses": responses,
            "response_mask": mask,
            "input_ids": torch.cat([ids, responses], -1),
            "attention_mask": whole_mask,
            "position_ids": torch.cat([positions(prompt_mask.to(torch.int64)), after_prompt], -1),
            "rollout_log_probs": log_probs,
            "weight_versions": versions,
        },
        non_tensors={
            **prompts.non_tensor_batch,
            "finish_reason": _objects([output.finish_reason for output in outputs]),
            "min_weight_version": _objects([min(output.versions, default=NO_VERSION) for output in outputs]),
            "max_weight_version": _objects([max(output.versions, default=NO_VERSION) for output in outputs]),
        },
        meta_info=dict(prompts.meta_info),
    )


def _objects(values: Sequence[object]) -> np.ndarray[Any, np.dtype[np.object_]]:
    array = np.empty(len(values), dtype=object)
    array[:] = values
    return array
