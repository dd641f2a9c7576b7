"""What does the reward model do? It reads prompt and response, and gives each pair one number."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rpcrl.dispatch.mode import Dispatch
from rpcrl.dispatch.register import register
from rpcrl.errors import BatchError
from rpcrl.runtime.worker import Worker

if TYPE_CHECKING:
    from rpcrl.batch.data_proto import DataProto
    from rpcrl.config.run import RewardModel

__all__ = ["RewardModelWorker"]


class RewardModelWorker(Worker):
    """One copy of a sequence classifier; each rank scores its share of the rows."""

    def __init__(self, config: RewardModel, *, device: str, threads: int) -> None:
        super().__init__()
        from rpcrl.engines.sequence_classifier import SequenceClassifier

        self._micro_batch_size = config.micro_batch_size_per_gpu
        self._model = SequenceClassifier(str(config.model_path), device=device, threads=threads)

    @register(Dispatch.DP_COMPUTE_PROTO)
    def compute_rm_score(self, batch: DataProto) -> DataProto:
        """Return the non-tensor column ``rm_score``, a float a row.

        Reads the non-tensor columns ``raw_prompt`` (chat messages or a string) and ``response_text``. Raises
        BatchError when one is missing or a pair is longer than the model's positions.
        """
        from rpcrl.batch.data_proto import DataProto

        columns = batch.non_tensor_batch
        missing = [name for name in ("raw_prompt", "response_text") if name not in columns]
        if missing:
            raise BatchError(f"compute_rm_score needs the non-tensor columns {', '.join(missing)}")
        pairs = zip(columns["raw_prompt"].tolist(), columns["response_text"].tolist(), strict=True)
        texts = [self._model.text_of(prompt, response) for prompt, response in pairs]
        scores = self._model.score(texts, micro_batch_size=self._micro_batch_size)
        return DataProto.from_dict(non_tensors={"rm_score": scores})
