"""What does an agent loop look like? A class with ``async def run(prompt, llm)``: turns, tools, whatever it takes.

One ``run`` makes one sample of one prompt (or several outputs, each a row of its own). It is ordinary async code in a
light CPU process: it may await the model, tools, other services. What the policy sampled counts in training, what came
from elsewhere does not; ``Transcript`` keeps the two apart.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rpcrl.config.registry import register_agent_loop
from rpcrl.errors import UsageError

if TYPE_CHECKING:
    from rpcrl.agents.llm import Llm
    from rpcrl.agents.rewards import RewardClient
    from rpcrl.agents.tokenizer import LightTokenizer
    from rpcrl.engines.requests import SampleOutput

__all__ = ["NO_VERSION", "AgentLoop", "AgentLoopOutput", "AgentPrompt", "SingleTurnAgentLoop", "Transcript"]

NO_VERSION = -1
"""Version of a token that no weights have sampled."""


@dataclass(frozen=True)
class AgentPrompt:
    """One sample to be made of one prompt."""

    uid: str
    sample_index: int
    """0 … n−1 among the samples of the prompt."""
    token_ids: Sequence[int]
    """The prompt as the model reads it, with the opening of the answer."""
    raw_prompt: str | Sequence[Mapping[str, Any]]
    """The prompt as the data has it: chat messages, or a string."""
    step: int
    """Training step; with ``validate`` the step after which held-out prompts are answered."""
    validate: bool = False
    columns: Mapping[str, Any] = field(default_factory=dict)
    """Further columns of the row: ``data_source``, ``ground_truth``, ``extra_info`` …"""


@dataclass
class AgentLoopOutput:
    """One row for training. The four sequences of the response have one entry a token, tools' tokens included."""

    prompt_ids: Sequence[int]
    """At most data.max_prompt_length."""
    response_ids: Sequence[int]
    """At most data.max_response_length."""
    response_mask: Sequence[int]
    """1 for tokens that the policy sampled, 0 for others: these are read and not trained."""
    response_logprobs: Sequence[float]
    """Log-probs of the distribution that was sampled from; 0 where the mask is 0."""
    response_versions: Sequence[int]
    """Versions of the weights that sampled; NO_VERSION where the mask is 0."""
    num_turns: int = 1
    """Answers of the model."""
    finish_reason: str = "stop"
    reward_score: float | None = None
    """The score, if the loop knows it: then ``reward.fn`` is not asked. All rows of a batch have one, or none has."""
    extra_fields: dict[str, Any] = field(default_factory=dict)
    """Further non-tensor columns; the same in every row of a batch."""

    def check(self, *, max_prompt_length: int, max_response_length: int) -> None:
        """Raise UsageError for lengths that do not agree, or that are over the limits."""
        parts = {name: len(getattr(self, name)) for name in ("response_mask", "response_logprobs", "response_versions")}
        wrong = {name: length for name, length in parts.items() if length != len(self.response_ids)}
        if wrong:
            raise UsageError(f"AgentLoopOutput has {len(self.response_ids)} response_ids, but {wrong}")
        if any(value not in (0, 1) for value in self.response_mask):
            raise UsageError("AgentLoopOutput.response_mask has values other than 0 and 1")
        if not 0 < len(self.prompt_ids) <= max_prompt_length:
            raise UsageError(
                f"AgentLoopOutput has {len(self.prompt_ids)} prompt_ids; allowed are 1 to data.max_prompt_length="
                f"{max_prompt_length}"
            )
        if len(self.response_ids) > max_response_length:
            raise UsageError(
                f"AgentLoopOutput has {len(self.response_ids)} response_ids, tools' tokens included; allowed are up to "
                f"data.max_response_length={max_response_length}. Transcript keeps to it"
            )


class Transcript:
    """A response that grows turn by turn: tokens that the policy samples, and tokens that it is given."""

    def __init__(self, prompt_ids: Sequence[int], max_response_length: int) -> None:
        self.prompt_ids = list(prompt_ids)
        self.response_ids: list[int] = []
        self.num_turns = 0
        self.finish_reason = "stop"
        self._limit = max_response_length
        self._mask: list[int] = []
        self._log_probs: list[float] = []
        self._versions: list[int] = []

    @property
    def context(self) -> list[int]:
        """Prompt and response so far: what the next turn continues."""
        return [*self.prompt_ids, *self.response_ids]

    @property
    def room(self) -> int:
        """Response tokens that still fit."""
        return self._limit - len(self.response_ids)

    def sampled(self, output: SampleOutput) -> None:
        """Add a turn of the policy. Raises UsageError when it does not fit."""
        self._check_room(len(output.token_ids))
        self.response_ids += output.token_ids
        self._mask += [1] * len(output.token_ids)
        self._log_probs += output.log_probs
        self._versions += output.versions
        self.num_turns += 1
        self.finish_reason = output.finish_reason

    def given(self, token_ids: Sequence[int]) -> bool:
        """Add tokens of a tool or a user, if they leave room for an answer; else end with "length".

        Returns whether they were added.
        """
        if len(token_ids) >= self.room:
            self.finish_reason = "length"
            return False
        self.response_ids += token_ids
        self._mask += [0] * len(token_ids)
        self._log_probs += [0.0] * len(token_ids)
        self._versions += [NO_VERSION] * len(token_ids)
        return True

    def output(self, *, reward_score: float | None = None, **extra_fields: Any) -> AgentLoopOutput:
        """Return the row."""
        return AgentLoopOutput(
            prompt_ids=self.prompt_ids,
            response_ids=self.response_ids,
            response_mask=self._mask,
            response_logprobs=self._log_probs,
            response_versions=self._versions,
            num_turns=self.num_turns,
            finish_reason=self.finish_reason,
            reward_score=reward_score,
            extra_fields=extra_fields,
        )

    def _check_room(self, length: int) -> None:
        if length > self.room:
            raise UsageError(
                f"{length} more tokens do not fit: the response has {len(self.response_ids)} of {self._limit} "
                "(data.max_response_length); ask for at most transcript.room"
            )


class AgentLoop(ABC):
    """Base of agent loops. Each worker makes one object a loop; its ``run`` runs for many samples at the same time.

    A subclass with settings takes them as keyword arguments (``rollout.agent.agent_loop_kwargs``) in ``start``. What
    belongs to one sample is a local variable of ``run``.
    """

    max_prompt_length: int
    """P, tokens."""
    max_response_length: int
    """R, tokens, tools' tokens included."""
    tokenizer: LightTokenizer
    rewards: RewardClient
    """The reward function, for loops that want to know a score."""

    def start(self, **kwargs: Any) -> None:
        """Take the loop's own settings, once, before the first sample. Raises what makes the start fail."""
        if kwargs:
            raise UsageError(f"{type(self).__name__} takes no settings, got {', '.join(kwargs)} (agent_loop_kwargs)")

    @abstractmethod
    async def run(self, prompt: AgentPrompt, llm: Llm) -> AgentLoopOutput | Sequence[AgentLoopOutput]:
        """Make one sample: its output, or several, each of which becomes a row of the prompt's group.

        An exception fails the task, and so does its deadline; what becomes of it then is
        ``rollout.agent.max_attempts`` and ``on_failed_task``.
        """

    def transcript(self, prompt: AgentPrompt) -> Transcript:
        """Return an empty response to the prompt."""
        return Transcript(prompt.token_ids, self.max_response_length)


@register_agent_loop("single_turn_agent")
class SingleTurnAgentLoop(AgentLoop):
    """The model answers once: the same tokens as without an agent loop, as a request of its own."""

    async def run(self, prompt: AgentPrompt, llm: Llm) -> AgentLoopOutput:
        """Make one sample of one turn."""
        transcript = self.transcript(prompt)
        transcript.sampled(await llm.generate(transcript.context))
        return transcript.output()
