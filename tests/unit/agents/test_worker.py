"""One agent-loop worker in this process: masks, several outputs, deadlines, attempts (replicas are no models)."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rpcrl.agents.balancer import Balancer
from rpcrl.agents.llm import LlmClient
from rpcrl.agents.loop import NO_VERSION, AgentLoopOutput, AgentPrompt, Transcript
from rpcrl.agents.tasks import AgentTask, TaskResult, row_sampling
from rpcrl.agents.worker import AgentLoopWorker, load_loop
from rpcrl.config.agent import Agent
from rpcrl.config.registry import AGENT_LOOPS, register_agent_loop
from rpcrl.engines.requests import SampleOutput
from rpcrl.engines.sampling_settings import SamplingSettings
from rpcrl.errors import ConfigError, UsageError
from rpcrl.runtime import worker as runtime_worker
from rpcrl.tasks.sort_digits import base_checkpoint
from tests.unit.agents import loops
from tests.unit.agents.byte_llm import FakeReplica
from tests.unit.agents.test_llm import LOSS

HERE = "tests.unit.agents.loops"


@pytest.fixture(autouse=True)
def one_rank() -> Iterator[None]:
    context = runtime_worker.WorkerContext("agent-0", "agents", 0, 1, 0, 1, 0, None)
    runtime_worker.set_context(context)
    loops.RUNS.clear()
    yield
    runtime_worker.set_context(None)


def task(
    uid: str = "p", index: int = 0, *, loop: str = "", prompt: tuple[int, ...] = (5, 10), **info: Any
) -> AgentTask:
    columns = {"raw_prompt": "5 10", "data_source": "mine", "extra_info": {"seed": 3, **info}}
    return AgentTask(uid, index, prompt, loop, SamplingSettings(), 8, 0, 1, False, columns)


def run(loop: str, *tasks: AgentTask, replica: FakeReplica | None = None, **settings: Any) -> list[TaskResult]:
    async def work() -> list[TaskResult]:
        config = Agent(default_agent_loop=loop, **settings)
        worker = AgentLoopWorker(
            config, number=0, model_path=str(base_checkpoint()), max_prompt_length=4, max_response_length=8
        )
        worker._client = LlmClient(Balancer(), name="agent0")
        await worker._client.add_replica("a", replica or FakeReplica())
        given = [AgentTask(**{**vars(each), "loop": each.loop or loop}) for each in tasks]
        return await asyncio.wait_for(worker.run_group(given), 60)

    return asyncio.run(work())


def test_a_tools_tokens_are_in_the_response_and_not_in_its_mask():
    [result] = run(f"{HERE}:TwoTurns", task(), replica=FakeReplica(version=4))
    [output] = result.outputs
    assert list(output.response_ids) == [11, 12, 900, 901, 902, 903]
    assert list(output.response_mask) == [1, 1, 0, 0, 1, 1]
    assert list(output.response_logprobs) == [-0.5, -0.5, 0.0, 0.0, -0.5, -0.5]
    assert list(output.response_versions) == [4, 4, NO_VERSION, NO_VERSION, 4, 4]
    assert (output.num_turns, output.finish_reason, output.extra_fields) == (2, "length", {"seed": 3})
    assert (result.attempts, result.num_calls, result.failure) == (1, 2, "")


def test_a_tool_that_leaves_no_room_for_an_answer_ends_the_response():
    [result] = run(f"{HERE}:TwoTurns", task(), agent_loop_kwargs={"turn_tokens": 6})
    [output] = result.outputs
    assert list(output.response_ids) == [11, 12, 13, 14, 15, 16]
    assert (output.num_turns, output.finish_reason) == (1, "length")


def test_a_transcript_keeps_to_its_room():
    transcript = Transcript([1], 3)
    transcript.sampled(SampleOutput("", [2, 3], [-1.0, -1.0], [0, 0], "stop"))
    with pytest.raises(UsageError, match=r"2 more tokens do not fit: the response has 2 of 3"):
        transcript.sampled(SampleOutput("", [2, 3], [-1.0, -1.0], [0, 0], "stop"))
    assert transcript.context == [1, 2, 3]


def test_a_run_may_return_several_outputs_and_another_loop_than_the_default():
    several = f"{HERE}:Several"
    results = run("single_turn_agent", task("p", 0), task("q", 1, loop=several, prompt=(3,)))
    assert [len(result.outputs) for result in results] == [1, 3]
    assert [output.reward_score for output in results[1].outputs] == [0.0, 1.0, 2.0]
    assert list(results[0].outputs[0].response_ids) == [11, 12, 13, 14, 15, 16, 17, 18]


def test_a_task_that_fails_is_begun_anew_and_one_that_goes_on_failing_is_told():
    results = run(f"{HERE}:Failing", task("once", how="once"), task("always", how="always"), max_attempts=3)
    assert (results[0].attempts, len(results[0].outputs)) == (2, 1)
    assert (results[1].attempts, results[1].outputs) == (3, ())
    assert loops.RUNS == {"once": 2, "always": 3}
    assert "KeyError: 'no such tool, run 3'" in results[1].failure
    assert "loops.py" in results[1].failure, "the place in the user's code"


def test_p11_a_task_over_its_deadline_is_given_up_and_the_others_are_not():
    tasks = [task(f"p{number}", how="hangs" if number == 7 else "fine") for number in range(16)]
    results = run(f"{HERE}:Failing", *tasks, task_timeout_s=0.3, max_attempts=2)
    assert [bool(result.outputs) for result in results] == [number != 7 for number in range(16)]
    assert "not done within 0.3 s (rollout.agent.task_timeout_s), 0 calls of the model begun" in results[7].failure
    assert results[7].attempts == 2


def test_a_deadline_gives_the_models_answer_up_too():
    replica = FakeReplica()
    replica.hold = asyncio.Event()
    [result] = run("single_turn_agent", task(), replica=replica, task_timeout_s=0.1, max_attempts=1)
    assert "1 calls of the model begun" in result.failure
    assert replica.cancelled == 1


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("nothing", "must return an AgentLoopOutput or several, not None"),
        ("torn", "has 7 response_ids, but {'response_mask': 8, 'response_logprobs': 8, 'response_versions': 8}"),
    ],
)
def test_what_is_no_output_fails_the_task(how: str, words: str):
    [result] = run(f"{HERE}:Failing", task(how=how), max_attempts=1)
    assert words in result.failure


def test_outputs_over_the_limits_are_refused():
    def output(**changes: Any) -> AgentLoopOutput:
        values: dict[str, Any] = {"prompt_ids": [1], "response_ids": [2], "response_mask": [1],
                                  "response_logprobs": [0.0], "response_versions": [0]}  # fmt: skip
        return AgentLoopOutput(**{**values, **changes})

    output().check(max_prompt_length=1, max_response_length=1)
    for changes, words in (
        ({"prompt_ids": [1, 2]}, r"2 prompt_ids; allowed are 1 to data.max_prompt_length=1"),
        ({"prompt_ids": []}, r"0 prompt_ids"),
        ({"response_mask": [2]}, r"values other than 0 and 1"),
    ):
        with pytest.raises(UsageError, match=words):
            output(**changes).check(max_prompt_length=1, max_response_length=1)
    with pytest.raises(UsageError, match=r"allowed are up to data.max_response_length=0"):
        output().check(max_prompt_length=1, max_response_length=0)


def test_the_loss_of_the_last_replica_is_no_failure_of_a_task():
    replica = FakeReplica()
    replica.loss = LOSS
    with pytest.raises(type(LOSS), match="SIGKILL"):
        run("single_turn_agent", task(), replica=replica, max_attempts=5)
    assert len(replica.requests) == 1


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (f"{HERE}:NoRun", "has no async def run"),
        (f"{HERE}:PlainRun", "has no async def run"),
        (f"{HERE}:no_loop", "not a class that inherits from rpcrl.AgentLoop"),
        (f"{HERE}:TwoTurnz", "did you mean 'TwoTurns'"),
        ("two_turns", "unknown agent loop 'two_turns'"),
    ],
)
def test_what_is_no_agent_loop_is_refused_by_name(name: str, words: str):
    with pytest.raises((UsageError, ConfigError), match=words):
        load_loop(name)


def test_a_registered_name_is_found_by_its_import_path_elsewhere(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(AGENT_LOOPS, "_functions", dict(AGENT_LOOPS._functions))
    assert register_agent_loop("two_turns_of_a_test")(loops.TwoTurns) is loops.TwoTurns
    path = AGENT_LOOPS.portable("two_turns_of_a_test")
    assert path == f"{HERE}:TwoTurns"
    assert load_loop(path) is loops.TwoTurns
    assert AGENT_LOOPS.portable("single_turn_agent") == "single_turn_agent"
    with pytest.raises(UsageError, match="is already"):
        register_agent_loop("two_turns_of_a_test")(loops.Several)


def test_settings_that_a_loop_does_not_take_fail_the_start():
    with pytest.raises(UsageError, match=r"takes no settings, got colour"):
        run("single_turn_agent", task(), agent_loop_kwargs={"colour": 1})


def test_sampling_of_a_row():
    defaults = SamplingSettings(temperature=0.8, top_p=0.9)
    assert row_sampling(defaults, None, where="") is defaults
    given = row_sampling(defaults, {"temperature": 1.5, "top_k": 3}, where="")
    assert given == SamplingSettings(True, 1.5, 3, 0.9)
    for bad, words in (({"top_q": 1}, "top_q; it takes do_sample, temperature"), ({"top_p": 2.0}, "top_p=2.0")):
        with pytest.raises(UsageError, match=words):
            row_sampling(defaults, bad, where="prompt p")


def test_a_prompt_says_what_the_row_says():
    seen: list[AgentPrompt] = []

    class Looking(loops.Several):
        async def run(self, prompt: AgentPrompt, llm: Any) -> list[AgentLoopOutput]:
            seen.append(prompt)
            return await super().run(prompt, llm)

    loops.Looking = Looking  # type: ignore[attr-defined]
    run(f"{HERE}:Looking", task("p", 2, prompt=(1,)))
    [prompt] = seen
    assert (prompt.uid, prompt.sample_index, prompt.step, prompt.validate, prompt.raw_prompt) == (
        "p",
        2,
        1,
        False,
        "5 10",
    )
    assert prompt.columns == {"data_source": "mine", "extra_info": {"seed": 3}}


def test_its_process_loads_no_torch(tmp_path: Path):
    program = (
        "import sys\n"
        "from rpcrl.agents.worker import AgentLoopWorker\n"
        "from rpcrl.config.agent import Agent\n"
        "from rpcrl.runtime import worker\n"
        "worker.set_context(worker.WorkerContext('a', 'g', 0, 1, 0, 1, 0, None))\n"
        "import rpcrl.roles.rollout, rpcrl.roles.actor, rpcrl.rewards.worker\n"
        "config = Agent(default_agent_loop='single_turn_agent')\n"
        f"folder = {str(base_checkpoint())!r}\n"
        "AgentLoopWorker(config, number=0, model_path=folder, max_prompt_length=8, max_response_length=8)\n"
        "print([name for name in ('torch', 'transformers', 'tensordict') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "[]", done.stderr
