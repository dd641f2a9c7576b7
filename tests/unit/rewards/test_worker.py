"""The reward worker: columns in, columns out, errors with its rank, and no torch in its process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rpcrl.batch.data_proto import DataProto
from rpcrl.dispatch.mode import Dispatch
from rpcrl.dispatch.register import registered_methods
from rpcrl.errors import BatchError, ConfigError
from rpcrl.rewards.worker import RewardWorker
from rpcrl.runtime import worker as runtime_worker


@pytest.fixture(autouse=True)
def rank_one() -> Iterator[None]:
    """This process is rank 1 of two."""
    runtime_worker.set_context(
        runtime_worker.WorkerContext(
            identity="reward-1",
            group="reward",
            rank=1,
            world_size=2,
            local_rank=1,
            local_world_size=2,
            node_rank=0,
            device=None,
        )
    )
    yield
    runtime_worker.set_context(None)


@pytest.fixture
def reward(tmp_path: Path) -> Callable[[str], str]:
    def _reward(body: str) -> str:
        path = tmp_path / "mine.py"
        path.write_text(f"def fn(data_source, solution_str, ground_truth, extra_info):\n    {body}\n")
        return f"{path}:fn"

    return _reward


def request(**changes: Any) -> DataProto:
    columns = {
        "response_text": ["1 2", "2 1", ""],
        "data_source": ["sort_digits"] * 3,
        "ground_truth": ["1 2"] * 3,
        "uid": ["0-0", "0-1", "0-2"],
        **changes,
    }
    return DataProto.from_dict(non_tensors={name: column for name, column in columns.items() if column is not None})


def columns_of(batch: DataProto) -> dict[str, list[Any]]:
    return {name: column.tolist() for name, column in batch.non_tensor_batch.items()}


def test_scores_come_back_row_by_row() -> None:
    result = RewardWorker("rpcrl.tasks.sort_digits:score").compute_reward(request())
    assert columns_of(result) == {"score": [1.0, 0.0, 0.0]}
    assert result.batch is None
    assert registered_methods(RewardWorker)["compute_reward"].dispatch_mode is Dispatch.DP_COMPUTE_PROTO


def test_fields_become_columns_of_their_own() -> None:
    batch = request(ground_truth=["3"] * 3, response_text=["#### 3", "#### 4", "3"], data_source=["openai/gsm8k"] * 3)
    result = RewardWorker("rpcrl.tasks.gsm8k:score", {"format_weight": 0.5}).compute_reward(batch)
    assert columns_of(result) == {
        "score": [1.5, 0.5, 0.0],
        "acc": [1.0, 0.0, 0.0],
        "format": [1.0, 1.0, 0.0],
        "flexible": [1.0, 0.0, 1.0],
    }


def test_the_reason_of_the_end_reaches_the_function_and_the_callers_batch_stays() -> None:
    infos: list[dict[str, Any]] = [{"index": number} for number in range(3)]
    batch = request(extra_info=infos, finish_reason=["length", "stop", "stop"])
    assert columns_of(RewardWorker("rpcrl.tasks.sort_digits:score").compute_reward(batch)) == {"score": [0.0] * 3}
    assert infos == [{"index": number} for number in range(3)]


def test_p38_a_missing_result_names_field_row_rank_and_type(reward: Callable[[str], str]) -> None:
    worker = RewardWorker(reward("return {'score': 1.0, 'format': None if solution_str == '2 1' else 1.0}"))
    with pytest.raises(BatchError) as caught:
        worker.compute_reward(request())
    text = str(caught.value)
    assert "mine.py:fn on reward rank 1, row 1 of 3" in text
    assert "field 'format' must be a number, as in row 0, got None" in text


def test_missing_columns_are_named() -> None:
    with pytest.raises(BatchError, match="needs the non-tensor columns ground_truth; the batch has data_source"):
        RewardWorker("rpcrl.tasks.sort_digits:score").compute_reward(request(ground_truth=None))


def test_a_field_may_not_hide_a_column(reward: Callable[[str], str]) -> None:
    worker = RewardWorker(reward("return {'score': 1.0, 'uid': 1.0}"))
    with pytest.raises(BatchError, match="returned the field 'uid', which is a column of the batch already"):
        worker.compute_reward(request())


def test_a_function_that_does_not_load_is_an_error_at_the_start() -> None:
    with pytest.raises(ConfigError, match="has no function 'scor'; did you mean 'score'"):
        RewardWorker("rpcrl.tasks.sort_digits:scor")


def test_a_reward_process_loads_no_torch() -> None:
    code = """
import sys
from rpcrl.batch.data_proto import DataProto
from rpcrl.rewards.worker import RewardWorker
from rpcrl.runtime.worker import WorkerContext, set_context
set_context(WorkerContext("r", "reward", 0, 1, 0, 1, 0, None))
batch = DataProto.from_dict(non_tensors={"response_text": ["1 2"], "data_source": ["d"], "ground_truth": ["1 2"]})
worker = RewardWorker("rpcrl.tasks.sort_digits:score")
print(worker.compute_reward(batch).non_tensor_batch["score"].tolist())
print([name for name in ("torch", "tensordict", "transformers", "pydantic") if name in sys.modules])
"""
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env={**os.environ}
    )
    assert result.stdout.splitlines() == ["[1.0]", "[]"], result.stderr
