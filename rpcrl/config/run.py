"""Which settings does a run have, in which unit, and what holds when nobody sets them?

The tree carries verl's names; the defaults are those of the default job (GRPO on the sort-by-word task, two
CPU workers). Every section is frozen. Types and simple ranges stand here; rules over several fields are in
``rpcrl.config.rules``. Loads no torch.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from rpcrl.config.agent import Agent
from rpcrl.config.reward import Reward, RewardModel
from rpcrl.config.rollout_settings import CheckpointEngine, Rollout, ValKwargs
from rpcrl.config.section import Betas, Count, CountOrZero, NotNegative, Positive, Section, Text
from rpcrl.config.section import setting as _setting

__all__ = [
    "BUILT_IN_TASK",
    "GSM8K_PREFIX",
    "PROMPT_SUFFIXES",
    "Actor",
    "ActorRolloutRef",
    "Agent",
    "Algorithm",
    "CheckpointEngine",
    "Critic",
    "CriticModel",
    "CriticOptim",
    "Data",
    "FsdpConfig",
    "KlCtrl",
    "MixedPrecision",
    "Model",
    "Optim",
    "PolicyLoss",
    "Ref",
    "Reward",
    "RewardModel",
    "Rollout",
    "RolloutCorrection",
    "RunConfig",
    "Sampler",
    "Section",
    "Trainer",
    "ValKwargs",
]

BUILT_IN_TASK = "sort_digits"
PROMPT_SUFFIXES = (".jsonl", ".json", ".parquet")
GSM8K_PREFIX = "gsm8k:"
"""Before the path of a file of GSM8K's own records."""


class Data(Section):
    """Where prompts come from, and how many a step takes."""

    train_files: Text | None = _setting(
        BUILT_IN_TASK,
        "Training prompts: a .jsonl, .json or .parquet path, gsm8k:PATH, or 'sort_digits' for the built-in task; null "
        "means that too",
    )
    val_files: Text | None = _setting(
        None,
        "Held-out prompts: a .jsonl, .json or .parquet path or gsm8k:PATH; null takes the task's own held-out set, if "
        "it has one",
    )
    train_batch_size: Count = _setting(32, "B, prompts per step")
    val_batch_size: Count | None = _setting(None, "Held-out prompts per generation call; null takes all at once")
    max_prompt_length: Count = _setting(8, "Longest prompt, tokens")
    max_response_length: Count = _setting(8, "Longest response, tokens")
    filter_overlong_prompts: bool = _setting(False, "Leave out prompts over max_prompt_length; false refuses them")
    prompt_key: Text = _setting("prompt", "Field of a row that holds the prompt")
    shuffle: bool = _setting(True, "Draw training prompts in a seeded random order")
    seed: int | None = _setting(None, "Seed of the prompt order; null takes trainer.seed")
    train_max_samples: int = _setting(-1, "Use only so many training prompts; -1 uses all")
    val_max_samples: int = _setting(-1, "Use only so many held-out prompts; -1 uses all")


class Model(Section):
    """The model that is trained and sampled from."""

    path: Text | None = _setting(None, "Folder of a Hugging Face checkpoint; null takes the shipped base checkpoint")
    dtype: Literal["float32", "bfloat16", "float64"] = _setting("float32", "Number type of the weights")
    use_remove_padding: bool = _setting(
        False, "Compute rows side by side without their padding; a model that cannot is refused at the start"
    )
    enable_gradient_checkpointing: bool = _setting(
        False, "Keep only each layer's input for the backward pass and compute the rest again"
    )


class Optim(Section):
    """AdamW and its learning-rate schedule."""

    lr: NotNegative = _setting(5e-4, "Peak learning rate")
    lr_warmup_steps: CountOrZero = _setting(5, "Linear warm-up, trainer steps")
    lr_scheduler_type: Literal["linear", "constant", "cosine"] = _setting(
        "linear", "After the warm-up: linear or cosine decay, to 0 just after the last step, or constant"
    )
    betas: Betas = _setting((0.9, 0.99), "AdamW's two decay rates, each in [0, 1)")
    weight_decay: NotNegative = _setting(0.0, "AdamW weight decay")


class PolicyLoss(Section):
    """Which loss the policy is trained by."""

    loss_mode: Text = _setting(
        "vanilla", "PPO's clipped loss, or one of yours: its name, file.py:function or module:function"
    )


def _strategy(value: object) -> object:
    """Take verl's name of FSDP's first version for the second, which is what runs."""
    return "fsdp2" if value == "fsdp" else value


class MixedPrecision(Section):
    """Number types of a trained model's computation; weights and optimizer state are float32 whatever they are."""

    param_dtype: Literal["fp32", "bf16"] | None = _setting(
        None, "What the trained models compute in; null takes model.dtype"
    )
    reduce_dtype: Literal["fp32", "bf16"] = _setting("fp32", "What gradients are added up over the ranks in")


class FsdpConfig(Section):
    """How a trained model is spread over the ranks."""

    mixed_precision: MixedPrecision = MixedPrecision()


class Actor(Section):
    """The policy's training: mini-batches, loss, optimizer."""

    ppo_mini_batch_size: Count = _setting(8, "M, prompts per optimizer step (samples: M x rollout.n)")
    ppo_micro_batch_size_per_gpu: Count | None = _setting(
        None, "Samples per forward/backward pass of one rank; null takes the rank's whole mini-batch"
    )
    use_dynamic_bsz: bool = _setting(
        False, "Cut mini-batches by tokens, at most ppo_max_token_len_per_gpu a pass, instead of by samples"
    )
    ppo_max_token_len_per_gpu: Count = _setting(
        16384, "With use_dynamic_bsz: tokens per forward/backward pass of one rank"
    )
    strategy: Annotated[Literal["auto", "fsdp2", "ddp"], BeforeValidator(_strategy)] = _setting(
        "auto",
        "Spread trained models over the ranks (fsdp2), or keep a whole copy on each (ddp); auto keeps copies of models "
        "of up to 50 million parameters; the critic too",
    )
    fsdp_config: FsdpConfig = FsdpConfig()
    ppo_epochs: Count = _setting(1, "Passes over a step's samples")
    clip_ratio: Positive = _setting(0.2, "PPO clip range, both sides")
    clip_ratio_low: Positive | None = _setting(None, "Clip range below 1; null takes clip_ratio")
    clip_ratio_high: Positive | None = _setting(None, "Clip range above 1; null takes clip_ratio")
    clip_ratio_c: float = _setting(3.0, "Dual-clip bound of the ratio for negative advantages, above 1")
    policy_loss: PolicyLoss = PolicyLoss()
    loss_agg_mode: Text = _setting("token-mean", "How token losses become one number")
    loss_scale_factor: Positive | None = _setting(
        None, "Divisor of loss_agg_mode=seq-mean-token-sum-norm; null takes max_response_length"
    )
    entropy_coeff: NotNegative = _setting(0.0, "Weight of the entropy bonus")
    use_kl_loss: bool = _setting(False, "Add the KL to the reference policy to the loss")
    kl_loss_coef: NotNegative = _setting(0.001, "Weight of that KL")
    kl_loss_type: Text = _setting("low_var_kl", "Estimator of that KL")
    grad_clip: Positive = _setting(1.0, "Largest gradient norm of an optimizer step")
    optim: Optim = Optim()


class Ref(Section):
    """The frozen reference policy."""

    own_group: bool = _setting(
        False, "Give the reference processes of its own beside the actor's on the trainer's pool; false shares them"
    )
    log_prob_micro_batch_size_per_gpu: Count | None = _setting(
        None, "Samples per forward pass of one rank; null takes all of the rank's"
    )
    log_prob_use_dynamic_bsz: bool | None = _setting(None, "Cut by tokens; null takes actor.use_dynamic_bsz")
    log_prob_max_token_len_per_gpu: Count | None = _setting(
        None, "Tokens per forward pass of one rank; null takes actor.ppo_max_token_len_per_gpu"
    )


class ActorRolloutRef(Section):
    """Model, actor, reference and rollout; in keys this prefix may be left out (``rollout.n=4``)."""

    model: Model = Model()
    actor: Actor = Actor()
    ref: Ref = Ref()
    rollout: Rollout = Rollout()


class CriticModel(Section):
    """The model that the critic is made of."""

    path: Text | None = _setting(None, "Folder of a Hugging Face checkpoint; null takes the policy's; dtype as model's")
    use_remove_padding: bool = _setting(False, "Compute rows side by side without their padding")
    enable_gradient_checkpointing: bool = _setting(
        False, "Keep only each layer's input for the backward pass and compute the rest again"
    )


class CriticOptim(Optim):
    """The critic's AdamW and its schedule."""

    lr: NotNegative = _setting(1e-3, "Peak learning rate")
    lr_warmup_steps: CountOrZero = _setting(0, "Linear warm-up, trainer steps")
    lr_scheduler_type: Literal["linear", "constant", "cosine"] = _setting(
        "constant", "After the warm-up: linear or cosine decay, to 0 just after the last step, or constant"
    )


class Critic(Section):
    """The value function of PPO; there is one with algorithm.adv_estimator=gae."""

    enable: bool | None = _setting(None, "Train a critic; null does where the estimator is gae")
    own_group: bool = _setting(
        False, "Give the critic processes of its own beside the actor's on the trainer's pool; false shares them"
    )
    model: CriticModel = CriticModel()
    ppo_mini_batch_size: Count | None = _setting(None, "Prompts per optimizer step; null takes the actor's")
    ppo_micro_batch_size_per_gpu: Count | None = _setting(
        None, "Samples per forward/backward pass of one rank; null takes the rank's whole mini-batch"
    )
    forward_micro_batch_size_per_gpu: Count | None = _setting(
        None, "Samples per forward pass of one rank when values are computed; null takes all of the rank's"
    )
    use_dynamic_bsz: bool | None = _setting(None, "Cut mini-batches by tokens; null takes the actor's")
    ppo_max_token_len_per_gpu: Count | None = _setting(
        None, "Tokens per forward/backward pass of one rank; null takes the actor's"
    )
    forward_max_token_len_per_gpu: Count | None = _setting(
        None, "Tokens per forward pass when values are computed; null takes ppo_max_token_len_per_gpu"
    )
    ppo_epochs: Count | None = _setting(None, "Passes over a step's samples; null takes the actor's")
    cliprange_value: Positive = _setting(0.5, "How far a value may move from what it was when sampling")
    loss_agg_mode: Text | None = _setting(None, "How token losses become one number; null takes the actor's")
    grad_clip: Positive = _setting(1.0, "Largest gradient norm of an optimizer step")
    optim: CriticOptim = CriticOptim()


class KlCtrl(Section):
    """Weight of the KL that is taken off the reward."""

    type: Literal["fixed", "adaptive"] = _setting("fixed", "Keep the weight, or move it with the KL")
    kl_coef: NotNegative = _setting(0.001, "Weight of the KL when use_kl_in_reward is true; at the start, if adaptive")
    horizon: Positive = _setting(10_000.0, "Adaptive: samples after which the weight has moved by up to a fifth")
    target_kl: Positive = _setting(0.1, "Adaptive: the mean KL that the weight aims at")


class RolloutCorrection(Section):
    """How the loss is corrected for samples of another policy than the one whose log-probs are recomputed."""

    rollout_is: Literal["token", "sequence"] | None = _setting(
        None, "Weigh tokens by the ratio of recomputed and sampler's probability: each by its own, or by its sequence's"
    )
    rollout_is_threshold: float | Text = _setting(
        2.0, "Weights above it are cut off (a number), or those outside become 0 (lo_hi, e.g. 0.5_2.0)"
    )
    rollout_is_batch_normalize: bool = _setting(False, "Divide the weights of a batch by their mean")


class FilterGroups(Section):
    """DAPO: groups whose samples all have the same value are replaced by other prompts."""

    enable: bool = _setting(False, "Replace groups whose samples do not differ")
    metric: Text = _setting("score", "In which column they must differ: score, or one that the reward function returns")
    max_num_gen_batches: CountOrZero = _setting(
        10, "Most batches of prompts sampled for the batch of one step; then the run ends with an error; 0: no bound"
    )


class Algorithm(Section):
    """From rewards to advantages."""

    adv_estimator: Text = _setting(
        "grpo",
        "gae, grpo, dr_grpo, rloo, reinforce_plus_plus, reinforce_plus_plus_baseline, or one of yours: its name, "
        "file.py:function or module:function",
    )
    norm_adv_by_std_in_grpo: bool = _setting(True, "Divide a group's advantages by its standard deviation")
    use_kl_in_reward: bool = _setting(False, "Take the KL to the reference policy off the reward")
    kl_penalty: Text = _setting("kl", "Estimator of that KL")
    kl_ctrl: KlCtrl = KlCtrl()
    gamma: Annotated[float, Field(ge=0, le=1)] = _setting(1.0, "Discount per token")
    lam: Annotated[float, Field(ge=0, le=1)] = _setting(1.0, "GAE's lambda")
    recompute_old_log_prob: bool = _setting(
        False, "Recompute the old log-probs with the trainer's model instead of taking the sampler's"
    )
    rollout_correction: RolloutCorrection = RolloutCorrection()
    filter_groups: FilterGroups = FilterGroups()


class Sampler(Section):
    """Async modes: which samples are trained on, and how long one is waited for."""

    max_off_policy_strategy: Literal["wait", "drop"] = _setting(
        "wait", "Keep max_staleness by waiting for samples that are due, or by dropping those that come too late"
    )
    task_timeout_s: Positive = _setting(
        600.0, "How long the samples of one prompt are waited for, s; then they are asked for again, once"
    )


class ColocateAsync(Section):
    """Settings of mode colocate-async."""

    num_warmup_batches: CountOrZero = _setting(
        1, "Batches submitted before the first step: so many are in flight beside the one that is trained on"
    )


class SeparateAsync(Section):
    """Settings of mode separate-async."""

    num_warmup_batches: CountOrZero = _setting(
        1, "Batches submitted before the first step: so many are in flight beside the one that is trained on"
    )
    parameter_sync_step: Count = _setting(4, "Optimizer mini-batches between two weight syncs")


class V1(Section):
    """Settings that belong to the asynchronous modes."""

    sampler: Sampler = Sampler()
    colocate_async: ColocateAsync = ColocateAsync()
    separate_async: SeparateAsync = SeparateAsync()


class Trainer(Section):
    """The run: mode, devices, length, seeds, files."""

    mode: Literal["colocate", "colocate-async", "separate", "separate-async"] = _setting(
        "colocate", "What overlaps with what, and who shares devices"
    )
    device: Literal["cpu", "cuda", "auto"] = _setting(
        "cpu", "cpu counts virtual devices; cuda takes GPUs; auto takes cuda where there are enough, else cpu"
    )
    nnodes: Count = _setting(1, "Nodes of the trainer's pool")
    n_gpus_per_node: Count = _setting(
        2, "Devices (worker processes) per node of the trainer's pool; 1 if unset in separate"
    )
    max_colocate_count: Count = _setting(3, "Worker groups that may share a device; a worker counts for 1/this of it")
    total_training_steps: Count | None = _setting(
        100, "Length of the run, steps; null ends after total_epochs, and giving only total_epochs means null"
    )
    total_epochs: Count | None = _setting(None, "Length of the run, passes over the training prompts")
    balance_batch: bool = _setting(
        False, "Deal the rows of each batch to the ranks so that all have about the same number of tokens"
    )
    critic_warmup: CountOrZero = _setting(
        0, "First step that updates the actor; the steps before it train the critic alone (0 and 1: there are none)"
    )
    save_freq: int = _setting(-1, "Steps between checkpoints; -1 writes only the final one")
    test_freq: int = _setting(25, "Steps between evaluations on held-out prompts; -1 evaluates at the ends only")
    val_before_train: bool = _setting(True, "Evaluate on held-out prompts before the first step")
    seed: CountOrZero = _setting(0, "Seed of prompts, sampling and initialisation")
    default_local_dir: Text | None = _setting(
        None,
        "Run directory; null makes runs/<project>/<experiment>-<time> (also: trainer.run_dir, --run-dir)",
    )
    project_name: Text = _setting("rpcrl", "First part of the run directory's name")
    experiment_name: Text = _setting("run", "Second part of the run directory's name")
    resume: Text = _setting("disable", "disable, auto (the run directory's last checkpoint), or a checkpoint's path")
    log_val_generations: CountOrZero = _setting(4, "Held-out prompts whose responses are written out each evaluation")
    log_train_generations: CountOrZero = _setting(4, "Training samples that are written out each step")
    max_actor_ckpt_to_keep: Count | None = _setting(None, "Newest checkpoints that stay; null keeps all")
    threads_per_worker: Count = _setting(1, "CPU threads of one worker process")
    max_staleness: CountOrZero = _setting(1, "Async modes: largest age of a sample, weight versions")
    v1: V1 = V1()

    @property
    def run_dir(self) -> str | None:
        """The run directory under its short name."""
        return self.default_local_dir


class RunConfig(Section):
    """The whole configuration of one run; ``rpcrl.config.load.load`` makes checked ones."""

    data: Data = Data()
    actor_rollout_ref: ActorRolloutRef = ActorRolloutRef()
    critic: Critic = Critic()
    algorithm: Algorithm = Algorithm()
    reward: Reward = Reward()
    trainer: Trainer = Trainer()
