"""Which settings do not fit each other? Every rule over a configuration, with its arithmetic and a remedy.

A rule yields its violations; none raises and none stops another, so that a user sees all mistakes at once. A
rule is skipped when one of the settings that it reads could not be read.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from pathlib import Path

from rpcrl.config.account import (
    Learner,
    is_separate,
    learners,
    replica_devices,
    rollout_devices,
    trainer_devices,
)
from rpcrl.config.algorithm_rules import ALGORITHM_RULES
from rpcrl.config.async_rules import ASYNC_RULES
from rpcrl.config.critic_rules import CRITIC_RULES
from rpcrl.config.group_rules import GROUP_RULES
from rpcrl.config.remedy_numbers import divisors_beside, near, or_
from rpcrl.config.rule import (
    ACTOR,
    BACKEND,
    BATCH,
    CRITIC_MINI_BATCH,
    MICRO_BATCH,
    MINI_BATCH,
    MODE,
    ROLLOUT,
    SAMPLES,
    SYNC_STEP,
    TP,
    WORLD,
    RuleList,
)
from rpcrl.config.run import BUILT_IN_TASK, GSM8K_PREFIX, PROMPT_SUFFIXES, RunConfig
from rpcrl.config.token_rules import TOKEN_RULES
from rpcrl.config.vllm_rules import VLLM_RULES
from rpcrl.errors import Violation

__all__ = ["BACKENDS", "check"]

BACKENDS = ("naive", "broadcast", "nccl")
VERL_BACKENDS = ("hccl", "nixl", "mooncake", "kimi_ckpt_engine", "delta_sharded")

_RULES = RuleList()
_rule = _RULES.rule


def check(config: RunConfig, *, unread: Collection[str] = ()) -> list[Violation]:
    """Return every broken rule; rules that read a setting of ``unread`` are skipped."""
    found: list[Violation] = []
    for reads, rule in (
        *_RULES,
        *ALGORITHM_RULES,
        *CRITIC_RULES,
        *GROUP_RULES,
        *TOKEN_RULES,
        *VLLM_RULES,
        *ASYNC_RULES,
    ):
        if not any(key in unread for key in reads):
            found.extend(rule(config))
    return found


@_rule(MODE, *WORLD, f"{ROLLOUT}.nnodes", f"{ROLLOUT}.n_gpus_per_node", TP, f"{ROLLOUT}.data_parallel_size",
       f"{ROLLOUT}.pipeline_model_parallel_size")  # fmt: skip
def _replicas_are_whole(config: RunConfig) -> Iterator[Violation]:
    rollout = config.actor_rollout_ref.rollout
    world, size, whose = rollout_devices(config), replica_devices(config), "rollout devices"
    if world == 0:
        # The pool is still to be sized (another rule says so); its replicas are held against what is known.
        world = rollout.n_gpus_per_node or trainer_devices(config)
        whose = "devices of one rollout node" if rollout.n_gpus_per_node else "devices of the trainer"
    if world == 0 or world % size == 0:
        return
    parts = (
        f"TP {rollout.tensor_model_parallel_size} x DP {rollout.data_parallel_size} "
        f"x PP {rollout.pipeline_model_parallel_size} = {size}"
    )
    owner = "rollout" if is_separate(config) else "trainer"
    others = rollout.data_parallel_size * rollout.pipeline_model_parallel_size
    remedies = [f"use {or_(near(world, size))} devices: {owner}.nnodes x {owner}.n_gpus_per_node"]
    if world % others == 0:
        fitting = divisors_beside(world // others, rollout.tensor_model_parallel_size)
        remedies.insert(0, f"set rollout.tensor_model_parallel_size to {or_(fitting)}")
    yield Violation(
        TP,
        f"{world} {whose} % ({parts}) = {world % size}: {world // size} replicas leave "
        f"{world % size} devices over; the rest must be 0",
        tuple(remedies),
    )


@_rule(BATCH, MINI_BATCH, CRITIC_MINI_BATCH)
def _mini_batches_are_whole(config: RunConfig) -> Iterator[Violation]:
    batch = config.data.train_batch_size
    for learner in _with_own_mini_batches(config):
        mini, name = learner.mini_batch, f"{learner.name}.ppo_mini_batch_size"
        if batch % mini == 0:
            continue
        if mini > batch:
            problem = f"B = {batch} prompts are fewer than one mini-batch of M = {mini} ({name})"
        else:
            problem = (
                f"B % M = {batch} % {mini} = {batch % mini}: {batch} prompts do not split into mini-batches "
                f"of {mini} ({name}); the rest must be 0"
            )
        yield Violation(
            BATCH,
            problem,
            (
                f"set data.train_batch_size to {or_(near(batch, mini))}",
                f"or set {name} to {or_(divisors_beside(batch, mini))}",
            ),
        )


def _with_own_mini_batches(config: RunConfig) -> Iterator[Learner]:
    """Yield the learners whose mini-batches are their own; a critic with the actor's would repeat its mistakes."""
    for learner in learners(config):
        if learner.name == "actor" or config.critic.ppo_mini_batch_size is not None:
            yield learner


@_rule(MINI_BATCH, CRITIC_MINI_BATCH, SAMPLES, *WORLD)
def _ranks_share_a_mini_batch(config: RunConfig) -> Iterator[Violation]:
    n, ranks = config.actor_rollout_ref.rollout.n, trainer_devices(config)
    for learner in _with_own_mini_batches(config):
        mini = learner.mini_batch
        if mini * n % ranks == 0:
            continue
        step = next(step for step in range(1, ranks + 1) if step * n % ranks == 0)
        yield Violation(
            f"{learner.key}.ppo_mini_batch_size",
            f"M x n = {mini} x {n} = {mini * n} samples % {ranks} data-parallel ranks (trainer.nnodes "
            f"{config.trainer.nnodes} x trainer.n_gpus_per_node {config.trainer.n_gpus_per_node}) = "
            f"{mini * n % ranks}; the rest must be 0",
            (
                f"set {learner.name}.ppo_mini_batch_size to {or_(near(mini, step))}",
                f"or use {or_(divisors_beside(mini * n, ranks))} ranks (trainer.nnodes x n_gpus_per_node)",
            ),
        )


@_rule(MICRO_BATCH, MINI_BATCH, CRITIC_MINI_BATCH, "critic.ppo_micro_batch_size_per_gpu", SAMPLES, *WORLD)
def _micro_batches_are_whole(config: RunConfig) -> Iterator[Violation]:
    n, ranks = config.actor_rollout_ref.rollout.n, trainer_devices(config)
    for learner in learners(config):
        micro, samples = learner.micro_batch, learner.mini_batch * n
        if micro is None or samples % ranks or samples // ranks % micro == 0:
            continue
        share = samples // ranks
        yield Violation(
            f"{learner.key}.ppo_micro_batch_size_per_gpu",
            f"one rank's mini-batch is M x n / ranks = {learner.mini_batch} x {n} / {ranks} = {share} "
            f"samples, and {share} % {micro} = {share % micro}; the rest must be 0",
            (
                f"set {learner.name}.ppo_micro_batch_size_per_gpu to {or_(divisors_beside(share, micro))}",
                "or leave it null: one pass takes the whole mini-batch",
            ),
        )


@_rule(MODE, BATCH, MINI_BATCH, SYNC_STEP)
def _one_sync_takes_the_batch(config: RunConfig) -> Iterator[Violation]:
    if config.trainer.mode != "separate-async":
        return
    batch, mini = config.data.train_batch_size, config.actor_rollout_ref.actor.ppo_mini_batch_size
    steps = config.trainer.v1.separate_async.parameter_sync_step
    if batch == steps * mini:
        return
    remedies = [f"set data.train_batch_size={steps * mini}"]
    if batch % mini == 0:
        remedies.append(f"or set {SYNC_STEP}={batch // mini}")
    if batch % steps == 0:
        remedies.append(f"or set actor.ppo_mini_batch_size={batch // steps}")
    yield Violation(
        SYNC_STEP,
        f"mode separate-async needs B = parameter_sync_step x M, but {batch} != {steps} x {mini} = {steps * mini}",
        tuple(remedies),
    )


@_rule(MODE, f"{ROLLOUT}.nnodes", f"{ROLLOUT}.n_gpus_per_node")
def _rollout_has_its_pool(config: RunConfig) -> Iterator[Violation]:
    rollout, mode = config.actor_rollout_ref.rollout, config.trainer.mode
    if not is_separate(config):
        if rollout.nnodes > 0:
            yield Violation(
                f"{ROLLOUT}.nnodes",
                f"rollout.nnodes={rollout.nnodes} asks for a pool of {rollout.nnodes} x "
                f"{rollout.n_gpus_per_node} devices, but in mode {mode} the rollout shares the "
                "trainer's pool",
                ("set rollout.nnodes=0", "or choose --mode separate or --mode separate-async"),
            )
        return
    for name, value, remedy in (
        (
            "nnodes",
            rollout.nnodes,
            "set rollout.nnodes to the nodes of the rollout's pool, e.g. rollout.nnodes=1",
        ),
        (
            "n_gpus_per_node",
            rollout.n_gpus_per_node,
            "set rollout.n_gpus_per_node, e.g. rollout.n_gpus_per_node=4",
        ),
    ):
        if value < 1:
            yield Violation(
                f"{ROLLOUT}.{name}",
                f"mode {mode} gives the rollout a pool of its own, nnodes x n_gpus_per_node = "
                f"{rollout.nnodes} x {rollout.n_gpus_per_node} devices, so rollout.{name} must be > 0, "
                f"not {value}",
                (remedy, "or choose --mode colocate: rollout and trainer share one pool"),
            )


@_rule(MODE, BACKEND)
def _weights_can_cross(config: RunConfig) -> Iterator[Violation]:
    backend, mode = config.actor_rollout_ref.rollout.checkpoint_engine.backend, config.trainer.mode
    if backend in VERL_BACKENDS:
        yield Violation(
            BACKEND,
            f"{backend!r} is not in this version (known: {or_(BACKENDS)})",
            (f"set {BACKEND}=broadcast",),
        )
    elif ":" in backend:
        if not is_separate(config):
            yield Violation(
                BACKEND,
                f"{backend} is a channel between 2 pools, and in mode {mode} there is 1",
                ("set rollout.checkpoint_engine.backend=naive", "or choose --mode separate"),
            )
    elif backend not in BACKENDS:
        known = f"{or_(BACKENDS)}, and no module:Class"
        yield Violation(BACKEND, f"{backend!r} is not one of {known}", (f"set {BACKEND}=naive",))
    elif is_separate(config) and backend == "naive":
        yield Violation(
            BACKEND,
            f"naive hands weights over inside one process, but in mode {mode} there are 2 pools",
            (
                "set rollout.checkpoint_engine.backend=broadcast (or nccl)",
                "or choose --mode colocate: weights stay in one pool",
            ),
        )


_REWARD_MODEL = "reward.reward_model"


@_rule(MODE, f"{_REWARD_MODEL}.enable", f"{_REWARD_MODEL}.enable_resource_pool", f"{_REWARD_MODEL}.nnodes",
       f"{_REWARD_MODEL}.n_gpus_per_node")  # fmt: skip
def _reward_model_has_its_pool(config: RunConfig) -> Iterator[Violation]:
    model = config.reward.reward_model
    if not model.enable:
        return
    if is_separate(config) and not model.enable_resource_pool:
        yield Violation(
            f"{_REWARD_MODEL}.enable_resource_pool",
            f"in mode {config.trainer.mode} no device is idle while the reward model scores: "
            "1 reward model, 0 pools of its own",
            (
                f"set {_REWARD_MODEL}.enable_resource_pool=true with {_REWARD_MODEL}.nnodes=1 and "
                f"{_REWARD_MODEL}.n_gpus_per_node=1",
                f"or set {_REWARD_MODEL}.enable=false",
            ),
        )
    if model.enable_resource_pool and model.nnodes * model.n_gpus_per_node < 1:
        key = f"{_REWARD_MODEL}.{'nnodes' if model.nnodes < 1 else 'n_gpus_per_node'}"
        yield Violation(
            key,
            f"the reward model's pool has nnodes x n_gpus_per_node = {model.nnodes} x "
            f"{model.n_gpus_per_node} = 0 devices",
            (f"set {key}=1", f"or set {_REWARD_MODEL}.enable_resource_pool=false"),
        )


@_rule(f"{ROLLOUT}.val_kwargs.do_sample", f"{ROLLOUT}.val_kwargs.temperature", f"{ROLLOUT}.val_kwargs.n")
def _validation_samples(config: RunConfig) -> Iterator[Violation]:
    val = config.actor_rollout_ref.rollout.val_kwargs
    if val.do_sample and val.temperature <= 0:
        yield Violation(
            f"{ROLLOUT}.val_kwargs.temperature",
            f"val_kwargs.do_sample=true needs a temperature > 0, not {val.temperature:g}",
            ("set rollout.val_kwargs.temperature=1.0", "or set rollout.val_kwargs.do_sample=false (greedy)"),
        )
    if val.n > 1 and not val.do_sample:
        yield Violation(
            f"{ROLLOUT}.val_kwargs.n",
            f"greedy decoding gives the same response {val.n} times",
            ("set rollout.val_kwargs.do_sample=true", "or set rollout.val_kwargs.n=1"),
        )


@_rule(f"{ACTOR}.optim.betas", "critic.optim.betas")
def _betas(config: RunConfig) -> Iterator[Violation]:
    for section, betas in ((ACTOR, config.actor_rollout_ref.actor.optim.betas), ("critic", config.critic.optim.betas)):
        if any(not 0 <= beta < 1 for beta in betas):
            yield Violation(
                f"{section}.optim.betas",
                f"each of {list(betas)} must be in [0, 1)",
                (f"set {section.rpartition('.')[2]}.optim.betas=[0.9,0.99]",),
            )


@_rule("trainer.save_freq", "trainer.test_freq", "data.train_max_samples", "data.val_max_samples",
       f"{ROLLOUT}.top_k", f"{ROLLOUT}.val_kwargs.top_k")  # fmt: skip
def _minus_one_or_positive(config: RunConfig) -> Iterator[Violation]:
    rollout = config.actor_rollout_ref.rollout
    for key, value, off in (
        ("trainer.save_freq", config.trainer.save_freq, "only at the end"),
        ("trainer.test_freq", config.trainer.test_freq, "only at the ends"),
        ("data.train_max_samples", config.data.train_max_samples, "all"),
        ("data.val_max_samples", config.data.val_max_samples, "all"),
        (f"{ROLLOUT}.top_k", rollout.top_k, "all tokens"),
        (f"{ROLLOUT}.val_kwargs.top_k", rollout.val_kwargs.top_k, "all tokens"),
    ):
        if value < 1 and value != -1:
            yield Violation(key, f"{value} is neither -1 nor a number from 1 on", (f"set {key}=-1 ({off})",))


@_rule("trainer.total_training_steps", "trainer.total_epochs", "data.train_files")
def _the_run_ends(config: RunConfig) -> Iterator[Violation]:
    if config.trainer.total_training_steps is None and config.trainer.total_epochs is None:
        yield Violation(
            "trainer.total_training_steps",
            "neither total_training_steps nor total_epochs is set: the run would have no end",
            ("set trainer.total_training_steps=100", "or set trainer.total_epochs=1"),
        )
    elif config.trainer.total_training_steps is None and config.data.train_files in (None, BUILT_IN_TASK):
        yield Violation(
            "trainer.total_epochs",
            f"total_epochs={config.trainer.total_epochs} passes over prompts without end: the built-in task makes as "
            "many as are asked for",
            ("set trainer.total_training_steps=100", "or name a file: data.train_files=rows.jsonl"),
        )


@_rule("trainer.resume", "trainer.default_local_dir")
def _resumed_run_is_named(config: RunConfig) -> Iterator[Violation]:
    if config.trainer.resume == "auto" and config.trainer.default_local_dir is None:
        yield Violation(
            "trainer.resume",
            "auto goes on with the run in the run directory, and no run directory is named",
            ("name it: --run-dir DIR (trainer.default_local_dir)", "or name the checkpoint: --resume PATH"),
        )


@_rule("reward.fn", "data.train_files", "data.val_files")
def _files_and_functions(config: RunConfig) -> Iterator[Violation]:
    function = config.reward.fn
    if function is not None and not all(function.rpartition(":")[::2]):
        yield Violation(
            "reward.fn",
            f"{function!r} names no function in it",
            (f"write the file and the function: reward.fn={function.strip(':') or 'my_file.py'}:score",),
        )
    for key, path in (
        ("data.train_files", config.data.train_files),
        ("data.val_files", config.data.val_files),
    ):
        if path is None or path == BUILT_IN_TASK:
            continue
        if Path(path.removeprefix(GSM8K_PREFIX)).expanduser().is_dir():
            yield Violation(
                key, f"{path!r} is a folder, not a file", (f"name one file in it: {key}={path}/rows.jsonl",)
            )
        elif not path.endswith(PROMPT_SUFFIXES):
            yield Violation(
                key,
                f"{path!r} is neither a {', '.join(PROMPT_SUFFIXES)} file nor the built-in task sort_digits",
                (f"name a file of rows: {key}=rows.jsonl", f"or take the built-in task: {key}={BUILT_IN_TASK}"),
            )


@_rule("trainer.project_name", "trainer.experiment_name")
def _names_are_folder_names(config: RunConfig) -> Iterator[Violation]:
    for name, value in (
        ("project_name", config.trainer.project_name),
        ("experiment_name", config.trainer.experiment_name),
    ):
        if "/" in value or "\0" in value or value in ("", ".", ".."):
            usable = re.sub(r"[^\w.-]+", "-", value).strip("-.") or "run"
            yield Violation(
                f"trainer.{name}",
                f"{value!r} is not the name of one folder (the run directory is runs/<project>/<experiment>-<time>)",
                (f"set trainer.{name}={usable}", "or name the run directory itself: --run-dir DIR"),
            )
