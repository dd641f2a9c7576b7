"""Which model, prompts and reward function does a configuration mean?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from rpcrl.errors import ConfigError, Violation
from rpcrl.tasks.built_in import BUILT_IN_TASKS
from rpcrl.trainer.prompt_files import DEFAULT_TASK, built_in_task, heldout_source, task_reward, train_source

if TYPE_CHECKING:
    from rpcrl.batch.data_proto import DataProto
    from rpcrl.config.run import RunConfig
    from rpcrl.trainer.data import PromptLoader

__all__ = ["model_folder", "open_heldout", "open_training", "reward_function"]


def model_folder(config: RunConfig) -> Path:
    """Return the folder of the model to start from: ``model.path``, else the shipped base checkpoint."""
    path = config.actor_rollout_ref.model.path
    if path is not None:
        return Path(path).expanduser().absolute()
    task = built_in_task(config.data.train_files) or BUILT_IN_TASKS[DEFAULT_TASK]
    return task.base_checkpoint()


def reward_function(config: RunConfig) -> str:
    """Return the reward function as a path that another process can load: ``reward.fn``, else the task's own.

    Loads it once here, so that whatever is wrong with it is a ConfigError before any process starts.
    """
    from rpcrl.rewards import load_reward, resolve_reward

    path = config.reward.fn or task_reward(config.data.train_files)
    if path is None:
        raise ConfigError(
            [
                Violation(
                    "reward.fn",
                    f"no reward function is named, and the prompts of {config.data.train_files} bring none along",
                    ("set reward.fn=path/to/file.py:function",),
                )
            ]
        )
    resolved = resolve_reward(path)
    load_reward(resolved, config.reward.reward_kwargs)
    return resolved


def open_training(config: RunConfig, tokenizer: Any) -> PromptLoader:
    """Open the training prompts, in the order that the seed gives."""
    from rpcrl.trainer.data import PromptEncoder, PromptLoader

    data = config.data
    seed = config.trainer.seed if data.seed is None else data.seed
    source = train_source(data.train_files, seed=seed, prompt_key=data.prompt_key, max_samples=data.train_max_samples)
    encoder = PromptEncoder(tokenizer, data.max_prompt_length)
    return PromptLoader(
        source,
        encoder,
        batch_size=data.train_batch_size,
        seed=seed,
        shuffle=data.shuffle,
        filter_overlong_prompts=data.filter_overlong_prompts,
    )


def open_heldout(config: RunConfig, tokenizer: Any) -> DataProto | None:
    """Return the held-out prompts as one batch; None when there are none."""
    from rpcrl.trainer.data import PromptEncoder, heldout_batch

    data = config.data
    source = heldout_source(
        data.val_files, data.train_files, prompt_key=data.prompt_key, max_samples=data.val_max_samples
    )
    if source is None:
        return None
    encoder = PromptEncoder(tokenizer, data.max_prompt_length)
    return heldout_batch(source, encoder, filter_overlong_prompts=data.filter_overlong_prompts)
