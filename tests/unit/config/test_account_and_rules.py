"""The figures of the article, and every rule with its numbers and a remedy."""

from __future__ import annotations

import json
import subprocess
import sys
from fractions import Fraction
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rpcrl.config.account import ACCOUNT_KEYS, Account, account, account_json, learners
from rpcrl.config.load import load, read
from rpcrl.config.registry import ADVANTAGES, register_advantage
from rpcrl.config.run import RunConfig
from rpcrl.errors import Violation

COLOCATE = (
    "data.train_batch_size=1024",
    "actor.ppo_mini_batch_size=256",
    "rollout.n=1",
    "rollout.tensor_model_parallel_size=2",
    "trainer.n_gpus_per_node=8",
)
SEPARATE_ASYNC = (
    "data.train_batch_size=1024",
    "actor_rollout_ref.actor.ppo_mini_batch_size=256",
    "actor_rollout_ref.rollout.n=8",
    "actor_rollout_ref.rollout.tensor_model_parallel_size=2",
    "actor_rollout_ref.rollout.nnodes=1",
    "actor_rollout_ref.rollout.n_gpus_per_node=4",
    "actor_rollout_ref.rollout.checkpoint_engine.backend=nccl",
    "trainer.v1.separate_async.parameter_sync_step=4",
    "trainer.n_gpus_per_node=8",
)


def _account(overrides: tuple[str, ...], mode: str) -> Account:
    return account(load(None, overrides, mode))


def _four(figures: Account) -> tuple[object, ...]:
    return figures.samples, figures.actor_updates, figures.replicas, figures.gpus


def _found(*overrides: str, mode: str | None = None) -> dict[str, Violation]:
    return {violation.key: violation for violation in read(None, overrides, mode).violations}


def test_the_articles_colocate_settings() -> None:
    figures = _account(COLOCATE, "colocate")
    assert _four(figures) == (1024, 4, 4, 8)
    assert figures.worker_gpu_share == Fraction(1, 3)
    assert (figures.weight_syncs.per_step, figures.weight_syncs.where) == (1, "same pool")


def test_the_articles_separate_async_settings() -> None:
    figures = _account(SEPARATE_ASYNC, "separate-async")
    assert _four(figures) == (8192, 4, 2, 12)
    assert (figures.weight_syncs.per_step, figures.weight_syncs.where) == (1, "cross pool")
    assert [(pool.name, pool.process_on_nodes) for pool in figures.pools][:2] == [
        ("global_pool", (8,)),
        ("rollout_pool", (4,)),
    ]


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_replicas_halve_when_tp_doubles(tp: int) -> None:
    for given_settings, mode in ((COLOCATE, "colocate"), (SEPARATE_ASYNC, "separate-async")):
        settings = tuple(text for text in given_settings if "tensor_model" not in text)
        once = _account((*settings, f"actor_rollout_ref.rollout.tensor_model_parallel_size={tp}"), mode).replicas
        if (once or 0) > 1:
            twice = _account(
                (*settings, f"actor_rollout_ref.rollout.tensor_model_parallel_size={2 * tp}"), mode
            ).replicas
            assert once == 2 * (twice or 0)


@pytest.mark.parametrize("n", [1, 4, 16])
def test_n_changes_the_samples_and_not_the_updates(n: int) -> None:
    figures = _account((*COLOCATE, f"rollout.n={n}"), "colocate")
    assert (figures.samples, figures.actor_updates) == (1024 * n, 4)
    assert _account((*COLOCATE, f"rollout.n={n}", "actor.ppo_epochs=3"), "colocate").actor_updates == 12


def test_the_json_of_an_account_has_its_frozen_keys() -> None:
    figures = account_json(_account(COLOCATE, "colocate"))
    assert tuple(figures) == ACCOUNT_KEYS
    assert json.loads(json.dumps(figures)) == {
        "samples": 1024,
        "actor_updates": 4,
        "replicas": 4,
        "gpus": 8,
        "worker_gpu_share": pytest.approx(1 / 3),
        "weight_syncs": 1,
        "pools": [
            {"name": "global_pool", "process_on_nodes": [8], "gpus": 8, "roles": ["actor", "rollout"]},
            {"name": "reward_workers", "process_on_nodes": [1], "gpus": 0, "roles": ["reward"]},
        ],
    }
    assert set(account_json(None).values()) == {None}


@given(
    batch=st.integers(1, 4096),
    mini=st.integers(1, 512),
    n=st.integers(1, 16),
    gpus=st.integers(1, 16),
    tp=st.integers(1, 16),
)
def test_what_passes_the_rules_comes_out_whole(batch: int, mini: int, n: int, gpus: int, tp: int) -> None:
    loaded = read(
        None,
        [
            f"data.train_batch_size={batch}",
            f"actor.ppo_mini_batch_size={mini}",
            f"rollout.n={n}",
            f"rollout.tensor_model_parallel_size={tp}",
            f"trainer.n_gpus_per_node={gpus}",
        ],
    )
    assert loaded.config is not None
    whole = batch % mini == 0 and gpus % tp == 0 and mini * n % gpus == 0
    assert (loaded.violations == ()) == whole
    figures = account(loaded.config)
    assert (figures.actor_updates is None) == (batch % mini != 0)
    assert (figures.replicas is None) == (gpus % tp != 0)


def test_what_a_remedy_says_mends_the_mistake() -> None:
    broken = _found("data.train_batch_size=1000", "actor.ppo_mini_batch_size=256")
    assert broken["data.train_batch_size"].remedies == (
        "set data.train_batch_size to 768 or 1024",
        "or set actor.ppo_mini_batch_size to 250 or 500",
    )
    for batch, mini in ((768, 256), (1024, 256), (1000, 250), (1000, 500)):
        assert not _found(f"data.train_batch_size={batch}", f"actor.ppo_mini_batch_size={mini}")


BROKEN = (
    "rollout.tensor_model_parallel_size=3",
    "trainer.n_gpus_per_node=8",
    "data.train_batch_size=1000",
    "actor.ppo_mini_batch_size=256",
)
NO_POOL = ("rollout.nnodes=0", "rollout.n_gpus_per_node=0", "rollout.checkpoint_engine.backend=naive")


def test_p96_four_broken_rules_come_together_with_numbers_and_remedies() -> None:
    found = _found(*BROKEN, *NO_POOL, mode="separate-async")
    assert list(found) == [
        "actor_rollout_ref.rollout.tensor_model_parallel_size",
        "data.train_batch_size",
        "trainer.v1.separate_async.parameter_sync_step",
        "actor_rollout_ref.rollout.nnodes",
        "actor_rollout_ref.rollout.n_gpus_per_node",
        "actor_rollout_ref.rollout.checkpoint_engine.backend",
    ]
    assert "1000 % 256 = 232" in found["data.train_batch_size"].problem
    assert "1000 != 4 x 256 = 1024" in found["trainer.v1.separate_async.parameter_sync_step"].problem
    assert "must be > 0, not 0" in found["actor_rollout_ref.rollout.nnodes"].problem
    assert "naive" in found["actor_rollout_ref.rollout.checkpoint_engine.backend"].problem
    assert all(len(violation.remedies) >= 2 for violation in found.values())
    replicas = _found(*BROKEN)["actor_rollout_ref.rollout.tensor_model_parallel_size"]
    assert "8 rollout devices % (TP 3 x DP 1 x PP 1 = 3) = 2" in replicas.problem
    assert replicas.remedies[0] == "set rollout.tensor_model_parallel_size to 2 or 4"


def test_p96_the_rules_hold_under_python_o_too() -> None:
    code = (
        "import sys; from rpcrl.config.load import read; "
        f"print(len(read(None, {[*BROKEN, *NO_POOL]!r}, 'separate-async').violations), sys.flags.optimize)"
    )
    done = subprocess.run([sys.executable, "-O", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["6", "1"]


@pytest.mark.parametrize(
    ("overrides", "mode", "key", "part"),
    [
        (
            ("trainer.n_gpus_per_node=3",),
            None,
            "actor_rollout_ref.actor.ppo_mini_batch_size",
            "64 samples % 3",
        ),
        (
            ("actor.ppo_micro_batch_size_per_gpu=5",),
            None,
            "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu",
            "32 % 5 = 2",
        ),
        (("data.train_batch_size=4",), None, "data.train_batch_size", "fewer than one mini-batch of M = 8"),
        (("rollout.nnodes=1",), "colocate", "actor_rollout_ref.rollout.nnodes", "shares the trainer's pool"),
        (
            ("rollout.val_kwargs.do_sample=true",),
            None,
            "actor_rollout_ref.rollout.val_kwargs.temperature",
            "needs a temperature > 0, not 0",
        ),
        (("rollout.val_kwargs.n=4",), None, "actor_rollout_ref.rollout.val_kwargs.n", "4 times"),
        (("actor.clip_ratio_c=1",), None, "actor_rollout_ref.actor.clip_ratio_c", "> 1, not 1"),
        (("actor.clip_ratio=1.5",), None, "actor_rollout_ref.actor.clip_ratio", "1 - 1.5"),
        (("actor.optim.betas=[0.9,1]",), None, "actor_rollout_ref.actor.optim.betas", "[0, 1)"),
        (("actor.loss_agg_mode=mean",), None, "actor_rollout_ref.actor.loss_agg_mode", "token-mean"),
        (("actor.kl_loss_type=k9",), None, "actor_rollout_ref.actor.kl_loss_type", "low_var_kl"),
        (("algorithm.adv_estimator=remax",), None, "algorithm.adv_estimator", "not in this version"),
        (
            ("actor.policy_loss.loss_mode=gspo",),
            None,
            "actor_rollout_ref.actor.policy_loss.loss_mode",
            "'gspo' is not in this version (known: vanilla, and yours as 'module:function')",
        ),
        (
            ("actor.loss_scale_factor=8",),
            None,
            "actor_rollout_ref.actor.loss_scale_factor",
            "8 would change nothing: it divides the loss of loss_agg_mode=seq-mean-token-sum-norm only, not of token",
        ),
        (
            ("algorithm.adv_estimator=rloo", "algorithm.norm_adv_by_std_in_grpo=false"),
            None,
            "algorithm.norm_adv_by_std_in_grpo",
            "norm_adv_by_std_in_grpo=false would change nothing: rloo divides by no deviation of a group",
        ),
        (
            ("algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl.type=adaptive", "algorithm.kl_ctrl.horizon=51"),
            None,
            "algorithm.kl_ctrl.horizon",
            "B x n = 256 samples may change the KL weight by 0.2 x 256 / 51 of itself",
        ),
        (("algorithm.adv_estimator=grop",), None, "algorithm.adv_estimator", "did you mean 'grpo'?"),
        (("trainer.save_freq=0",), None, "trainer.save_freq", "neither -1 nor"),
        (("rollout.top_k=0",), None, "actor_rollout_ref.rollout.top_k", "neither -1 nor"),
        (("trainer.total_training_steps=null",), None, "trainer.total_training_steps", "no end"),
        (("trainer.resume=auto",), None, "trainer.resume", "no run directory is named"),
        (("trainer.total_epochs=2",), None, "trainer.total_epochs", "without end"),
        (("algorithm.gamma=0.9",), None, "algorithm.gamma", "discounts none"),
        (("algorithm.lam=0.5",), None, "algorithm.lam", "lam=0.5 would change nothing: only gae has a lambda"),
        (
            ("rollout.calculate_log_probs=false",),
            None,
            "actor_rollout_ref.rollout.calculate_log_probs",
            "the sampler returns none",
        ),
        (("trainer.project_name=a/b",), None, "trainer.project_name", "not the name of one folder"),
        (("trainer.experiment_name=..",), None, "trainer.experiment_name", "not the name of one folder"),
        (("data.train_files=/",), None, "data.train_files", "is a folder"),
        (("trainer.device=tpu",), None, "trainer.device", "'tpu' is not one of 'cpu', 'cuda' or 'auto'"),
        (("reward.fn=score",), None, "reward.fn", "names no function"),
        (("data.train_files=a.csv",), None, "data.train_files", "neither a .jsonl, .json, .parquet file nor"),
        (
            ("rollout.checkpoint_engine.backend=nixl",),
            None,
            "actor_rollout_ref.rollout.checkpoint_engine.backend",
            "not in this version",
        ),
    ],
)
def test_one_broken_rule_gives_one_violation(overrides: tuple[str, ...], mode: str | None, key: str, part: str) -> None:
    found = _found(*overrides, mode=mode)
    assert list(found) == [key]
    assert part in found[key].problem
    assert found[key].remedies


def test_a_mistyped_choice_is_answered_with_a_value_and_only_a_near_one_with_a_guess() -> None:
    far, near = _found("trainer.device=tpu")["trainer.device"], _found("trainer.device=cudda")["trainer.device"]
    assert not any("did you mean" in remedy for remedy in far.remedies)
    assert far.remedies[0].startswith("write e.g. trainer.device=cpu (")
    assert near.remedies[0] == "did you mean trainer.device=cuda?"
    assert _found("rollout.n=many")["actor_rollout_ref.rollout.n"].remedies == (
        "write e.g. rollout.n=8 (Samples per prompt)",
    )
    assert not _found("rollout.calculate_log_probs=false", "algorithm.recompute_old_log_prob=true")


def test_each_estimator_takes_the_settings_that_it_reads() -> None:
    for name, settings in (
        ("reinforce_plus_plus", ("algorithm.gamma=0.9",)),
        ("grpo", ("algorithm.norm_adv_by_std_in_grpo=false", "actor.loss_agg_mode=seq-mean-token-sum-norm")),
        ("dr_grpo", ("actor.loss_agg_mode=seq-mean-token-sum-norm", "actor.loss_scale_factor=100")),
        ("my_module:my_estimator", ("algorithm.gamma=0.9", "algorithm.lam=0.5")),
        ("rloo", ("algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl.type=adaptive")),
    ):
        assert not _found(f"algorithm.adv_estimator={name}", *settings), name


def test_a_name_of_verls_is_answered_with_what_is_nearest_to_it_here() -> None:
    remedies = {
        name: _found(f"algorithm.adv_estimator={name}")["algorithm.adv_estimator"].remedies[0].rpartition("=")[2]
        for name in ("rloo_vectorized", "gpg", "reinforce_plus", "nothing like it")
    }
    assert remedies == {
        "rloo_vectorized": "rloo",
        "gpg": "grpo",
        "reinforce_plus": "reinforce_plus_plus",
        "nothing like it": "grpo",
    }


def test_a_registered_name_is_known_to_the_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ADVANTAGES, "_functions", dict(ADVANTAGES._functions))
    key = "algorithm.adv_estimator"
    assert key in _found(f"{key}=registered_in_a_test")
    register_advantage("registered_in_a_test")(test_a_registered_name_is_known_to_the_rules)
    assert not _found(f"{key}=registered_in_a_test")


def test_the_reward_model_has_its_own_pool_in_the_separate_modes() -> None:
    enabled = "reward.reward_model.enable=true"
    own = (enabled, "reward.reward_model.enable_resource_pool=true", "reward.reward_model.nnodes=1")
    assert list(_found(*SEPARATE_ASYNC, enabled, mode="separate-async")) == ["reward.reward_model.enable_resource_pool"]
    assert list(_found(*SEPARATE_ASYNC, *own, mode="separate-async")) == ["reward.reward_model.n_gpus_per_node"]
    sized = (*SEPARATE_ASYNC, *own, "reward.reward_model.n_gpus_per_node=2")
    assert not _found(*sized, mode="separate-async")
    assert _account(sized, "separate-async").gpus == 14
    assert not _found(enabled, mode="colocate")


def test_modes_and_backends_that_fit_pass() -> None:
    for mode, backend in product(("separate", "separate-async"), ("broadcast", "nccl")):
        settings = (*SEPARATE_ASYNC, f"actor_rollout_ref.rollout.checkpoint_engine.backend={backend}")
        assert not _found(*settings, mode=mode)
    free = (*SEPARATE_ASYNC, "data.train_batch_size=512")
    assert not _found(*free, mode="separate")
    assert list(_found(*free, mode="separate-async")) == ["trainer.v1.separate_async.parameter_sync_step"]


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (("actor.use_dynamic_bsz=true", "actor.ppo_max_token_len_per_gpu=15"), "actor.ppo_max_token_len_per_gpu"),
        (
            ("actor.use_kl_loss=true", "ref.log_prob_use_dynamic_bsz=true", "ref.log_prob_max_token_len_per_gpu=15"),
            "ref.log_prob_max_token_len_per_gpu",
        ),
        (
            (
                "algorithm.recompute_old_log_prob=true",
                "actor.use_dynamic_bsz=true",
                "rollout.log_prob_max_token_len_per_gpu=15",
            ),
            "rollout.log_prob_max_token_len_per_gpu",
        ),
        (
            ("algorithm.adv_estimator=gae", "critic.use_dynamic_bsz=true", "critic.forward_max_token_len_per_gpu=15"),
            "critic.forward_max_token_len_per_gpu",
        ),
    ],
)
def test_the_longest_sample_fits_into_a_pass(overrides: tuple[str, ...], key: str) -> None:
    found = _found(*overrides)
    full = key if key.startswith("critic.") else f"actor_rollout_ref.{key}"
    assert list(found) == [full]
    assert "8 + 8 = 16" in found[full].problem
    assert found[full].remedies == (f"set {key} to 16 or more",)
    assert not _found(*(override.replace("=15", "=16") for override in overrides))
    assert not _found(*(override for override in overrides if "dynamic" not in override))


PPO = ("algorithm.adv_estimator=gae",)


@pytest.mark.parametrize(
    ("overrides", "key", "part"),
    [
        (("critic.enable=false",), "critic.enable", "gae needs the values of a critic"),
        (("critic.loss_agg_mode=mean",), "critic.loss_agg_mode", "'mean' is not one of"),
        (("critic.optim.betas=[0.9,1.0]",), "critic.optim.betas", "must be in [0, 1)"),
        (("critic.ppo_mini_batch_size=5",), "data.train_batch_size", "B % M = 32 % 5 = 2: 32 prompts do not split"),
        (
            ("critic.ppo_mini_batch_size=1", "rollout.n=1"),
            "critic.ppo_mini_batch_size",
            "M x n = 1 x 1 = 1 samples % 2 data-parallel ranks",
        ),
        (
            ("critic.ppo_micro_batch_size_per_gpu=5",),
            "critic.ppo_micro_batch_size_per_gpu",
            "8 x 8 / 2 = 32 samples, and 32 % 5 = 2",
        ),
        (
            ("critic.own_group=true", "trainer.max_colocate_count=1"),
            "critic.own_group",
            "2 groups on each device, and trainer.max_colocate_count=1 allows 1",
        ),
        (
            ("trainer.critic_warmup=101",),
            "trainer.critic_warmup",
            "the actor is trained from step 101 on, and the run ends with step 100",
        ),
    ],
)
def test_one_broken_rule_of_a_critic_gives_one_violation(overrides: tuple[str, ...], key: str, part: str) -> None:
    found = _found(*PPO, *overrides)
    assert list(found) == [key]
    assert part in found[key].problem
    assert found[key].remedies


@pytest.mark.parametrize(
    ("overrides", "key", "problem", "remedies"),
    [
        (
            ("actor.use_kl_loss=true", "ref.own_group=true", "trainer.max_colocate_count=1"),
            "actor_rollout_ref.ref.own_group",
            "actor and ref are 2 groups on each device, and trainer.max_colocate_count=1 allows 1",
            ("set trainer.max_colocate_count=2", "or set ref.own_group=false"),
        ),
        (
            (
                *PPO,
                "algorithm.use_kl_in_reward=true",
                "ref.own_group=true",
                "critic.own_group=true",
                "trainer.max_colocate_count=2",
            ),
            "critic.own_group",
            "actor, ref and critic are 3 groups on each device, and trainer.max_colocate_count=2 allows 2",
            ("set trainer.max_colocate_count=3", "or set ref.own_group=false critic.own_group=false"),
        ),
        (
            ("ref.own_group=true",),
            "actor_rollout_ref.ref.own_group",
            "true would change nothing: neither actor.use_kl_loss nor algorithm.use_kl_in_reward asks for a reference",
            ("set actor.use_kl_loss=true (or algorithm.use_kl_in_reward=true)", "or set ref.own_group=false"),
        ),
    ],
)
def test_groups_beside_the_actors_have_a_role_and_fit(
    overrides: tuple[str, ...], key: str, problem: str, remedies: tuple[str, ...]
) -> None:
    found = _found(*overrides)
    assert list(found) == [key]
    assert found[key].problem == problem
    assert found[key].remedies == remedies
    assert not _found(*(text for text in overrides if "colocate" not in text), "actor.use_kl_loss=true")


def test_nothing_can_be_set_for_a_critic_that_is_not_there() -> None:
    assert list(_found("critic.optim.lr=1e-4", "trainer.critic_warmup=5")) == [
        "critic.optim.lr",
        "trainer.critic_warmup",
    ]
    problem = _found("critic.optim.lr=1e-4")["critic.optim.lr"].problem
    assert problem == ("0.0001 would change nothing: the run has no critic, algorithm.adv_estimator=grpo needs none")
    assert not _found("critic.enable=true", "critic.optim.lr=1e-4")
    assert not _found(*PPO, "critic.optim.lr=1e-4", "critic.optim.warmup_style=cosine", "trainer.critic_warmup=100")


def test_a_critic_has_the_actors_sizes_unless_it_has_its_own() -> None:
    shared = learners(load(None, [*PPO, "actor.ppo_epochs=3"]))
    assert [(learner.name, learner.mini_batch, learner.epochs) for learner in shared] == [
        ("actor", 8, 3),
        ("critic", 8, 3),
    ]
    own = learners(load(None, [*PPO, "critic.ppo_mini_batch_size=16", "critic.ppo_epochs=2"]))
    assert [(learner.mini_batch, learner.epochs) for learner in own] == [(8, 1), (16, 2)]
    assert account(load(None, PPO)).pools[0].roles == ("actor", "rollout", "critic")


def test_a_reference_policy_stands_in_its_pool() -> None:
    plain, with_kl = RunConfig(), load(None, ["actor.use_kl_loss=true"])
    assert "ref" not in account(plain).pools[0].roles
    assert "ref" in account(with_kl).pools[0].roles
