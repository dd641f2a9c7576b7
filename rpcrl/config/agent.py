"""Which settings do agent loops have?"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from rpcrl.config.section import Count, Positive, Section, Text
from rpcrl.config.section import setting as _setting

__all__ = ["Agent"]


class Agent(Section):
    """Samples made by code of your own; off while default_agent_loop is null."""

    default_agent_loop: Text | None = _setting(
        None,
        "single_turn_agent, or one of yours: its name, file.py:Class or module:Class; null samples whole batches",
    )
    num_workers: Count = _setting(1, "CPU processes that run agent loops")
    agent_loop_kwargs: dict[str, Any] = Field(
        default_factory=dict, description="Keyword arguments of the default loop's start (default: {})"
    )
    task_timeout_s: Positive = _setting(600.0, "How long one sample may take, s")
    max_attempts: Count = _setting(2, "How often a sample that fails is begun, in all")
    on_failed_task: Literal["raise", "empty"] = _setting(
        "raise", "A sample that has failed for good ends the run, or counts as a response without a token"
    )
    placement: Literal["least_in_flight", "deterministic"] = _setting(
        "least_in_flight", "Which replica a conversation gets; deterministic depends on its name alone"
    )
