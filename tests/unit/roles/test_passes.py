"""Which setting decides what a pass takes, and how a model is computed?"""

from rpcrl.config.load import load
from rpcrl.roles.passes import actor_pass, critic_passes, engine_options, log_prob_pass, ref_pass


def passes(*overrides):
    config = load(None, ["algorithm.adv_estimator=gae", "actor.use_kl_loss=true", *overrides], "colocate")
    roles = config.actor_rollout_ref
    training, forward = critic_passes(config.critic, roles.actor)
    return {
        "actor": actor_pass(roles.actor),
        "log_prob": log_prob_pass(roles.rollout, roles.actor),
        "ref": ref_pass(roles.ref, roles.actor),
        "critic": training,
        "values": forward,
    }


def by(rows=None, tokens=None):
    return {"micro_batch_size": rows, "max_tokens": tokens}


def test_by_default_a_pass_takes_all_rows():
    assert all(one == by() for one in passes().values())


def test_the_actors_tokens_are_everyones_unless_they_have_their_own():
    common = (
        "actor.use_dynamic_bsz=true",
        "actor.ppo_max_token_len_per_gpu=64",
        "ref.log_prob_micro_batch_size_per_gpu=4",
    )
    assert all(one == by(tokens=64) for one in passes(*common).values())
    own = passes(
        *common,
        "rollout.log_prob_max_token_len_per_gpu=128",
        "ref.log_prob_use_dynamic_bsz=false",
        "critic.ppo_max_token_len_per_gpu=32",
    )
    assert own == {
        "actor": by(tokens=64),
        "log_prob": by(tokens=128),
        "ref": by(rows=4),
        "critic": by(tokens=32),
        "values": by(tokens=32),
    }
    critic = passes(*common, "critic.use_dynamic_bsz=false", "critic.forward_micro_batch_size_per_gpu=8")
    assert (critic["critic"], critic["values"]) == (by(), by(rows=8))
    assert passes(*common, "critic.forward_max_token_len_per_gpu=99")["values"] == by(tokens=99)


def test_an_engines_number_types():
    def options(*overrides):
        return engine_options(load(None, list(overrides), "colocate").actor_rollout_ref)

    assert options() == {"dtype": "float32", "strategy": "auto", "reduce_dtype": "float32"}
    mixed = "actor.fsdp_config.mixed_precision"
    assert options(f"{mixed}.param_dtype=bf16", f"{mixed}.reduce_dtype=bf16", "actor.strategy=ddp") == {
        "dtype": "bfloat16",
        "strategy": "ddp",
        "reduce_dtype": "bfloat16",
    }
    assert options("model.dtype=bfloat16", f"{mixed}.param_dtype=fp32")["dtype"] == "float32"
