"""The critic over the tiny base model in this process, beside the actor."""

import pytest
import torch

from rpcrl.algorithms.aggregate import BatchCounts
from rpcrl.batch.data_proto import DataProto
from rpcrl.config.run import Actor, ActorRolloutRef, Critic, CriticModel
from rpcrl.errors import CheckpointError
from rpcrl.roles.actor import ActorWorker
from rpcrl.roles.critic import CriticWorker
from rpcrl.tasks.sort_digits import base_checkpoint
from tests.unit.roles.local_group import local_groups

COMMON = {"model_path": str(base_checkpoint()), "device": "cpu", "threads": 1, "seed": 0}
OF_THE_POLICY = {"policy": ActorRolloutRef()}


def critic_class(config=None, **changes):
    return (CriticWorker, (config or Critic(),), {**COMMON, **OF_THE_POLICY, **changes})


def batch(seed, rows=4):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(3, 13, (rows, 8), generator=generator)
    mask = torch.ones(rows, 4, dtype=torch.int64)
    return DataProto.from_dict(
        tensors={
            "input_ids": tokens,
            "attention_mask": torch.ones(rows, 8, dtype=torch.int64),
            "position_ids": torch.arange(8).repeat(rows, 1),
            "responses": tokens[:, 4:].clone(),
            "response_mask": mask,
            "values": torch.zeros(rows, 4),
            "returns": torch.rand(rows, 4, generator=generator),
        },
        meta_info={**BatchCounts.of(mask).as_meta_info(), "lr": 1e-3},
    )


def values(critic, seed=0):
    return critic.compute_values(batch(seed)).batch["values"]


def test_it_learns_the_returns_and_starts_from_nothing():
    with local_groups({"critic": critic_class(Critic(cliprange_value=5.0))}) as groups:
        critic = groups["critic"]
        assert not values(critic).any()
        losses = [critic.update_critic(batch(0))[0][0]["vf_loss"] for _ in range(60)]
        assert losses[0] == pytest.approx(float(batch(0).batch["returns"].square().mean() / 2), rel=1e-5)
        assert losses[-1] < 0.2 * losses[0]
        assert float((values(critic) - batch(0).batch["returns"]).abs().mean()) < 0.2


def test_a_value_moves_no_further_than_the_range():
    with local_groups({"critic": critic_class(Critic(cliprange_value=0.05))}) as groups:
        for _ in range(60):
            figures = groups["critic"].update_critic(batch(0))[0][0]
        assert figures["vf_clipfrac"] > 0.5
        assert float(values(groups["critic"]).abs().mean()) < 0.2, "the returns' mean is 0.5"


@pytest.mark.parametrize(("own", "actors", "used"), [(None, "token-sum", 16.0), ("token-mean", "token-sum", 1.0)])
def test_the_loss_is_aggregated_as_the_actors_unless_it_says_otherwise(own, actors, used):
    with local_groups(
        {"critic": critic_class(Critic(loss_agg_mode=own), policy=ActorRolloutRef(actor=Actor(loss_agg_mode=actors)))}
    ) as groups:
        loss = groups["critic"].update_critic(batch(0))[0][0]["vf_loss"]
    assert loss == pytest.approx(used * float(batch(0).batch["returns"].square().mean() / 2), rel=1e-5)


def test_micro_batches_change_nothing():
    figures = []
    for config in (
        Critic(),
        Critic(ppo_micro_batch_size_per_gpu=1, forward_micro_batch_size_per_gpu=1),
        Critic(
            use_dynamic_bsz=True,
            ppo_max_token_len_per_gpu=20,
            forward_max_token_len_per_gpu=10,
            model=CriticModel(use_remove_padding=True, enable_gradient_checkpointing=True),
        ),
    ):
        with local_groups({"critic": critic_class(config)}) as groups:
            made = [groups["critic"].update_critic(batch(seed))[0][0] for seed in (0, 1)]
            figures.append((made, values(groups["critic"])))
    for made, found in figures[1:]:
        for mine, theirs in zip(figures[0][0], made, strict=True):
            assert theirs == pytest.approx(mine, rel=1e-4)
        torch.testing.assert_close(figures[0][1], found, atol=1e-5, rtol=1e-4)


def test_a_restored_critic_goes_on_bit_for_bit_beside_the_actors_files(tmp_path):
    actor = (ActorWorker, (ActorRolloutRef(),), COMMON)
    with local_groups({"actor": actor, "critic": critic_class()}) as groups:
        for seed in (0, 1):
            groups["critic"].update_critic(batch(seed))
        entries = {role: group.save_checkpoint(str(tmp_path)) for role, group in groups.items()}
        expected = groups["critic"].update_critic(batch(2)), values(groups["critic"])
    assert {path.name for path in tmp_path.iterdir()} == {"actor", "critic"}
    with local_groups({"critic": critic_class()}) as groups:
        assert groups["critic"].load_checkpoint(str(tmp_path), entries["critic"]) == [2]
        assert (groups["critic"].update_critic(batch(2)), True) == (expected[0], True)
        assert torch.equal(values(groups["critic"]), expected[1])
        with pytest.raises(CheckpointError, match=r"entries for critic ranks \[\], not for all of them"):
            groups["critic"].load_checkpoint(str(tmp_path), [])
