"""The named steps over the real roles in this process: the tiny base model, one rank, no wire."""

import pytest
import torch

from rpcrl.batch.data_proto import DataProto
from rpcrl.config.load import load
from rpcrl.engines.hf_model import load_tokenizer
from rpcrl.errors import BatchError
from rpcrl.rewards.worker import RewardWorker
from rpcrl.roles.actor import ActorWorker
from rpcrl.roles.reference import ReferenceWorker
from rpcrl.roles.rollout import RolloutWorker
from rpcrl.tasks.sort_digits import base_checkpoint
from rpcrl.trainer import steps
from rpcrl.trainer.sources import open_heldout, open_prompts, open_training
from rpcrl.trainer.validation import validate
from tests.unit.roles.local_group import local_groups

N = 4


def settings(*overrides):
    return load(
        None,
        [
            "data.train_batch_size=4",
            "actor.ppo_mini_batch_size=2",
            f"rollout.n={N}",
            "trainer.n_gpus_per_node=1",
            "actor.use_kl_loss=true",
            *overrides,
        ],
        "colocate",
    )


def sampling(**changes):
    values = {"n": N, "do_sample": True, "temperature": 1.0, "top_p": 1.0, "top_k": -1, "response_length": 8, "seed": 0}
    return steps.Sampling(**{**values, **changes})


@pytest.fixture
def tokenizer():
    return load_tokenizer(base_checkpoint())


@pytest.fixture
def config():
    return settings()


@pytest.fixture
def groups(config):
    common = {"model_path": str(base_checkpoint()), "device": "cpu", "threads": 1}
    roles = config.actor_rollout_ref
    with local_groups(
        {
            "actor": (ActorWorker, (roles,), {**common, "seed": 0}),
            "rollout": (RolloutWorker, (roles,), common),
            "ref": (ReferenceWorker, (roles,), common),
            "reward": (RewardWorker, ("rpcrl.tasks.sort_digits:score",), {}),
        }
    ) as made:
        steps.update_weights(made["rollout"], version=0)
        yield made


@pytest.fixture
def prompts(config, tokenizer):
    return open_training(config, open_prompts(config), tokenizer).next_batch()


def scored(groups, prompts, tokenizer, config, **changes):
    batch = steps.generate(groups["rollout"], prompts, sampling(**changes), step=1)
    batch = steps.reward(groups["reward"], batch, tokenizer)
    batch = steps.old_log_prob(groups["actor"], batch, recompute=False)
    batch = steps.ref_log_prob(groups["ref"], batch)
    batch, _ = steps.advantage(batch, config.algorithm)
    return batch


def test_generate_gives_n_rows_a_prompt_side_by_side(groups, prompts):
    batch = steps.generate(groups["rollout"], prompts, sampling(), step=1)
    assert len(batch) == 4 * N
    assert batch.non_tensor_batch["sample_index"].tolist() == [0, 1, 2, 3] * 4
    uids = batch.non_tensor_batch["uid"].tolist()
    assert uids == [uid for uid in prompts.non_tensor_batch["uid"].tolist() for _ in range(N)]
    assert batch.meta_info == {"weight_version": 0, "temperature": 1.0}
    assert len(prompts) == 4, "the caller's batch is as it was"


def test_tokens_depend_on_the_prompt_not_on_its_neighbours(groups, prompts):
    whole = steps.generate(groups["rollout"], prompts, sampling(), step=1)
    for part in (slice(0, 1), slice(2, 4)):
        alone = steps.generate(groups["rollout"], prompts[part], sampling(), step=1)
        rows = slice(part.start * N, part.stop * N)
        assert torch.equal(alone.batch["responses"], whole[rows].batch["responses"])


def test_another_step_draws_other_tokens(groups, prompts):
    one, two = (steps.generate(groups["rollout"], prompts, sampling(), step=step) for step in (1, 2))
    assert not torch.equal(one.batch["responses"], two.batch["responses"])


def test_the_score_stands_on_the_last_token_of_each_response(groups, prompts, tokenizer):
    batch = steps.generate(groups["rollout"], prompts, sampling(), step=1)
    batch = steps.reward(groups["reward"], batch, tokenizer)
    scores = batch.batch["token_level_scores"]
    mask = batch.batch["response_mask"]
    for row in range(len(batch)):
        expected = torch.zeros(8)
        expected[int(mask[row].sum()) - 1] = batch.non_tensor_batch["score"][row]
        assert torch.equal(scores[row], expected)
        right = batch.non_tensor_batch["response_text"][row] == batch.non_tensor_batch["ground_truth"][row]
        assert batch.non_tensor_batch["score"][row] == float(right)
    assert 0 < float(scores.sum()) < len(batch), "some are right and some are not"


def test_the_text_has_what_the_policy_did_not_sample_and_the_score_stands_on_its_last_own_token(
    groups, prompts, tokenizer
):
    batch = steps.generate(groups["rollout"], prompts, sampling(), step=1)
    whole = steps.decode_responses(batch, tokenizer)
    mask = torch.zeros_like(batch.batch["response_mask"])
    mask[:, 0] = batch.batch["response_mask"][:, 0]  # all that follows came from a tool
    mask[0] = 0
    batch.batch["response_mask"] = mask
    scored = steps.reward(groups["reward"], batch, tokenizer)
    assert scored.non_tensor_batch["response_text"].tolist() == whole
    given = torch.tensor(scored.non_tensor_batch["score"].tolist())
    assert torch.equal(scored.batch["token_level_scores"][:, 0], given)
    assert not scored.batch["token_level_scores"][:, 1:].any()


class Judge:
    """A reward model's group that likes long answers."""

    class compute_rm_score:
        @staticmethod
        def submit(request):
            assert set(request.non_tensor_batch) == {"raw_prompt", "response_text"}
            lengths = [float(len(text)) for text in request.non_tensor_batch["response_text"]]
            return Answer(DataProto.from_dict(non_tensors={"rm_score": lengths}))


class Answer:
    def __init__(self, value):
        self.value = value

    def result(self):
        return self.value


def test_a_reward_model_scores_alone_or_beside_the_function(groups, prompts, tokenizer):
    batch = steps.generate(groups["rollout"], prompts, sampling(), step=1)
    function = steps.reward(groups["reward"], batch, tokenizer).non_tensor_batch
    alone = steps.reward(None, batch, tokenizer, model=Judge()).non_tensor_batch
    lengths = [float(len(text)) for text in function["response_text"]]
    assert alone["score"].tolist() == alone["rm_score"].tolist() == lengths
    both = steps.reward(groups["reward"], batch, tokenizer, model=Judge(), model_weight=0.25)
    expected = [own + 0.25 * length for own, length in zip(function["score"], lengths, strict=True)]
    assert both.non_tensor_batch["score"].tolist() == expected
    assert torch.allclose(both.batch["token_level_scores"].sum(-1), torch.tensor(expected))
    with pytest.raises(BatchError, match="neither reward workers nor a reward model"):
        steps.reward(None, batch, tokenizer)


def test_the_trainers_model_and_the_sampler_agree_on_fresh_samples(groups, prompts):
    batch = steps.generate(groups["rollout"], prompts, sampling(), step=1)
    taken = steps.old_log_prob(groups["actor"], batch, recompute=False)
    again = steps.old_log_prob(groups["actor"], batch, recompute=True)
    assert torch.equal(taken.batch["old_log_probs"], batch.batch["rollout_log_probs"])
    assert torch.allclose(taken.batch["old_log_probs"], again.batch["old_log_probs"], atol=1e-5)
    reference = steps.ref_log_prob(groups["ref"], batch)
    assert torch.allclose(reference.batch["ref_log_prob"], again.batch["old_log_probs"], atol=1e-6)


def test_advantages_are_those_of_the_groups_by_hand(groups, prompts, tokenizer, config):
    batch = scored(groups, prompts, tokenizer, config)
    scores = torch.tensor([float(value) for value in batch.non_tensor_batch["score"]]).reshape(4, N)
    expected = (scores - scores.mean(1, keepdim=True)) / (scores.std(1, keepdim=True) + 1e-6)
    spread = expected.reshape(-1, 1) * batch.batch["response_mask"]
    assert torch.allclose(batch.batch["advantages"], spread, atol=1e-5)


def test_kl_in_the_reward_lowers_it(groups, prompts, tokenizer):
    config = settings("algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl.kl_coef=0.5")
    batch = scored(groups, prompts, tokenizer, settings())
    batch.pop(batch_keys=["advantages", "returns", "token_level_rewards"])
    batch.batch["ref_log_prob"] = batch.batch["old_log_probs"] - 1.0
    after, metrics = steps.advantage(batch, config.algorithm)
    mask = batch.batch["response_mask"]
    expected = batch.batch["token_level_scores"] - 0.5 * mask
    assert torch.allclose(after.batch["token_level_rewards"], expected, atol=1e-5)
    assert metrics["actor/reward_kl_penalty"] == pytest.approx(1.0, abs=1e-5)


def test_updates_move_the_policy_and_the_rollout_follows_only_after_a_sync(groups, prompts, tokenizer, config):
    batch = scored(groups, prompts, tokenizer, config)
    before = steps.generate(groups["rollout"], prompts, sampling(do_sample=False, n=1), step=1)
    metrics = steps.update_actor(
        groups["actor"],
        batch,
        mini_batch_rows=2 * N,
        epochs=2,
        lr=5e-3,
        temperature=1.0,
        extra_columns=("ref_log_prob",),
    )
    assert metrics["actor/num_updates"] == 4
    assert metrics["actor/skipped"] == 0
    assert metrics["actor/lr"] == 5e-3
    assert metrics["actor/grad_norm"] > 0
    assert metrics["actor/kl_loss"] > 0
    unsynced = steps.generate(groups["rollout"], prompts, sampling(do_sample=False, n=1), step=1)
    assert torch.equal(unsynced.batch["rollout_log_probs"], before.batch["rollout_log_probs"])
    groups["rollout"].sleep()
    steps.update_weights(groups["rollout"], version=7)
    synced = steps.generate(groups["rollout"], prompts, sampling(do_sample=False, n=1), step=1)
    assert synced.meta_info["weight_version"] == 7
    assert not torch.equal(synced.batch["rollout_log_probs"], before.batch["rollout_log_probs"])
    trained = steps.old_log_prob(groups["actor"], synced, recompute=True)
    assert torch.allclose(trained.batch["old_log_probs"], synced.batch["rollout_log_probs"], atol=1e-5)


def test_the_driver_works_while_the_workers_train(groups, prompts, tokenizer, config):
    heard = []

    class Running:
        def __init__(self, figures):
            self.figures = figures

        def result(self):
            heard.append("asked")
            return self.figures

    class Update:
        def submit(self, request):
            heard.append("sent")
            return Running(groups["actor"].update_actor(request))

    class Actor:
        world_size = 1
        update_actor = Update()

    batch = scored(groups, prompts, tokenizer, config)
    settings = {"mini_batch_rows": 2 * N, "epochs": 1, "lr": 1e-3, "temperature": 1.0}
    settings["extra_columns"] = ("ref_log_prob",)
    metrics = steps.update_actor(Actor(), batch, **settings, meanwhile=lambda: heard.append("meanwhile"))
    assert heard == ["sent", "meanwhile", "asked"]
    assert metrics["actor/num_updates"] == 2


def test_a_reward_worker_gets_what_it_reads_and_gives_no_column_that_is_there(groups, prompts, tokenizer):
    seen = {}

    class Workers:
        def compute_reward(self, request):
            seen.update(request.non_tensor_batch)
            scored = groups["reward"].compute_reward(request)
            return DataProto.from_dict(non_tensors={**scored.non_tensor_batch, **more})

    batch = steps.generate(groups["rollout"], prompts, sampling(), step=1)
    more = {}
    steps.reward(Workers(), batch, tokenizer)
    assert set(seen) == {"data_source", "ground_truth", "extra_info", "finish_reason", "response_text"}
    more = {"uid": ["mine"] * len(batch)}
    with pytest.raises(BatchError, match="returned the field 'uid', which is a column of the batch already"):
        steps.reward(Workers(), batch, tokenizer)


def test_rows_that_do_not_divide_into_mini_batches_are_refused(groups, prompts, tokenizer, config):
    batch = scored(groups, prompts, tokenizer, config)
    with pytest.raises(BatchError, match="16 samples do not divide into mini-batches of 12"):
        steps.update_actor(groups["actor"], batch, mini_batch_rows=12, epochs=1, lr=0.0, temperature=1.0)


def test_validation_counts_right_answers_whatever_the_batch_size(groups, tokenizer):
    config = settings("data.val_max_samples=20")
    heldout = open_heldout(config, open_prompts(config), tokenizer)
    greedy = sampling(do_sample=False, n=1)

    def reward(batch):
        return steps.reward(groups["reward"], batch, tokenizer)

    one = validate(groups["rollout"], reward, heldout, greedy, step=0, num_samples=3)
    many = validate(groups["rollout"], reward, heldout, greedy, step=0, batch_size=7, num_samples=9)
    assert one.metrics == many.metrics
    assert one.accuracy == one.metrics["val-core/sort_digits/acc/mean@1"]
    assert (one.accuracy * 20) % 1 == pytest.approx(0, abs=1e-9)
    assert (len(one.samples), len(many.samples)) == (3, 9)
    assert one.samples == many.samples[:3]


def test_a_rollout_that_returns_too_few_rows_is_an_error(prompts):
    class Short:
        def generate_sequences(self, request):
            short = request[:1]
            return DataProto(short.batch, short.non_tensor_batch, {"weight_version": 0})

    with pytest.raises(BatchError, match="1 rows for 16 requests"):
        steps.generate(Short(), prompts, sampling(), step=1)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_samples_are_scored_again_at_the_temperature_they_were_drawn_at(groups, prompts, temperature):
    batch = steps.generate(groups["rollout"], prompts, sampling(temperature=temperature), step=1)
    again = steps.old_log_prob(groups["actor"], batch, recompute=True)
    torch.testing.assert_close(again.batch["old_log_probs"], batch.batch["rollout_log_probs"], atol=1e-4, rtol=1e-4)
    # the reference still has the weights that sampled
    reference = steps.ref_log_prob(groups["ref"], batch)
    torch.testing.assert_close(reference.batch["ref_log_prob"], batch.batch["rollout_log_probs"], atol=1e-4, rtol=1e-4)
