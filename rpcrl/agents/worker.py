"""Where do agent loops run? In light CPU processes, many samples at the same time in each; torch is not loaded."""

from __future__ import annotations

import asyncio
import time
import traceback
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rpcrl.agents.balancer import Balancer
from rpcrl.agents.llm import HandleReplica, Llm, LlmClient
from rpcrl.agents.loop import AgentLoop, AgentLoopOutput, AgentPrompt
from rpcrl.agents.rewards import RewardClient
from rpcrl.agents.tasks import AgentTask, TaskResult
from rpcrl.agents.tokenizer import LightTokenizer
from rpcrl.config.registry import AGENT_LOOPS
from rpcrl.dispatch.mode import Execute
from rpcrl.dispatch.register import register
from rpcrl.errors import UsageError
from rpcrl.logs import get_logger
from rpcrl.runtime.worker import Worker

if TYPE_CHECKING:
    from rpcrl.config.agent import Agent

__all__ = ["AgentLoopWorker", "load_loop"]

log = get_logger(__name__)

FAILURE_CHARACTERS = 4_000
"""What is told of one failure, from its end."""


def load_loop(name: str) -> type[AgentLoop]:
    """Return the agent loop of that name or import path. Raises UsageError or ConfigError for what is none."""
    found: Any = AGENT_LOOPS[name]
    if not isinstance(found, type) or not issubclass(found, AgentLoop):
        raise UsageError(f"agent loop {name!r} is {found!r}, not a class that inherits from rpcrl.AgentLoop")
    if found.run is AgentLoop.run or not asyncio.iscoroutinefunction(found.run):
        raise UsageError(f"agent loop {name!r}: {found.__name__} has no async def run(self, prompt, llm)")
    return found


class AgentLoopWorker(Worker):
    """One process of agent loops, with a balancer of its own over all replicas."""

    def __init__(
        self, config: Agent, *, number: int, model_path: str, max_prompt_length: int, max_response_length: int
    ) -> None:
        """Load tokenizer and default loop; ``number`` is this worker's among all."""
        super().__init__()
        self._config = config
        self._number = number
        self._max_prompt_length = max_prompt_length
        self._max_response_length = max_response_length
        self._tokenizer = LightTokenizer(model_path)
        self._rewards = RewardClient(None)
        self._loops: dict[str, AgentLoop] = {}
        self._client: LlmClient | None = None
        self._loop_of(str(config.default_agent_loop))

    @register(execute_mode=Execute.RANK_ZERO)
    async def connect(self, replicas: Mapping[str, Any], rewards: Any | None, wait_for_replica_s: float = 0.0) -> None:
        """Take the replicas (worker handles by name) and the reward workers' group."""
        balancer = Balancer(policy=self._config.placement, first=self._number)
        self._client = LlmClient(balancer, name=f"agent{self._number}", wait_for_replica_s=wait_for_replica_s)
        self._rewards = RewardClient(rewards, first=self._number)
        for loop in self._loops.values():
            loop.rewards = self._rewards
        for name, handle in replicas.items():
            await self._client.add_replica(name, HandleReplica(handle))

    @register(execute_mode=Execute.RANK_ZERO, concurrent=True)
    async def add_replica(self, name: str, handle: Any) -> None:
        """Take one more replica, or one that came back."""
        await self._connected().add_replica(name, HandleReplica(handle))

    @register(execute_mode=Execute.RANK_ZERO, concurrent=True)
    async def remove_replica(self, name: str) -> None:
        """Send no further request to a replica."""
        await self._connected().remove_replica(name)

    @register(execute_mode=Execute.RANK_ZERO)
    async def run_group(self, tasks: Sequence[AgentTask]) -> list[TaskResult]:
        """Make samples at the same time; returns what became of each, in their order.

        A task that fails or takes longer than ``task_timeout_s`` is begun anew, ``max_attempts`` times in all. Raises
        only when no replica is left.
        """
        return list(await asyncio.gather(*(self._run_task(task) for task in tasks)))

    async def _run_task(self, task: AgentTask) -> TaskResult:
        began_s, num_calls, failure = time.perf_counter(), 0, ""
        for attempt in range(1, self._config.max_attempts + 1):
            llm = self._llm_of(task)
            try:
                async with asyncio.timeout(self._config.task_timeout_s) as deadline:
                    outputs = await self._outputs_of(task, llm)
                return TaskResult(outputs, "", attempt, num_calls + llm.num_calls, time.perf_counter() - began_s)
            except TimeoutError as error:
                failure = _failure(error)
                if deadline.expired():
                    failure = (
                        f"not done within {self._config.task_timeout_s:g} s (rollout.agent.task_timeout_s), "
                        f"{llm.num_calls} calls of the model begun"
                    )
            except Exception as error:
                if not self._connected().balancer.replicas:
                    raise
                failure = _failure(error)
            finally:
                llm.close()
            num_calls += llm.num_calls
            log.warning("%s, attempt %d of %d: %s", task.name, attempt, self._config.max_attempts, failure)
        attempts = self._config.max_attempts
        return TaskResult((), failure, attempts, num_calls, time.perf_counter() - began_s)

    async def _outputs_of(self, task: AgentTask, llm: Llm) -> list[AgentLoopOutput]:
        loop = self._loop_of(task.loop)
        columns = {name: value for name, value in task.columns.items() if name != "raw_prompt"}
        prompt = AgentPrompt(
            uid=task.uid,
            sample_index=task.sample_index,
            token_ids=task.token_ids,
            raw_prompt=task.columns.get("raw_prompt", ""),
            step=task.step,
            validate=task.validate,
            columns=columns,
        )
        made: Any = await loop.run(prompt, llm)
        outputs: list[AgentLoopOutput] = list(made) if isinstance(made, list | tuple) else [made]
        if not outputs or not all(isinstance(output, AgentLoopOutput) for output in outputs):
            raise UsageError(f"{type(loop).__name__}.run must return an AgentLoopOutput or several, not {made!r:.80}")
        for output in outputs:
            output.check(max_prompt_length=self._max_prompt_length, max_response_length=task.max_response_length)
        return outputs

    def _llm_of(self, task: AgentTask) -> Llm:
        return Llm(
            self._connected(),
            uid=task.uid,
            sample_index=task.sample_index,
            seed=task.seed,
            step=task.step,
            sampling=task.sampling,
            max_response_length=task.max_response_length,
        )

    def _loop_of(self, name: str) -> AgentLoop:
        if name not in self._loops:
            loop = load_loop(name)()
            loop.max_prompt_length = self._max_prompt_length
            loop.max_response_length = self._max_response_length
            loop.tokenizer = self._tokenizer
            loop.rewards = self._rewards
            loop.start(**(self._config.agent_loop_kwargs if name == self._config.default_agent_loop else {}))
            self._loops[name] = loop
        return self._loops[name]

    def _connected(self) -> LlmClient:
        if self._client is None:
            raise UsageError("this agent-loop worker has not been connected to replicas")
        return self._client


def _failure(error: BaseException) -> str:
    """Return an error of a loop in words, with the places in the user's code."""
    text = "".join(traceback.format_exception(error)).strip()
    return text if len(text) <= FAILURE_CHARACTERS else f"… {text[-FAILURE_CHARACTERS:]}"
