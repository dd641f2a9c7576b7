"""What goes to an agent-loop worker, and what comes back? Plain values, without tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rpcrl.agents.loop import AgentLoopOutput
from rpcrl.engines.sampling_settings import SamplingSettings
from rpcrl.errors import UsageError

__all__ = ["AGENT_NAME", "SAMPLING_PARAMS", "AgentTask", "TaskResult", "row_sampling"]

AGENT_NAME = "agent_name"
"""Column: which loop makes a row's samples, where it is not the default one."""
SAMPLING_PARAMS = "sampling_params"
"""Column: a dict that changes how a row's samples are drawn."""


@dataclass(frozen=True)
class AgentTask:
    """One sample that is to be made."""

    uid: str
    sample_index: int
    token_ids: Sequence[int]
    loop: str
    sampling: SamplingSettings
    max_response_length: int
    seed: int
    step: int
    validate: bool
    columns: Mapping[str, Any]
    """Non-tensor columns of the row, ``raw_prompt`` among them."""

    @property
    def name(self) -> str:
        """How errors call it."""
        return f"sample {self.sample_index} of prompt {self.uid}"


@dataclass(frozen=True)
class TaskResult:
    """What has become of a task: outputs, or why there are none."""

    outputs: Sequence[AgentLoopOutput] = ()
    failure: str = ""
    """The last attempt's error, with its traceback; empty where there are outputs."""
    attempts: int = 1
    num_calls: int = 0
    """Answers of the model, of all attempts."""
    seconds: float = 0.0


def row_sampling(defaults: SamplingSettings, given: Mapping[str, Any] | None, *, where: str) -> SamplingSettings:
    """Return the settings of a row: the batch's, with what the row's ``sampling_params`` change.

    Raises UsageError for a name or a value that is none.
    """
    if not given:
        return defaults
    fields = ("do_sample", "temperature", "top_k", "top_p")
    unknown = sorted(set(given) - set(fields))
    if unknown:
        raise UsageError(f"{where}: sampling_params has {', '.join(unknown)}; it takes {', '.join(fields)}")
    values = {name: given.get(name, getattr(defaults, name)) for name in fields}
    try:
        return SamplingSettings(
            bool(values["do_sample"]), float(values["temperature"]), int(values["top_k"]), float(values["top_p"])
        )
    except (TypeError, ValueError, UsageError) as error:
        raise UsageError(f"{where}: sampling_params: {error}") from None
