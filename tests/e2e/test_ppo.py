"""Does PPO with a critic run as a configuration: in one process, in its own group, warmed up, resumed?"""

import json
import statistics

import pytest
import tensorboardX  # noqa: F401  (sets an environment variable when it is first imported)

from rpcrl.config.load import load
from rpcrl.errors import CheckpointError, ConfigError
from rpcrl.trainer.colocate import ColocateTrainer
from rpcrl.trainer.separate import SeparateTrainer
from tests.e2e.jobs import copy_up_to, metric_lines, train, weights_of, without_times
from tests.e2e.test_async import MODES
from tests.e2e.test_separate import SEPARATE, sizes
from tests.meta.sources import ROOT

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

PPO = ("algorithm.adv_estimator=gae", "algorithm.lam=0.95")
STEPS = 4
JOB = (
    *PPO,
    f"trainer.total_training_steps={STEPS}",
    "trainer.save_freq=1",
    "critic.ppo_mini_batch_size=2",
    "critic.ppo_epochs=2",
    "actor.use_kl_loss=true",
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("ppo") / "run"
    return train(run_dir, *JOB)


def critic_files(run_dir, step=STEPS):
    manifest = json.loads((run_dir / f"checkpoints/global_step_{step}/manifest.json").read_text())
    return manifest["ranks"]["critic"]


def test_actor_critic_and_reference_share_the_processes(whole):
    roles = whole.groups.by_role()
    assert set(roles) == {"actor", "critic", "rollout", "ref", "reward"}
    assert whole.groups.critic.name == whole.groups.actor.name


def test_the_figures_have_verls_names(whole):
    first, *_, last = metric_lines(whole.run.path)
    for name in ("vf_loss", "vf_clipfrac", "vpred_mean", "grad_norm", "lr", "values/mean", "vf_explained_var"):
        assert f"critic/{name}" in last
    assert first["critic/num_updates"] == 8, "8 prompts in mini-batches of 2, twice"
    assert first["actor/num_updates"] == 2
    assert first["critic/values/max"] == first["critic/values/min"] == 0, "a fresh critic expects nothing"
    assert last["critic/values/max"] > last["critic/values/min"]
    assert last["critic/lr"] == 1e-3
    assert first["critic/grad_norm"] > 0
    assert first["timing_s/values"] > 0
    assert first["timing_per_token_ms/update_critic"] > 0
    assert last["actor/kl_loss"] > 0


def test_the_critic_is_exported_too_and_opens_in_transformers(whole):
    from safetensors.torch import load_file
    from transformers import AutoModelForTokenClassification

    last = whole.run.path / f"checkpoints/global_step_{STEPS}/critic/rank_0"
    (trained,) = (load_file(path) for path in last.glob("model-*.safetensors"))
    model, report = AutoModelForTokenClassification.from_pretrained(
        whole.run.hf_critic, dtype="float32", output_loading_info=True
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert model.num_labels == 1
    exported = dict(model.named_parameters())
    assert exported.keys() == trained.keys()
    assert all(exported[name].equal(tensor) for name, tensor in trained.items())
    assert exported["score.weight"].any(), "its head has learnt"


@pytest.mark.parametrize("step", range(1, STEPS))
def test_p98_a_resumed_run_is_the_run_that_was_never_stopped(whole, tmp_path, step):
    resumed = copy_up_to(whole.run.path, step, tmp_path / "run")
    train(resumed, *JOB, "trainer.resume=auto")
    assert weights_of(resumed) == weights_of(whole.run.path)
    assert critic_files(resumed) == critic_files(whole.run.path), "the critic's weights and optimizer too"
    assert [without_times(line) for line in metric_lines(resumed)] == [
        without_times(line) for line in metric_lines(whole.run.path)
    ]


def test_a_critic_in_its_own_group_learns_the_same(whole, tmp_path):
    apart = train(tmp_path / "run", *JOB, "critic.own_group=true", "critic.forward_micro_batch_size_per_gpu=3")
    assert apart.groups.critic.name == "critic"
    assert apart.groups.critic.world_size == 2
    for mine, theirs in zip(metric_lines(tmp_path / "run"), metric_lines(whole.run.path), strict=True):
        assert without_times(mine) == pytest.approx(without_times(theirs), rel=1e-3, abs=1e-4)


SMALL = (*PPO, "trainer.total_training_steps=2", "trainer.save_freq=2")


def test_ppo_on_two_pools_is_ppo_on_one(tmp_path):
    train(tmp_path / "one", *SMALL, "trainer.n_gpus_per_node=1")
    train(tmp_path / "two", *SMALL, *SEPARATE, *sizes(1, 1), trainer=SeparateTrainer)
    assert weights_of(tmp_path / "two") == weights_of(tmp_path / "one")
    assert critic_files(tmp_path / "two", 2) == critic_files(tmp_path / "one", 2)


@pytest.mark.parametrize("mode", MODES)
def test_ppo_trains_beside_overlapping_generation(mode, tmp_path):
    trainer, overrides = MODES[mode]
    job = train(tmp_path / "run", *overrides, *SMALL, trainer=trainer)
    first, last = metric_lines(tmp_path / "run")
    for name in ("actor/grad_norm", "critic/grad_norm", "critic/vf_loss"):
        assert first[name] > 0, name
    assert last["critic/values/max"] > last["critic/values/min"], "a fresh critic expects nothing, this one does"
    assert job.weight_version == 2


def test_before_the_warm_up_ends_only_the_critic_learns(tmp_path):
    job = (*PPO, "trainer.critic_warmup=3", "trainer.save_freq=1")
    train(tmp_path / "run", *job)
    lines = metric_lines(tmp_path / "run")
    assert [("critic/vf_loss" in line, "actor/pg_loss" in line) for line in lines] == [
        (True, False),
        (True, False),
        (True, True),
    ]
    shards = [
        {
            name: listed["sha256"]
            for name, listed in json.loads(path.read_text())["ranks"]["actor"][0]["files"].items()
            if "/model-" in name
        }
        for path in sorted((tmp_path / "run").glob("checkpoints/global_step_*/manifest.json"))
    ]
    assert shards[0] == shards[1] != shards[2]


def test_a_checkpoint_without_a_critic_is_refused_before_anything_starts(tmp_path):
    train(tmp_path / "run", "trainer.n_gpus_per_node=1", "trainer.total_training_steps=1")
    with pytest.raises(CheckpointError, match="no state of role 'critic', only of \\['actor'\\]"):
        train(
            tmp_path / "run", *PPO, "trainer.n_gpus_per_node=1", "trainer.resume=auto", "trainer.total_training_steps=2"
        )


def test_a_critics_model_that_is_not_there_is_refused_before_anything_starts(tmp_path):
    with pytest.raises(ConfigError, match=r"critic\.model\.path: .*nothing_here: no such folder on this machine"):
        train(tmp_path / "run", *PPO, f"critic.model.path={tmp_path}/nothing_here")


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_three_seeds_of_ppo_reach_the_bar(tmp_path):
    ends = []
    for seed in (0, 1, 2):
        config = load(ROOT / "examples" / "ppo.yaml", [f"trainer.seed={seed}"], "colocate")
        summary = ColocateTrainer(config, run_dir=tmp_path / f"seed{seed}").fit()
        assert summary["heldout_accuracy"]["start"] == pytest.approx(0.5, abs=0.06)
        ends.append(summary["heldout_accuracy"]["end"])
    assert min(ends) >= 0.95, ends
    assert statistics.mean(ends) >= 0.96, ends
