"""How do reward functions run beside the rest? One light CPU process per worker; torch is never loaded in it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rpcrl.batch.data_proto import DataProto
from rpcrl.dispatch.mode import Dispatch
from rpcrl.dispatch.register import register
from rpcrl.errors import BatchError
from rpcrl.rewards.loading import load_reward
from rpcrl.rewards.scoring import SCORE, score_rows
from rpcrl.runtime.worker import Worker

__all__ = ["RewardWorker"]

_FINISH_REASON = "finish_reason"


class RewardWorker(Worker):
    """Scores responses with one reward function."""

    def __init__(self, reward_fn: str, reward_kwargs: Mapping[str, Any] | None = None) -> None:
        """Load ``reward_fn`` (``/abs/file.py:name`` or ``pkg.mod:name``); raises ConfigError when it does not load."""
        super().__init__()
        self._reward = load_reward(reward_fn, reward_kwargs)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def compute_reward(self, batch: DataProto) -> DataProto:
        """Return the column ``score`` (floats) and one column per further field that the function returned.

        Reads the non-tensor columns ``response_text``, ``data_source``, ``ground_truth``, and where present
        ``extra_info`` and ``finish_reason`` (added to the row's ``extra_info``). Raises BatchError when a column is
        missing, when a result is not a number or a dict with ``score``, or when a field has the name of a column of
        the batch; the text names row, field and rank.
        """
        columns = batch.non_tensor_batch
        missing = [name for name in ("response_text", "data_source", "ground_truth") if name not in columns]
        if missing:
            raise BatchError(
                f"compute_reward needs the non-tensor columns {', '.join(missing)}; the batch has "
                f"{', '.join(sorted(columns)) or 'none'}"
            )
        scored = score_rows(
            self._reward,
            data_sources=columns["data_source"].tolist(),
            solution_strs=columns["response_text"].tolist(),
            ground_truths=columns["ground_truth"].tolist(),
            extra_infos=_extra_infos(batch),
            where=f"reward rank {self.rank}",
        )
        taken = sorted(name for name in scored if name != SCORE and name in columns)
        if taken:
            raise BatchError(
                f"{self._reward.path} returned the field {', '.join(map(repr, taken))}, which is a column of the batch "
                "already; give the field another name"
            )
        return DataProto.from_dict(non_tensors=scored)


def _extra_infos(batch: DataProto) -> list[dict[str, Any]]:
    """Return each row's ``extra_info`` as a dict of its own, with the reason why the response ended."""
    columns = batch.non_tensor_batch
    given = columns["extra_info"].tolist() if "extra_info" in columns else [None] * len(batch)
    extra_infos: list[dict[str, Any]] = [dict(info or {}) for info in given]
    if _FINISH_REASON in columns:
        for info, reason in zip(extra_infos, columns[_FINISH_REASON].tolist(), strict=True):
            info[_FINISH_REASON] = reason
    return extra_infos
