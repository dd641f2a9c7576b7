"""A run of a few steps on two workers: does everything that a run promises lie in its directory?"""

import json

import pytest
import tensorboardX  # noqa: F401  (sets an environment variable when it is first imported)
import torch
import yaml

from rpcrl.errors import ConfigError
from rpcrl.trainer.observer import Observer
from rpcrl.trainer.run_directory import SUMMARY_KEYS
from tests.e2e.jobs import configure, metric_lines, train

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(180)]

METRICS = (
    "actor/entropy",
    "actor/grad_norm",
    "actor/loss",
    "actor/lr",
    "actor/pg_clipfrac",
    "actor/pg_loss",
    "actor/ppo_kl",
    "critic/advantages/mean",
    "critic/returns/max",
    "critic/rewards/mean",
    "critic/score/mean",
    "heldout/accuracy",
    "perf/throughput",
    "perf/time_per_step",
    "perf/total_num_tokens",
    "prompt_length/mean",
    "response_length/clip_ratio",
    "response_length/mean",
    "timing_per_token_ms/gen",
    "timing_s/adv",
    "timing_s/gen",
    "timing_s/reward",
    "timing_s/step",
    "timing_s/testing",
    "timing_s/update_actor",
    "timing_s/update_weights",
    "training/global_step",
    "val-core/sort_digits/acc/mean@1",
)


class Recorder(Observer):
    def __init__(self):
        self.heard = []

    def on_start(self, info):
        self.heard.append(("start", dict(info.roles)))

    def on_step(self, step, metrics):
        self.heard.append(("step", step))

    def on_validate(self, step, metrics):
        self.heard.append(("validate", step))

    def on_end(self, summary):
        self.heard.append(("end", summary["steps"]))


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    recorder = Recorder()
    run_dir = tmp_path_factory.mktemp("short") / "run"
    trainer = train(run_dir, "trainer.val_before_train=true", "trainer.test_freq=2", observer=recorder)
    return trainer, recorder


def test_p42_a_machine_without_gpus_trains(job):
    trainer, _ = job
    assert trainer.config.trainer.device == "cpu"
    assert [line["step"] for line in metric_lines(trainer.run.path)] == [0, 1, 2, 3]


def test_each_line_has_the_figures_that_dashboards_read(job):
    trainer, _ = job
    last = metric_lines(trainer.run.path)[-1]
    assert [name for name in METRICS if name not in last] == []
    assert last["training/global_step"] == 3
    assert last["actor/grad_norm"] > 0
    assert last["prompt_length/max"] <= 8
    assert 0 <= last["heldout/accuracy"] <= 1


def test_two_updates_a_step_and_one_sync(job):
    trainer, _ = job
    steps = metric_lines(trainer.run.path)[1:]
    assert [line["actor/num_updates"] for line in steps] == [2, 2, 2]
    assert trainer.run.read_summary()["weight_syncs"] == 3


def test_the_summary(job):
    trainer, _ = job
    summary = trainer.run.read_summary()
    assert list(summary) == [*SUMMARY_KEYS, "rollout_engine"]
    assert summary["rollout_engine"]["engine"] == "torch"
    assert (summary["mode"], summary["steps"]) == ("colocate", 3)
    assert summary["tokens"] == sum(line["perf/total_num_tokens"] for line in metric_lines(trainer.run.path)[1:])
    lines = metric_lines(trainer.run.path)
    assert summary["heldout_accuracy"] == {
        "start": lines[0]["heldout/accuracy"],
        "end": lines[-1]["heldout/accuracy"],
    }
    assert {"gen", "reward", "adv", "update_actor", "update_weights", "testing"} <= set(summary["phases_s"])
    assert summary["wall_s"] > sum(summary["phases_s"].values())
    assert set(summary["peak_rss_bytes"]) == {"driver", "actor", "rollout", "reward"}
    assert summary["peak_rss_bytes"]["actor"] > 100e6
    assert summary["peak_rss_bytes"]["reward"] < 120e6, "a reward process loads no torch"


def test_the_observer_hears_everything_in_order(job):
    _, recorder = job
    assert recorder.heard == [
        ("start", {"actor": 2, "rollout": 2, "reward": 1}),
        ("validate", 0),
        ("step", 1),
        ("validate", 2),
        ("step", 2),
        ("validate", 3),
        ("step", 3),
        ("end", 3),
    ]


def test_the_resolved_configuration_can_be_run_again(job):
    trainer, _ = job
    tree = yaml.safe_load(trainer.run.config.read_text())
    assert tree["data"]["train_batch_size"] == 8
    from rpcrl.config.load import load

    assert load(trainer.run.config, [], None) == trainer.config


def test_samples_can_be_read(job):
    trainer, _ = job
    rows = [json.loads(line) for line in (trainer.run.samples / "step_2.jsonl").read_text().splitlines()]
    assert 0 < len(rows) <= 8
    assert {"response_text", "score", "ground_truth", "uid"} <= set(rows[0])
    assert (trainer.run.samples / "validation_2.jsonl").is_file()


def test_events_and_logs(job):
    trainer, _ = job
    assert list(trainer.run.tensorboard.glob("events.out.tfevents.*"))
    assert len([path for path in trainer.run.logs.rglob("*") if path.is_file()]) >= 3


def test_the_final_model_loads_in_transformers_and_is_the_one_that_was_measured(job):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from rpcrl.tasks.sort_digits import heldout_prompts
    from rpcrl.tasks.sort_digits.remake_base import greedy_answers

    trainer, _ = job
    model = AutoModelForCausalLM.from_pretrained(trainer.run.hf, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(trainer.run.hf)
    prompts = heldout_prompts()[:32]
    answers = greedy_answers(model, tokenizer, prompts)
    right = sum(answer == prompt.answer for prompt, answer in zip(prompts, answers, strict=True)) / len(prompts)
    assert right == metric_lines(trainer.run.path)[-1]["heldout/accuracy"]


def test_a_directory_that_is_in_use_is_refused_before_anything_starts(job):
    trainer, _ = job
    before = trainer.run.metrics.read_bytes()
    with pytest.raises(ConfigError, match="already holds"):
        train(trainer.run.path)
    assert trainer.run.metrics.read_bytes() == before


def test_a_finished_run_says_so_and_starts_nothing(job):
    class Ear(Observer):
        said = ""

        def on_status(self, text):
            self.said += text

    trainer, _ = job
    ear = Ear()
    again = train(trainer.run.path, "trainer.resume=auto", observer=ear)
    assert "this run is finished: step 3 of 3" in ear.said
    assert not hasattr(again, "groups")


def test_n_of_one_makes_as_many_updates(tmp_path):
    train(tmp_path / "run", "rollout.n=1", "trainer.total_training_steps=1", "algorithm.norm_adv_by_std_in_grpo=false")
    assert metric_lines(tmp_path / "run")[0]["actor/num_updates"] == 2


def test_kl_in_reward_and_loss_recomputed_log_probs_and_micro_batches(tmp_path):
    job = train(
        tmp_path / "run",
        "trainer.total_training_steps=2",
        "actor.use_kl_loss=true",
        "algorithm.use_kl_in_reward=true",
        "algorithm.recompute_old_log_prob=true",
        "actor.ppo_micro_batch_size_per_gpu=4",
        "actor.ppo_epochs=2",
        "rollout.free_cache_engine=false",
    )
    first, second = metric_lines(tmp_path / "run")
    assert job.groups.reference is not None
    assert first["actor/num_updates"] == 4
    assert first["actor/reward_kl_penalty"] == pytest.approx(0, abs=1e-6), "the reference is where the policy began"
    assert second["actor/kl_loss"] > 1e-6
    assert first["training/rollout_probs_diff_max"] < 1e-4
    assert first["timing_s/ref"] > 0


def test_generate_only_writes_every_sample_and_trains_nothing(tmp_path):
    from rpcrl.trainer.colocate import ColocateTrainer

    config = configure(
        "data.train_batch_size=8", "actor.ppo_mini_batch_size=8", "rollout.n=2", "trainer.total_training_steps=2"
    )
    job = ColocateTrainer(config, run_dir=tmp_path / "run")
    folder = job.generate()
    rows = [json.loads(line) for line in (folder / "step_2.jsonl").read_text().splitlines()]
    assert len(rows) == 16
    assert not job.run.hf.exists()
    assert job.run.read_summary()["mode"] == "generate-only"


def test_eval_only_measures_the_base(tmp_path):
    from rpcrl.trainer.colocate import ColocateTrainer

    job = ColocateTrainer(configure(), run_dir=tmp_path / "run")
    metrics = job.evaluate()
    assert 0.44 <= metrics["heldout/accuracy"] <= 0.56
    assert job.run.read_summary()["heldout_accuracy"]["start"] == metrics["heldout/accuracy"]
