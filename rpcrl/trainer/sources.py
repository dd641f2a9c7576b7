"""Which model, prompts and reward function does a configuration mean?"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rpcrl.config.account import has_agent_loop, needs_critic, needs_reward_function
from rpcrl.config.functions import needed_arguments
from rpcrl.config.registry import ADVANTAGES, AGENT_LOOPS, POLICY_LOSSES
from rpcrl.engines.hf_model import model_folder as plain_folder
from rpcrl.engines.hf_model import num_labels, tokenizer_folder
from rpcrl.errors import BatchError, ConfigError, UsageError, Violation
from rpcrl.tasks.built_in import BUILT_IN_TASKS
from rpcrl.trainer.prompt_files import (
    AGENT_FIELDS,
    DEFAULT_TASK,
    PromptSource,
    built_in_task,
    heldout_source,
    task_reward,
    train_source,
)

if TYPE_CHECKING:
    from rpcrl.batch.data_proto import DataProto
    from rpcrl.config.run import RunConfig
    from rpcrl.trainer.data import PromptLoader

__all__ = [
    "Prompts",
    "critic_folder",
    "model_folder",
    "open_heldout",
    "open_prompts",
    "open_training",
    "reward_function",
    "source_checks",
]

REWARD_MODEL_KEY = "reward.reward_model.model_path"


def model_folder(config: RunConfig) -> Path:
    """Return the folder of the model to start from: ``model.path``, else the shipped base checkpoint."""
    path = config.actor_rollout_ref.model.path
    if path is not None:
        return Path(path).expanduser().absolute()
    task = built_in_task(config.data.train_files) or BUILT_IN_TASKS[DEFAULT_TASK]
    return task.base_checkpoint()


def critic_folder(config: RunConfig) -> Path:
    """Return the folder of the model that the critic starts from: ``critic.model.path``, else the policy's."""
    path = config.critic.model.path
    return model_folder(config) if path is None else Path(path).expanduser().absolute()


def source_checks(config: RunConfig, *, heldout_needed: bool = False) -> list[Violation]:
    """Return everything that is wrong with the model, the reward function and the prompts; starts no process."""
    violations = [
        *_model_violations(config),
        *_critic_violations(config),
        *_reward_model_violations(config),
        *_function_violations(config),
        *_agent_violations(config),
    ]
    checks: tuple[Callable[[RunConfig], object], ...] = (
        lambda config: open_prompts(config, heldout_needed=heldout_needed),
    )
    for check in (reward_function, *checks):
        try:
            check(config)
        except ConfigError as error:
            violations.extend(error.violations)
    return violations


def _model_violations(config: RunConfig) -> Iterator[Violation]:
    key, model, data = "actor_rollout_ref.model.path", config.actor_rollout_ref.model, config.data
    task = built_in_task(data.train_files)
    example = "model.path=models/smollm2, a folder with config.json, weights and tokenizer.json"
    if model.path is not None:
        try:
            tokenizer_folder(model.path)
        except UsageError as error:
            problem = str(error).removeprefix(f"{key}={model.path!r}: ")
            remedies = [f"set {example}"] + ["or leave the key out: the shipped base model"] * (task is not None)
            yield Violation(key, f"{Path(model.path).expanduser().absolute()}: {problem}", tuple(remedies))
    elif task is None:
        yield Violation(
            key,
            f"no model is named, and the shipped base model fits only the built-in task, not {data.train_files}",
            (f"set {example}",),
        )
    elif data.max_prompt_length < task.max_prompt_tokens:
        yield Violation(
            "data.max_prompt_length",
            f"prompts of {task.name} have up to {task.max_prompt_tokens} tokens, max_prompt_length allows "
            f"{data.max_prompt_length}",
            (f"set data.max_prompt_length={task.max_prompt_tokens}",),
        )


def _critic_violations(config: RunConfig) -> Iterator[Violation]:
    path = config.critic.model.path
    if path is not None and needs_critic(config):
        try:
            plain_folder(path)
        except UsageError as error:
            problem = str(error).partition(": ")[2]
            remedies = ("name a folder with config.json and weights", "or leave the key out: the policy's model")
            yield Violation("critic.model.path", f"{Path(path).expanduser().absolute()}: {problem}", remedies)


def _reward_model_violations(config: RunConfig) -> Iterator[Violation]:
    model = config.reward.reward_model
    if not model.enable:
        return
    key, remedy = REWARD_MODEL_KEY, "name the folder of a Hugging Face sequence classifier with 1 label"
    if model.model_path is None:
        yield Violation(key, "a reward model is to score, and no folder of one is named", (remedy,))
        return
    try:
        folder = tokenizer_folder(model.model_path)
    except UsageError as error:
        problem = str(error).partition(": ")[2]
        yield Violation(key, f"{Path(model.model_path).expanduser().absolute()}: {problem}", (remedy,))
        return
    labels = num_labels(folder)
    if labels != 1:
        yield Violation(
            key, f"{folder}: a reward model has 1 label, whose logit is the score; this one has {labels}", (remedy,)
        )


def _agent_violations(config: RunConfig) -> Iterator[Violation]:
    name = config.actor_rollout_ref.rollout.agent.default_agent_loop
    if name is None:
        return
    from rpcrl.agents.worker import load_loop

    try:
        load_loop(name)
    except ConfigError as error:
        yield from error.violations
    except UsageError as error:
        yield Violation(AGENT_LOOPS.key, str(error), ("set rollout.agent.default_agent_loop=single_turn_agent",))


def _function_violations(config: RunConfig) -> Iterator[Violation]:
    """Yield what is wrong with an estimator or a loss that is named by its import path."""
    for registry, name in (
        (ADVANTAGES, config.algorithm.adv_estimator),
        (POLICY_LOSSES, config.actor_rollout_ref.actor.policy_loss.loss_mode),
    ):
        if ":" in name:
            try:
                function = registry[name]
            except ConfigError as error:
                yield from error.violations
                continue
            if registry is ADVANTAGES and "values" in needed_arguments(function) and not needs_critic(config):
                yield Violation(registry.key, f"{name} needs the values of a critic", ("set critic.enable=true",))


def reward_function(config: RunConfig) -> str | None:
    """Return the reward function as a path that another process can load: ``reward.fn``, else the task's own.

    None where a reward model alone scores. Loads it once here, so that whatever is wrong with it is a ConfigError
    before any process starts.
    """
    if not needs_reward_function(config):
        return None
    from rpcrl.rewards import load_reward, resolve_reward

    path = config.reward.fn or task_reward(config.data.train_files)
    if path is None:
        raise ConfigError(
            [
                Violation(
                    "reward.fn",
                    f"no reward function is named, and the prompts of {config.data.train_files} bring none along",
                    ("set reward.fn=rewards.py:score",),
                )
            ]
        )
    resolved = resolve_reward(path)
    load_reward(resolved, config.reward.reward_kwargs)
    return resolved


@dataclass(frozen=True)
class Prompts:
    """The prompts of a run, read and checked, not yet tokenised."""

    train: PromptSource
    heldout: PromptSource | None


def _data_seed(config: RunConfig) -> int:
    return config.trainer.seed if config.data.seed is None else config.data.seed


def open_prompts(config: RunConfig, *, heldout_needed: bool = False) -> Prompts:
    """Read the prompts. Raises ConfigError naming every file that cannot be used, before any process starts.

    With ``heldout_needed`` it is one of the mistakes that there are no held-out prompts.
    """
    data = config.data
    found: dict[str, PromptSource | None] = {}
    violations: list[Violation] = []
    openers: dict[str, Callable[[], PromptSource | None]] = {
        "data.train_files": lambda: train_source(
            data.train_files, seed=_data_seed(config), prompt_key=data.prompt_key, max_samples=data.train_max_samples
        ),
        "data.val_files": lambda: heldout_source(
            data.val_files, data.train_files, prompt_key=data.prompt_key, max_samples=data.val_max_samples
        ),
    }
    for key, opener in openers.items():
        try:
            found[key] = opener()
        except (UsageError, BatchError) as error:
            violations.append(Violation(key, str(error)))
    if heldout_needed and found.get("data.val_files", ...) is None:
        problem = f"no held-out prompts are named, and {data.train_files} brings none along: nothing can be evaluated"
        violations.append(Violation("data.val_files", problem, ("set data.val_files=heldout.jsonl",)))
    train = found.get("data.train_files")
    if train is not None and train.size is not None and train.size < data.train_batch_size:
        violations.append(
            Violation(
                "data.train_batch_size",
                f"{train.name} has {train.size} prompts, fewer than one batch of B = {data.train_batch_size}",
                (f"set data.train_batch_size to {train.size} or less", "or name a file with more prompts"),
            )
        )
    if not has_agent_loop(config):
        violations += [v for key, source in found.items() for v in _unread_fields(key, source)]
    if violations or train is None:
        raise ConfigError(violations)
    return Prompts(train, found["data.val_files"])


def _unread_fields(key: str, source: PromptSource | None) -> Iterator[Violation]:
    """Yield what rows say to agent loops where there are none."""
    for number in range(0 if source is None else source.size or 0):
        present = [name for name in AGENT_FIELDS if source is not None and name in source.row(number)]
        if present:
            yield Violation(
                key,
                f"row {number} has {' and '.join(present)}, which only agent loops read",
                ("set rollout.agent.default_agent_loop=single_turn_agent", "or leave the field out"),
            )
            return


def open_training(config: RunConfig, prompts: Prompts, tokenizer: Any) -> PromptLoader:
    """Return the training prompts, in the order that the seed gives."""
    from rpcrl.trainer.data import PromptEncoder, PromptLoader

    data = config.data
    seed = _data_seed(config)
    encoder = PromptEncoder(tokenizer, data.max_prompt_length)
    return PromptLoader(
        prompts.train,
        encoder,
        batch_size=data.train_batch_size,
        seed=seed,
        shuffle=data.shuffle,
        filter_overlong_prompts=data.filter_overlong_prompts,
    )


def open_heldout(config: RunConfig, prompts: Prompts, tokenizer: Any) -> DataProto | None:
    """Return the held-out prompts as one batch; None when there are none."""
    from rpcrl.trainer.data import PromptEncoder, heldout_batch

    data = config.data
    if prompts.heldout is None:
        return None
    encoder = PromptEncoder(tokenizer, data.max_prompt_length)
    return heldout_batch(prompts.heldout, encoder, filter_overlong_prompts=data.filter_overlong_prompts)
