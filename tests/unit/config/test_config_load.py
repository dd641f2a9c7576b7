"""Keys, spellings and values: what a user writes becomes a setting, or a message that names the setting."""

from __future__ import annotations

from pathlib import Path

import pytest

from rpcrl.config import keys
from rpcrl.config.load import load, read, to_yaml
from rpcrl.config.run import RunConfig
from rpcrl.errors import ConfigError, Violation


def _violations(*overrides: str, mode: str | None = None) -> tuple[Violation, ...]:
    return read(None, overrides, mode).violations


def _only(*overrides: str, mode: str | None = None) -> Violation:
    (violation,) = _violations(*overrides, mode=mode)
    return violation


def test_nothing_given_is_the_default_job() -> None:
    config = load(None)
    assert config == RunConfig()
    assert (config.data.train_batch_size, config.actor_rollout_ref.actor.ppo_mini_batch_size) == (32, 8)
    assert (config.actor_rollout_ref.rollout.n, config.actor_rollout_ref.actor.optim.lr) == (8, 5e-4)
    assert (config.trainer.total_training_steps, config.trainer.n_gpus_per_node) == (100, 2)


def test_every_setting_says_what_it_is_and_its_default() -> None:
    for setting in keys.settings().values():
        assert "(default: " in setting.description, setting.key
        assert len(setting.description.partition("(default")[0]) > 8, setting.key


def test_short_and_full_spellings_mean_the_same() -> None:
    short = load(
        None,
        ["rollout.n=4", "actor.clip_ratio=0.3", "model.path=m", "ref.log_prob_micro_batch_size_per_gpu=2"],
    )
    full = load(
        None,
        [
            "actor_rollout_ref.rollout.n=4",
            "actor_rollout_ref.actor.clip_ratio=0.3",
            "actor_rollout_ref.model.path=m",
            "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=2",
        ],
    )
    assert short == full
    assert short.actor_rollout_ref.rollout.n == 4


def test_short_spellings_dotted_keys_and_sections_work_in_yaml(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(
        "rollout: {n: 4}\nactor.optim.lr: 1e-3\nactor_rollout_ref:\n  actor:\n    ppo_mini_batch_size: 4\n"
        "trainer:\n  experiment_name: off\ndata:\n"
    )
    config = load(path)
    assert config.actor_rollout_ref.rollout.n == 4
    assert config.actor_rollout_ref.actor.optim.lr == 1e-3
    assert config.actor_rollout_ref.actor.ppo_mini_batch_size == 4
    assert config.trainer.experiment_name == "off"
    assert config.data == RunConfig().data


def test_overrides_win_over_the_file_and_later_ones_over_earlier_ones(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("actor_rollout_ref: {rollout: {n: 2}}\ntrainer: {mode: separate}\n")
    assert load(path, ["rollout.n=4", "rollout.n=8"], "colocate").actor_rollout_ref.rollout.n == 8


def test_values_are_yaml_scalars_and_text_settings_take_them_literally() -> None:
    config = load(
        None,
        [
            "actor.optim.lr=1e-6",
            "actor.optim.betas=[0.8, 0.95]",
            "data.shuffle=False",
            "data.val_files=null",
            "trainer.experiment_name=1e5",
            "trainer.project_name=@home: x",
            "reward.reward_kwargs={scale: 2, word: no}",
            "reward.fn=my_file.py:score",
        ],
    )
    assert config.actor_rollout_ref.actor.optim.lr == 1e-6
    assert config.actor_rollout_ref.actor.optim.betas == (0.8, 0.95)
    assert config.data.shuffle is False
    assert config.data.val_files is None
    assert config.trainer.experiment_name == "1e5"
    assert config.trainer.project_name == "@home: x"
    assert config.reward.reward_kwargs == {"scale": 2, "word": "no"}


def test_the_resolved_configuration_reads_back_equal(tmp_path: Path) -> None:
    config = load(
        None,
        [
            "rollout.n=4",
            "actor.optim.lr=1e-6",
            "reward.reward_kwargs={a: 1}",
            "trainer.total_epochs=2",
            "data.train_files=a.jsonl",
        ],
    )
    path = tmp_path / "config.yaml"
    path.write_text(to_yaml(config))
    assert load(path) == config


def test_giving_only_epochs_takes_the_step_count_away() -> None:
    assert load(None, ["trainer.total_epochs=2", "data.train_files=a.jsonl"]).trainer.total_training_steps is None
    both = load(None, ["trainer.total_epochs=2", "trainer.total_training_steps=7"]).trainer
    assert (both.total_epochs, both.total_training_steps) == (2, 7)


@pytest.mark.parametrize(
    ("verl", "mode"),
    [("sync", "colocate"), ("colocate_async", "colocate-async"), ("colocate-async", "colocate-async")],
)
def test_verls_trainer_mode_is_ours(verl: str, mode: str) -> None:
    assert load(None, [f"trainer.v1.trainer_mode={verl}"]).trainer.mode == mode


@pytest.mark.parametrize("prefix", ["reward.", ""])
def test_verls_reward_function_is_ours(prefix: str) -> None:
    path = f"{prefix}custom_reward_function.path=my.py"
    assert load(None, [path]).reward.fn == "my.py:compute_score"
    assert load(None, [path, f"{prefix}custom_reward_function.name=score"]).reward.fn == "my.py:score"
    assert load(None, [path, "reward.fn=my.py:compute_score"]).reward.fn == "my.py:compute_score"
    assert "given twice" in _only(path, "reward.fn=other.py:score").problem
    assert _only(f"{prefix}custom_reward_function.name=score").key.endswith("custom_reward_function.name")


def test_verls_resume_is_ours() -> None:
    assert load(None, ["trainer.resume_mode=auto", "trainer.run_dir=runs/a"]).trainer.resume == "auto"
    both = ["trainer.resume_mode=resume_path", "trainer.resume_from_path=ckpt/global_step_3"]
    assert load(None, both).trainer.resume == "ckpt/global_step_3"
    assert "needs the path" in _only("trainer.resume_mode=resume_path").problem


def test_one_setting_under_two_spellings_with_two_values_is_refused() -> None:
    violation = _only("rollout.n=4", "actor_rollout_ref.rollout.n=8")
    assert violation.key == "actor_rollout_ref.rollout.n"
    assert "rollout.n=4" in violation.problem
    assert "actor_rollout_ref.rollout.n=8" in violation.problem
    assert violation.remedies
    assert _violations("rollout.n=4", "actor_rollout_ref.rollout.n=4") == ()
    assert _only("trainer.mode=separate", mode="colocate").key == "trainer.mode"


def test_two_equal_keys_in_one_file_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("trainer:\n  seed: 1\n  seed: 2\n")
    (violation,) = read(path).violations
    assert "'seed' stands twice" in violation.problem
    assert "line 3" in violation.problem


@pytest.mark.parametrize("text", ["- 1\n", "a: [\n"])
def test_a_file_that_is_no_mapping_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"run\.yaml"):
        load(path)
    with pytest.raises(ConfigError, match="No such file"):
        load(tmp_path / "none.yaml")


@pytest.mark.parametrize("spelling", ["rollout.nn", "+rollout.nn", "++rollout.nn"])
def test_p95_a_misspelt_key_names_the_nearest_one(spelling: str) -> None:
    violation = _only(f"{spelling}=4")
    assert violation.key == "actor_rollout_ref.rollout.nn"
    assert violation.problem == "unknown key; did you mean rollout.n?"
    assert violation.remedies == ("write rollout.n=4",)


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        (
            "actor_rollout_ref.rollout.tensor_paralel_size",
            "actor_rollout_ref.rollout.tensor_model_parallel_size",
        ),
        ("trainer.total_training_step", "trainer.total_training_steps"),
        ("data.ppo_mini_batch_size", "actor.ppo_mini_batch_size"),
        ("trainer.lr", "actor.optim.lr"),
        ("trainer.v1.separate_async.paramter_sync_step", "trainer.v1.separate_async.parameter_sync_step"),
        ("trainr.seed", "trainer.seed"),
        ("custom_reward_function.pth", "custom_reward_function.path"),
    ],
)
def test_p95_the_nearest_key_is_the_one_that_is_meant(given: str, meant: str) -> None:
    assert f"did you mean {meant}?" in _only(f"{given}=1").problem


def test_p95_a_misspelt_key_in_a_file_is_refused_too(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("actor_rollout_ref:\n  rollout:\n    nn: 4\n")
    (violation,) = read(path).violations
    assert violation.key == "actor_rollout_ref.rollout.nn"


def test_a_known_verl_key_without_a_setting_has_its_own_message() -> None:
    for override, part in (
        ("critic.strategy=megatron", "as the actor is"),
        ("actor.fsdp_config.model_dtype=bf16", "float32"),
        ("critic.model.lora_rank=8", "LoRA"),
        ("ray_kwargs.ray_init.num_cpus=4", "no Ray"),
        ("rollout.gpu_memory_utilization=0.6", "vLLM"),
        ("trainer.logger=[console,wandb]", "TensorBoard"),
        ("actor.ppo_micro_batch_size=8", "number"),
    ):
        violation = _only(override)
        assert part in violation.problem
        assert "unknown key" not in violation.problem
        assert violation.remedies
    assert read(None, ["ray_kwargs.ray_init.num_cpus=4"]).config == RunConfig()
    assert read(None, ["rollout.nn=4"]).config is None


def test_a_verl_key_that_asks_for_what_rpcrl_does_is_accepted() -> None:
    pasted = [
        "trainer.critic_warmup=0",
        "trainer.logger=['console','tensorboard']",
        "actor.fsdp_config.param_offload=False",
        "actor_rollout_ref.model.use_remove_padding=False",
        "data.truncation='error'",
        "actor.strategy=fsdp",
    ]
    assert load(None, pasted) == load(None, ["actor.strategy=fsdp2"])


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("rollout.n=four", "'four' is not a whole number"),
        ("rollout.n=true", "True is not a whole number"),
        ("rollout.n=1.5", "1.5 is not a whole number"),
        ("rollout.n=0", "0 must be >= 1"),
        ("data.shuffle=yes", "'yes' is not true or false"),
        ("actor.optim.lr=-1", "-1 must be >= 0"),
        ("actor.clip_ratio=0", "0 must be > 0"),
        ("actor.optim.lr=.inf", "inf is not a finite number"),
        ("rollout.top_p=2", "2 must be <= 1"),
        ("actor.optim.betas=[0.9]", "[0.9] is not a list of two numbers"),
        ("rollout.name=vlm", "is not one of 'torch', 'vllm' or 'sglang'"),
        ("data.max_prompt_length=0", "0 must be >= 1"),
        ("rollout.n=null", "None is not a whole number"),
        ("rollout=4", "is a section with"),
        ("rollout.n", "is not a key=value override"),
        ("~rollout.n=1", "is not a key=value override"),
        ("rollout.n=[1", "is not YAML"),
    ],
)
def test_a_value_of_the_wrong_kind_says_what_it_is_not(override: str, problem: str) -> None:
    violation = _only(override)
    assert problem in violation.problem
    assert violation.remedies


def test_a_near_choice_is_named() -> None:
    assert _only("rollout.name=vlm").remedies[0] == "did you mean rollout.name=vllm?"


def test_all_kinds_of_mistakes_come_in_one_error() -> None:
    overrides = [
        "rollout.nn=4",
        "actor.optim.lr=x",
        "data.train_batch_size=1000",
        "actor.ppo_mini_batch_size=256",
        "distillation.a=1",
    ]
    with pytest.raises(ConfigError) as caught:
        load(None, overrides)
    assert [violation.key for violation in caught.value.violations] == [
        "actor_rollout_ref.rollout.nn",
        "actor_rollout_ref.actor.optim.lr",
        "distillation.a",
        "data.train_batch_size",
    ]
    assert "4 mistakes; nothing was started" in str(caught.value)


def test_a_rule_over_a_setting_that_could_not_be_read_is_silent() -> None:
    assert [v.key for v in _violations("data.train_batch_size=x", "actor.ppo_mini_batch_size=7", "rollout.n=2")] == [
        "data.train_batch_size"
    ]


def test_the_configuration_is_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        load(None).trainer.seed = 3  # type: ignore[misc]


def test_options_win_over_the_file_and_must_agree_with_the_overrides(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("trainer: {seed: 1, run_dir: a}")
    flags = {"trainer.seed": ("--seed", 5), "trainer.default_local_dir": ("--run-dir", "b")}
    trainer = load(path, flags=flags).trainer
    assert (trainer.seed, trainer.run_dir) == (5, "b")
    (violation,) = read(None, ["trainer.seed=4"], flags=flags).violations
    assert "trainer.seed=4 and --seed=5" in violation.problem
    (violation,) = read(None, mode="collocate").violations
    assert violation.remedies[0] == "did you mean trainer.mode=colocate?"
