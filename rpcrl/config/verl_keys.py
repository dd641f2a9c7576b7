"""What becomes of a verl key that is no setting here? It is renamed, or refused with its own message.

Nothing is silently ignored: a key in ``UNSUPPORTED`` is accepted only with the values that mean what
rpcrl does anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["RENAMED", "TRAINER_MODES", "UNSUPPORTED", "Unsupported", "converted", "is_known", "unsupported"]

TRAINER_MODES = {"sync": "colocate", "colocate_async": "colocate-async", "separate_async": "separate-async"}
"""verl's ``trainer.v1.trainer_mode`` → our ``trainer.mode``."""

RENAMED: Mapping[str, str] = {
    "custom_reward_function.path": "reward.custom_reward_function.path",
    "custom_reward_function.name": "reward.custom_reward_function.name",
    "custom_reward_function.reward_kwargs": "reward.reward_kwargs",
    "reward.custom_reward_function.reward_kwargs": "reward.reward_kwargs",
    "reward_model.enable": "reward.reward_model.enable",
    "reward_model.enable_resource_pool": "reward.reward_model.enable_resource_pool",
    "reward_model.nnodes": "reward.reward_model.nnodes",
    "reward_model.n_gpus_per_node": "reward.reward_model.n_gpus_per_node",
    "reward_model.micro_batch_size_per_gpu": "reward.reward_model.micro_batch_size_per_gpu",
    "reward_model.model.path": "reward.reward_model.model_path",
    "actor_rollout_ref.actor.optim.warmup_style": "actor_rollout_ref.actor.optim.lr_scheduler_type",
    "actor_rollout_ref.actor.optim.clip_grad": "actor_rollout_ref.actor.grad_clip",
    "critic.optim.warmup_style": "critic.optim.lr_scheduler_type",
    "critic.optim.clip_grad": "critic.grad_clip",
    "actor_rollout_ref.rollout.prompt_length": "data.max_prompt_length",
    "actor_rollout_ref.rollout.response_length": "data.max_response_length",
    "trainer.run_dir": "trainer.default_local_dir",
    "trainer.v1.trainer_mode": "trainer.mode",
    "trainer.v1.sampler.max_off_policy_threshold": "trainer.max_staleness",
    "trainer.resume_mode": "trainer.resume",
    "trainer.resume_from_path": "trainer.resume",
    "algorithm.rollout_correction.bypass_mode": "algorithm.recompute_old_log_prob",
}
"""verl's (or an older verl's) key → ours; both in full spelling."""


def _mode(value: Any) -> Any:
    return TRAINER_MODES.get(value, value) if isinstance(value, str) else value


def _versions(value: Any) -> Any:
    """Return verl's age in versions: it counts a sample of the trainer's own weights as 1."""
    return value - 1 if isinstance(value, int) and not isinstance(value, bool) else value


def _negated(value: Any) -> Any:
    return not value if isinstance(value, bool) else value


_CONVERTED: Mapping[str, Callable[[Any], Any]] = {
    "trainer.v1.trainer_mode": _mode,
    "algorithm.rollout_correction.bypass_mode": _negated,
    "trainer.v1.sampler.max_off_policy_threshold": _versions,
}


def converted(key: str, value: Any) -> Any:
    """Return the value of a verl key as our setting of the same meaning takes it."""
    return _CONVERTED.get(key, lambda same: same)(value)


@dataclass(frozen=True)
class Unsupported:
    """A verl key that has no setting here."""

    why: str
    remedy: str = "leave the key out"
    same_as_ours: tuple[Any, ...] = ()
    """Values that ask for what rpcrl does anyway; they are accepted."""


_RAY = Unsupported("rpcrl starts its own processes; there is no Ray to configure")
_VLLM = Unsupported(
    "it belongs to a vLLM or SGLang rollout; the engine of this version is torch, which has no such setting",
    "leave the key out, and set rollout.name=torch",
)
_MICRO = Unsupported(
    "a micro-batch size over all devices depends on their number",
    "use the key with _per_gpu at its end",
    (None,),
)
_OFF = Unsupported("not in this version", "leave the key out, or turn it off", (False, None))
_ACTOR = "actor_rollout_ref.actor"
_ROLLOUT = "actor_rollout_ref.rollout"
_MODEL = "actor_rollout_ref.model"
_REF = "actor_rollout_ref.ref"

_OF_THE_RUN: Mapping[str, Unsupported] = {
    "ray_kwargs": _RAY,
    "ray_init": _RAY,
    "trainer.ray_wait_register_center_timeout": _RAY,
    "transfer_queue": Unsupported("rpcrl moves rows between workers itself; there is no transfer queue"),
    "distillation": Unsupported("distillation is not in this version"),
    "global_profiler": Unsupported(
        "profilers of other systems are not started; metrics.jsonl has the time of each phase"
    ),
    "skip": Unsupported("skipping phases is not in this version"),
    "actor_rollout_ref.hybrid_engine": Unsupported(
        "trainer.mode decides who shares devices", "leave the key out, and choose --mode", (True,)
    ),
    "actor_rollout_ref.nccl_timeout": Unsupported("timeouts of collectives are not set from here in this version"),
    f"{_MODEL}.enable_activation_offload": _OFF,
    f"{_MODEL}.use_shm": _OFF,
    f"{_MODEL}.use_liger": _OFF,
    f"{_MODEL}.use_fused_kernels": _OFF,
    f"{_MODEL}.trust_remote_code": Unsupported("code that comes with a checkpoint is never run", same_as_ours=(False,)),
    f"{_MODEL}.lora_rank": Unsupported(
        "LoRA is not in this version", "leave the key out; all weights are trained", (0,)
    ),
    f"{_MODEL}.lora_alpha": Unsupported("LoRA is not in this version", "leave the key out; all weights are trained"),
    f"{_MODEL}.target_modules": Unsupported(
        "LoRA is not in this version", "leave the key out; all weights are trained"
    ),
    f"{_MODEL}.external_lib": Unsupported("no further library is imported for a model", same_as_ours=(None,)),
    f"{_MODEL}.custom_chat_template": Unsupported("the tokenizer's own chat template is used", same_as_ours=(None,)),
    f"{_ACTOR}.ppo_micro_batch_size": _MICRO,
    f"{_ACTOR}.ulysses_sequence_parallel_size": Unsupported(
        "sequence parallelism is not in this version", same_as_ours=(1,)
    ),
    f"{_ACTOR}.use_torch_compile": _OFF,
    f"{_ACTOR}.entropy_checkpointing": _OFF,
    f"{_ACTOR}.entropy_from_logits_with_chunking": _OFF,
    f"{_ACTOR}.shuffle": Unsupported("mini-batches are taken in order", same_as_ours=(False,)),
    f"{_ACTOR}.policy_loss": Unsupported("it belongs to a policy loss that is not in this version"),
    f"{_ACTOR}.checkpoint": Unsupported(
        "a checkpoint always holds model, optimizer and run state, and a Hugging Face export"
    ),
    f"{_ACTOR}.fsdp_config": Unsupported("FSDP2 shards over all ranks; only mixed_precision can be set"),
    f"{_ACTOR}.fsdp_config.model_dtype": Unsupported(
        "weights and optimizer state are float32", same_as_ours=("fp32", "float32")
    ),
    f"{_ACTOR}.fsdp_config.mixed_precision.buffer_dtype": Unsupported(
        "buffers keep the type that the model gives them", same_as_ours=("fp32", None)
    ),
    f"{_ACTOR}.fsdp_config.param_offload": _OFF,
    f"{_ACTOR}.fsdp_config.optimizer_offload": _OFF,
    f"{_ACTOR}.fsdp_config.fsdp_size": Unsupported("FSDP2 shards over all ranks", same_as_ours=(-1,)),
    f"{_ACTOR}.megatron": Unsupported("the training engine is FSDP2"),
    f"{_ACTOR}.profiler": _OFF,
    f"{_ACTOR}.optim.lr_warmup_steps_ratio": Unsupported(
        "the warm-up is counted in steps", "set actor.optim.lr_warmup_steps", (0, 0.0)
    ),
    f"{_ACTOR}.optim.total_training_steps": Unsupported(
        "the schedule ends with the run", "set trainer.total_training_steps", (-1,)
    ),
    f"{_ACTOR}.optim.min_lr_ratio": Unsupported("the schedule decays to 0", same_as_ours=(0, 0.0, None)),
    f"{_ACTOR}.optim.num_cycles": Unsupported("there is no cosine schedule in this version", same_as_ours=(None,)),
    f"{_ACTOR}.optim.optimizer": Unsupported("the optimizer is AdamW", same_as_ours=("AdamW",)),
    f"{_REF}.fsdp_config": Unsupported("FSDP2 shards over all ranks, in the model's dtype; there is nothing to set"),
    f"{_REF}.fsdp_config.param_offload": _OFF,
    f"{_REF}.log_prob_micro_batch_size": _MICRO,
    f"{_REF}.strategy": Unsupported("the training engine is FSDP2", "leave the key out", ("fsdp", "fsdp2")),
    f"{_REF}.ulysses_sequence_parallel_size": Unsupported(
        "sequence parallelism is not in this version", same_as_ours=(1,)
    ),
    f"{_REF}.use_torch_compile": _OFF,
    f"{_ROLLOUT}.mode": Unsupported("trainer.mode decides what overlaps", "leave the key out, and choose --mode"),
    f"{_ROLLOUT}.do_sample": Unsupported("training samples", "leave the key out", (True,)),
    f"{_ROLLOUT}.ignore_eos": _OFF,
    f"{_ROLLOUT}.dtype": Unsupported("the rollout uses the model's dtype", "set model.dtype", ()),
    f"{_ROLLOUT}.expert_parallel_size": Unsupported("expert parallelism is not in this version", same_as_ours=(1,)),
    f"{_ROLLOUT}.log_prob_micro_batch_size": _MICRO,
    f"{_ROLLOUT}.gpu_memory_utilization": _VLLM,
    f"{_ROLLOUT}.max_num_seqs": _VLLM,
    f"{_ROLLOUT}.max_num_batched_tokens": _VLLM,
    f"{_ROLLOUT}.max_model_len": _VLLM,
    f"{_ROLLOUT}.enforce_eager": _VLLM,
    f"{_ROLLOUT}.enable_chunked_prefill": _VLLM,
    f"{_ROLLOUT}.enable_prefix_caching": _VLLM,
    f"{_ROLLOUT}.load_format": _VLLM,
    f"{_ROLLOUT}.layered_summon": _VLLM,
    f"{_ROLLOUT}.cudagraph_capture_sizes": _VLLM,
    f"{_ROLLOUT}.disable_log_stats": _VLLM,
    f"{_ROLLOUT}.engine_kwargs": _VLLM,
    f"{_ROLLOUT}.prometheus": _VLLM,
    f"{_ROLLOUT}.disaggregation": _VLLM,
    f"{_ROLLOUT}.disaggregation.enabled": _OFF,
    f"{_ROLLOUT}.multi_turn": Unsupported(
        "several turns are what an agent loop makes of a sample", "set rollout.agent.default_agent_loop"
    ),
    f"{_ROLLOUT}.multi_turn.enable": _OFF,
    f"{_ROLLOUT}.agent.agent_loop_config_path": Unsupported(
        "an agent loop is named by its import path",
        "set rollout.agent.default_agent_loop=file.py:Class and rollout.agent.agent_loop_kwargs.<name>",
        (None,),
    ),
    f"{_ROLLOUT}.agent.custom_async_server": Unsupported("replicas are those of rollout.name", same_as_ours=(None,)),
    f"{_ROLLOUT}.trace": _OFF,
    f"{_ROLLOUT}.skip_rollout": _OFF,
    f"{_ROLLOUT}.checkpoint_engine.engine_kwargs": Unsupported(
        "the weight sync of this version has no further settings"
    ),
    f"{_ROLLOUT}.checkpoint_engine.custom_backend_module": Unsupported(
        "the weight sync takes no plug-ins in this version"
    ),
    "data.truncation": Unsupported("a prompt over data.max_prompt_length is never cut", same_as_ours=("error",)),
    "data.return_raw_chat": Unsupported(
        "prompts go through the tokenizer's chat template by themselves", same_as_ours=(False,)
    ),
    "data.reward_fn_key": Unsupported("rows name no reward function", "set reward.fn"),
    "data.dataloader_num_workers": Unsupported("prompts are read by the driver", same_as_ours=(0,)),
    "data.gen_batch_size": Unsupported("prompts are drawn train_batch_size at a time", same_as_ours=(None,)),
    "data.image_key": Unsupported("prompts are texts in this version"),
    "data.video_key": Unsupported("prompts are texts in this version"),
    "data.custom_cls": Unsupported(
        "data sets of your own are .jsonl files",
        "write the rows to a .jsonl file: data.train_files=rows.jsonl",
    ),
    "data.sampler": Unsupported("prompts are drawn in a seeded random order"),
    "algorithm.use_pf_ppo": _OFF,
    "algorithm.pf_ppo": Unsupported("not in this version"),
    "algorithm.rollout_correction": Unsupported("only truncated importance sampling is in this version"),
    "algorithm.rollout_correction.rollout_rs": Unsupported(
        "rejection sampling is not in this version", "set algorithm.rollout_correction.rollout_is", (None,)
    ),
    "reward.reward_manager": Unsupported("a reward function scores one response", "set reward.fn"),
    "reward.sandbox_fusion": Unsupported("not in this version"),
    "reward.reward_model.rollout": Unsupported("the reward model's engine has no settings in this version"),
    "reward_model": Unsupported("not in this version", "see reward.reward_model"),
    "trainer.logger": Unsupported(
        "metrics go to the console, metrics.jsonl and TensorBoard",
        "leave the key out, or trainer.logger=[console,tensorboard]",
    ),
    "trainer.use_v1": Unsupported("there is one trainer", same_as_ours=(True,)),
    "trainer.use_legacy_worker_impl": Unsupported("there is one trainer", same_as_ours=("disable",)),
    "trainer.val_only": Unsupported("it is a flag of the command", "rpcrl launch --eval-only", (False,)),
    "trainer.rollout_data_dir": Unsupported(
        "samples are written to the run directory's samples/", same_as_ours=(None,)
    ),
    "trainer.validation_data_dir": Unsupported(
        "samples are written to the run directory's samples/", same_as_ours=(None,)
    ),
    "trainer.default_hdfs_dir": Unsupported("checkpoints go to a local or shared folder", same_as_ours=(None,)),
    "trainer.del_local_ckpt_after_load": Unsupported("loading removes nothing", same_as_ours=(False,)),
    "trainer.remove_previous_ckpt_in_save": Unsupported(
        "a number says how many checkpoints stay", "set trainer.max_actor_ckpt_to_keep=1", (False,)
    ),
    "trainer.max_critic_ckpt_to_keep": Unsupported(
        "actor and critic lie in one checkpoint", "set trainer.max_actor_ckpt_to_keep", (None,)
    ),
    "trainer.esi_redundant_time": Unsupported("not in this version", same_as_ours=(0,)),
    "trainer.npu_profile": _OFF,
    "trainer.v1.sync": Unsupported("mode colocate has no settings of its own"),
    "trainer.v1.separate_async.hybrid_rollout": Unsupported(
        "trainer devices are not lent to the rollout in this version"
    ),
    "trainer.v1.separate_async.hybrid_rollout.enable_switch": _OFF,
    "trainer.v1.sampler.custom_sampler": Unsupported("samplers are not chosen in this version"),
    "trainer.v1.sampler.sync_refill_failed_groups": Unsupported(
        "groups that fail in the async modes are always replaced, and in the others they end the run"
    ),
}

_SAME_FOR_THE_CRITIC: Mapping[str, tuple[str, ...]] = {
    _ACTOR: (
        "ppo_micro_batch_size", "shuffle", "checkpoint",
        "ulysses_sequence_parallel_size", "fsdp_config", "fsdp_config.param_offload", "fsdp_config.optimizer_offload",
        "megatron", "profiler", "optim.lr_warmup_steps_ratio", "optim.total_training_steps", "optim.min_lr_ratio",
        "optim.num_cycles", "optim.optimizer",
    ),
    _MODEL: (
        "enable_activation_offload", "use_shm",
        "trust_remote_code", "lora_rank", "lora_alpha", "target_modules", "external_lib",
    ),
}  # fmt: skip
_OF_THE_CRITIC: Mapping[str, Unsupported] = {
    "critic.forward_micro_batch_size": _MICRO,
    "critic.model.tokenizer_path": Unsupported("the critic reads the policy's tokens", same_as_ours=(None,)),
    "critic.model.fsdp_config": Unsupported(
        "the critic is spread and computed as the actor is", "set actor.fsdp_config.mixed_precision"
    ),
    "critic.strategy": Unsupported("the critic is spread as the actor is", "set actor.strategy", ("fsdp", "fsdp2")),
    "critic.rollout_n": Unsupported("it is the rollout's", "set rollout.n"),
    "critic.nccl_timeout": _OF_THE_RUN["actor_rollout_ref.nccl_timeout"],
}

UNSUPPORTED: Mapping[str, Unsupported] = {
    **_OF_THE_RUN,
    **{f"critic.{name}": _OF_THE_RUN[f"{_ACTOR}.{name}"] for name in _SAME_FOR_THE_CRITIC[_ACTOR]},
    **{f"critic.model.{name}": _OF_THE_RUN[f"{_MODEL}.{name}"] for name in _SAME_FOR_THE_CRITIC[_MODEL]},
    **_OF_THE_CRITIC,
}
"""Full key or section of verl → why it is no setting; a longer key goes before its section."""

_LOGGERS = frozenset({"console", "tensorboard"})


def unsupported(key: str, value: Any) -> Unsupported | None:
    """Return why a full verl key cannot be had; None when it is unknown or asks for what rpcrl does anyway.

    ``is_known`` tells the two apart.
    """
    entry = _entry(key)
    if entry is None or any(value == same and type(value) is type(same) for same in entry.same_as_ours):
        return None
    if key == "trainer.logger":
        names = [value] if isinstance(value, str) else value
        if isinstance(names, list | tuple) and names and _LOGGERS.issuperset(map(str, names)):
            return None
    return entry


def is_known(key: str) -> bool:
    """Say whether a full key is one of verl's that is no setting here."""
    return _entry(key) is not None


def _entry(key: str) -> Unsupported | None:
    parts = key.split(".")
    for length in range(len(parts), 0, -1):
        entry = UNSUPPORTED.get(".".join(parts[:length]))
        if entry is not None:
            return entry
    return None
