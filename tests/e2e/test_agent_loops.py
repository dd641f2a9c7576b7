"""Runs whose samples are made by agent loops: processes, peers, masks, several rows of a sample."""

import json

import pytest
import tensorboardX  # noqa: F401  (sets an environment variable when it is first imported)

from rpcrl.errors import ConfigError
from rpcrl.trainer.separate import SeparateTrainer
from tests.e2e.jobs import metric_lines, train, weights_of, without_times

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]

AGENT = "rollout.agent"
HERE = "tests.e2e.agent_loops"


def samples(run_dir, name):
    return [json.loads(line) for line in (run_dir / "samples" / f"{name}.jsonl").read_text().splitlines()]


def test_a_tool_and_several_rows_of_a_sample_train(tmp_path):
    job = train(
        tmp_path / "run",
        "trainer.total_training_steps=1",
        "trainer.log_train_generations=1000",
        f"{AGENT}.default_agent_loop={HERE}:SortTool",
        f"{AGENT}.num_workers=2",
        f"reward.fn={HERE}:brief",
        "data.max_response_length=12",
    )
    [line] = metric_lines(job.run.path)
    rows = samples(job.run.path, "step_1")
    assert line["agent_loop/rows"] == len(rows) > 32, "some samples have two rows"
    assert line["actor/num_updates"] == 2
    assert line["num_turns/max"] == 2
    assert line["agent_loop/failed_tasks"] == 0
    assert line["actor/grad_norm"] > 0
    summary = job.run.read_summary()
    assert summary["peak_rss_bytes"]["agent_loop"] < 160e6, "an agent-loop process loads no torch"
    asked = [row for row in rows if "=" in row["response_text"]]
    assert asked
    assert all(row["response_text"].split().index("=") for row in asked), "the tool spoke after the model"


def test_one_turn_by_agent_loops_is_the_run_without_them(tmp_path):
    job = ("trainer.total_training_steps=1", "trainer.mode=separate", "actor.entropy_coeff=0.1")
    plain = train(tmp_path / "plain", *job, trainer=SeparateTrainer)
    loops = train(tmp_path / "loops", *job, f"{AGENT}.default_agent_loop=single_turn_agent", trainer=SeparateTrainer)
    one, two = (without_times(metric_lines(run.run.path)[-1]) for run in (plain, loops))
    more = {name for name in two if name.startswith(("agent_loop/", "num_turns/"))}
    assert {name: two[name] for name in one} == pytest.approx(one, rel=1e-5, abs=1e-7)
    assert set(two) - set(one) == more
    texts = [[row["response_text"] for row in samples(run.run.path, "step_1")] for run in (plain, loops)]
    assert texts[0] == texts[1]
    assert len(weights_of(loops.run.path)) == len(weights_of(plain.run.path))


def test_loops_that_are_none_and_settings_without_one_are_refused_before_any_process(tmp_path):
    with pytest.raises(ConfigError, match=r"has no async def run"):
        train(tmp_path / "run", f"{AGENT}.default_agent_loop={HERE}:NoRun")
    assert not (tmp_path / "run").exists()


@pytest.mark.slow  # deadlines, attempts and lost workers are covered by tests/unit/agents
def test_a_sample_that_fails_ends_the_run_by_name(tmp_path):
    from rpcrl.errors import AgentTaskError

    with pytest.raises(AgentTaskError, match=r"1 of 32 samples .* failed 2 times(?s:.*)KeyError: 'a tool of a test'"):
        train(
            tmp_path / "run",
            "trainer.total_training_steps=1",
            f"{AGENT}.default_agent_loop={HERE}:OneFails",
        )


@pytest.mark.slow  # tests/unit/agents/test_manager.py has the hand-over of prompts and groups
@pytest.mark.parametrize("mode", ["colocate-async", "separate-async"])
def test_agent_loops_make_the_samples_of_the_asynchronous_modes(tmp_path, mode):
    from rpcrl.trainer.modes import trainer_of

    sizes = ("trainer.v1.separate_async.parameter_sync_step=2",) if mode == "separate-async" else ()
    job = train(
        tmp_path / "run",
        f"trainer.mode={mode}",
        *sizes,
        f"{AGENT}.default_agent_loop={HERE}:SortTool",
        f"reward.fn={HERE}:brief",
        "data.max_response_length=12",
        trainer=trainer_of(mode),
    )
    lines = metric_lines(job.run.path)
    assert [line["step"] for line in lines] == [1, 2, 3]
    ledger = [json.loads(line) for line in (job.run.path / "ledger.jsonl").read_text().splitlines()]
    consumed = [uid for line in ledger for uid in line["consumed"]]
    assert len(consumed) == len(set(consumed)) == 3 * 8, "each prompt once, however many rows it has"
    assert all(line["agent_loop/rows"] > 16 for line in lines)
    assert all(line["num_turns/max"] == 2 for line in lines)
    assert all(line["actor/num_updates"] == 2 for line in lines)
