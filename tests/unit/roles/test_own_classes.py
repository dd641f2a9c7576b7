"""What must a class of a user's own define to take part, and is it told so before anything runs?"""

from collections.abc import Iterator, Sequence

import pytest
import torch

from rpcrl.agents.loop import AgentLoop
from rpcrl.engines.sharded import Sharded
from rpcrl.errors import UsageError
from rpcrl.roles.weight_sync import WeightSender
from rpcrl.trainer.asynchronous import AsyncTrainer
from rpcrl.trainer.base import Trainer


@pytest.mark.parametrize(
    ("kind", "missing"),
    [
        (WeightSender, {"weight_specs", "weight_buckets"}),
        (Sharded, {"_load", "_outputs"}),
        (Trainer, {"step"}),
        (AsyncTrainer, {"num_warmup_batches"}),
        (AgentLoop, {"run"}),
    ],
    ids=lambda part: getattr(part, "__name__", ""),
)
def test_a_class_that_lacks_a_part_is_refused_when_it_is_made(kind, missing):
    assert kind.__abstractmethods__ == missing

    class Own(kind):
        """Lacks everything."""

    with pytest.raises(TypeError, match=rf"abstract class Own with.* {sorted(missing)[0]}"):
        Own()


def test_a_sender_need_not_score_texts_and_then_the_canary_says_what_to_do():
    class Plain(WeightSender):
        def weight_specs(self) -> Sequence[tuple[str, str, Sequence[int]]]:
            return []

        def weight_buckets(self, bucket_bytes: int) -> Iterator[list[tuple[str, torch.Tensor]]]:
            yield from ()

    with pytest.raises(UsageError, match=r"Plain does not define score_tokens, .* rollout\.canary=false"):
        Plain.score_tokens(object.__new__(Plain), [1, 2])
