"""Actor, rollout and reference over the tiny base model in this process."""

import pytest
import torch

from rpcrl.algorithms.aggregate import BatchCounts
from rpcrl.batch.data_proto import DataProto
from rpcrl.config.run import Actor, ActorRolloutRef, Rollout
from rpcrl.errors import BatchError, CheckpointError, UsageError
from rpcrl.roles.actor import ActorWorker, actor_loss
from rpcrl.roles.rollout import RolloutWorker
from rpcrl.tasks.sort_digits import base_checkpoint
from tests.unit.roles.local_group import local_groups

COMMON = {"model_path": str(base_checkpoint()), "device": "cpu", "threads": 1}
CONFIG = ActorRolloutRef()


def actor_class(config=CONFIG):
    return (ActorWorker, (config,), {**COMMON, "seed": 0})


def rollout_class(config=CONFIG):
    return (RolloutWorker, (config,), COMMON)


def mini_batch(seed, rows=4):
    generator = torch.Generator().manual_seed(seed)
    mask = torch.ones(rows, 4, dtype=torch.int64)
    tokens = torch.randint(3, 13, (rows, 8), generator=generator)
    return DataProto.from_dict(
        tensors={
            "input_ids": tokens,
            "attention_mask": torch.ones(rows, 8, dtype=torch.int64),
            "position_ids": torch.arange(8).repeat(rows, 1),
            "responses": tokens[:, 4:].clone(),
            "response_mask": mask,
            "old_log_probs": -torch.rand(rows, 4, generator=generator),
            "advantages": torch.randn(rows, 4, generator=generator),
        },
        meta_info={**BatchCounts.of(mask).as_meta_info(), "lr": 1e-3},
    )


def train(actor, seeds):
    return [actor.update_actor(mini_batch(seed))[0][0] for seed in seeds]


def weights(actor):
    return {name: tensor.clone() for bucket in actor.role.weight_buckets(2**20) for name, tensor in bucket}


def test_the_loss_takes_every_setting():
    loss = actor_loss(
        Actor(
            clip_ratio=0.3,
            clip_ratio_low=0.1,
            clip_ratio_high=0.4,
            clip_ratio_c=5.0,
            loss_agg_mode="token-sum",
            entropy_coeff=0.01,
            use_kl_loss=True,
            kl_loss_coef=0.5,
            kl_loss_type="abs",
        )
    )
    assert (loss.settings.low, loss.settings.high, loss.settings.clip_ratio_c) == (0.1, 0.4, 5.0)
    assert loss.settings.loss_agg_mode == "token-sum"
    assert (loss.entropy_coeff, loss.use_kl_loss, loss.kl_loss_coef, loss.kl_loss_type) == (0.01, True, 0.5, "abs")
    assert actor_loss(Actor(clip_ratio=0.3)).settings.high == 0.3


def test_one_call_makes_the_optimizer_steps_that_a_call_for_each_mini_batch_makes():
    rows = mini_batch(1, rows=8)
    with local_groups({"actor": actor_class()}) as groups:
        apart = [
            groups["actor"].update_actor(DataProto(part.batch, {}, {"lr": 1e-3}))[0][0]
            for part in [*rows.split(4), *rows.split(4)]
        ]
        expected = weights(groups["actor"])
    request = DataProto(rows.batch, {}, {"lr": 1e-3, "num_mini_batches": 2, "ppo_epochs": 2})
    with local_groups({"actor": actor_class()}) as groups:
        (together,) = groups["actor"].update_actor(request)
        assert together == apart
        for name, tensor in weights(groups["actor"]).items():
            assert torch.equal(tensor, expected[name]), name
        request.meta_info["num_mini_batches"] = 3
        with pytest.raises(BatchError, match="rank 0 got 8 rows, which do not make 3 equal mini-batches"):
            groups["actor"].update_actor(request)


def test_micro_batches_do_not_change_the_update():
    figures = []
    for size in (None, 1, 3):
        config = ActorRolloutRef(actor=Actor(ppo_micro_batch_size_per_gpu=size))
        with local_groups({"actor": actor_class(config)}) as groups:
            figures.append(train(groups["actor"], [1, 2]))
    for other in figures[1:]:
        for mine, theirs in zip(figures[0], other, strict=True):
            assert theirs["loss"] == pytest.approx(mine["loss"], rel=1e-5)
            assert theirs["grad_norm"] == pytest.approx(mine["grad_norm"], rel=1e-4)


def test_a_restored_actor_goes_on_bit_for_bit(tmp_path):
    with local_groups({"actor": actor_class()}) as groups:
        train(groups["actor"], [1, 2])
        torch.rand(3)
        (entry,) = groups["actor"].save_checkpoint(str(tmp_path))
        expected = train(groups["actor"], [3, 4]), weights(groups["actor"]), torch.rand(2)
    with local_groups({"actor": actor_class()}) as groups:
        assert groups["actor"].load_checkpoint(str(tmp_path), [entry]) == [2]
        restored = train(groups["actor"], [3, 4]), weights(groups["actor"]), torch.rand(2)
    assert restored[0] == expected[0]
    assert all(torch.equal(restored[1][name], tensor) for name, tensor in expected[1].items())
    assert torch.equal(restored[2], expected[2]), "the random state is part of it"
    files = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()}
    assert files == set(entry["files"])
    assert all(name.endswith(".safetensors") for name in files)


def test_a_damaged_shard_changes_nothing(tmp_path):
    with local_groups({"actor": actor_class()}) as groups:
        (entry,) = groups["actor"].save_checkpoint(str(tmp_path))
        shard = next(path for path in tmp_path.rglob("model*.safetensors"))
        content = bytearray(shard.read_bytes())
        content[-1] ^= 1
        shard.write_bytes(content)
        train(groups["actor"], [1])
        before = weights(groups["actor"])
        with pytest.raises(CheckpointError, match="has SHA-256"):
            groups["actor"].load_checkpoint(str(tmp_path), [entry])
        assert all(torch.equal(tensor, before[name]) for name, tensor in weights(groups["actor"]).items())


def test_a_rank_without_an_entry_is_refused(tmp_path):
    with (
        local_groups({"actor": actor_class()}) as groups,
        pytest.raises(CheckpointError, match=r"entries for actor ranks \[1\]"),
    ):
        groups["actor"].load_checkpoint(str(tmp_path), [{"rank": 1}])


def test_the_rollout_sleeps_and_wakes_with_the_actors_weights():
    with local_groups({"actor": actor_class(), "rollout": rollout_class()}) as groups:
        rollout = groups["rollout"]
        assert rollout.update_weights(3) == [3]
        freed = rollout.sleep()[0]
        assert freed > 400_000, "108,352 parameters of 4 bytes"
        assert rollout.sleep() == [0]
        assert rollout.update_weights(4) == [4]
        assert rollout.sleep()[0] >= freed


def test_small_buckets_carry_the_same_weights():
    config = ActorRolloutRef(rollout=Rollout(checkpoint_engine={"update_weights_bucket_megabytes": 1}))
    with local_groups({"actor": actor_class(config), "rollout": rollout_class(config)}) as groups:
        assert groups["rollout"].update_weights(1) == [1]


def test_a_rollout_without_an_actor_beside_it_says_so():
    with local_groups({"rollout": rollout_class()}) as groups, pytest.raises(UsageError, match="no role 'actor'"):
        groups["rollout"].update_weights(1)


def test_a_rollout_samples_nothing_before_it_has_weights():
    prompts = DataProto.from_dict(
        tensors={"input_ids": torch.tensor([[13, 5, 4, 15]]), "attention_mask": torch.ones(1, 4, dtype=torch.int64)},
        non_tensors={"uid": ["a"], "sample_index": [0]},
        meta_info={"do_sample": False, "response_length": 4},
    )
    with local_groups({"rollout": rollout_class()}) as groups, pytest.raises(UsageError, match="hold nothing"):
        groups["rollout"].generate_sequences(prompts)


def test_an_engine_that_is_not_here_is_refused():
    config = ActorRolloutRef(rollout=Rollout(name="sglang"))
    with pytest.raises(UsageError, match=r"rollout\.name='sglang'"), local_groups({"rollout": rollout_class(config)}):
        pass
