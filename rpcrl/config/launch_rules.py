"""What does ``rpcrl launch`` refuse that ``rpcrl plan`` accounts? What this version, or this machine, cannot run.

The checks look at files, but start nothing and change nothing; each returns violations for ``load(also=...)``.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rpcrl.config.account import replica_devices
from rpcrl.config.rules import ROLLOUT
from rpcrl.config.run import BUILT_IN_TASK, GSM8K_PREFIX, RunConfig
from rpcrl.errors import Violation

__all__ = ["file_checks", "version_checks"]

_PARALLEL = ("tensor_model_parallel_size", "data_parallel_size", "pipeline_model_parallel_size")


def version_checks(config: RunConfig) -> list[Violation]:
    """Return what this version accounts but does not run."""
    return [*_modes(config), *_engines(config), *_reward_models(config), *_models(config)]


def _modes(config: RunConfig) -> Iterator[Violation]:
    if config.trainer.mode != "colocate":
        yield Violation(
            "trainer.mode",
            f"this version trains in mode colocate; {config.trainer.mode} is accounted by `rpcrl plan` and not run",
            ("choose --mode colocate",),
        )


def _engines(config: RunConfig) -> Iterator[Violation]:
    rollout = config.actor_rollout_ref.rollout
    if rollout.name != "torch":
        yield Violation(
            f"{ROLLOUT}.name",
            f"this version samples with the engine torch; {rollout.name} is accounted by `rpcrl plan` and not run",
            ("set rollout.name=torch",),
        )
        return
    for name in _PARALLEL:
        size = getattr(rollout, name)
        if size > 1:
            yield Violation(
                f"{ROLLOUT}.{name}",
                f"the engine torch runs a replica in 1 process, but {name}={size} spreads it over TP x DP x PP = "
                f"{replica_devices(config)}",
                (f"set rollout.{name}=1",),
            )


def _reward_models(config: RunConfig) -> Iterator[Violation]:
    if config.reward.reward_model.enable:
        yield Violation(
            "reward.reward_model.enable",
            "this version scores with reward functions; reward models are accounted by `rpcrl plan` and not run",
            ("set reward.reward_model.enable=false and reward.fn=my_file.py:score",),
        )


def _models(config: RunConfig) -> Iterator[Violation]:
    data, model = config.data, config.actor_rollout_ref.model
    if model.path is None and data.train_files not in (None, BUILT_IN_TASK):
        yield Violation(
            "actor_rollout_ref.model.path",
            f"no model is named, and the shipped base model fits only the built-in task, not {data.train_files}",
            ("set model.path to the folder of a Hugging Face checkpoint",),
        )


def file_checks(config: RunConfig) -> list[Violation]:
    """Return which named files and folders are not there."""
    found: list[Violation] = []
    for key, path in (("data.train_files", config.data.train_files), ("data.val_files", config.data.val_files)):
        if path is None or path == BUILT_IN_TASK:
            continue
        file = path.removeprefix(GSM8K_PREFIX)
        if not Path(file).expanduser().is_file():
            found.append(_missing(key, file, "file"))
    model = config.actor_rollout_ref.model.path
    if model is not None:
        folder = Path(model).expanduser()
        if not folder.is_dir():
            found.append(
                Violation(
                    "actor_rollout_ref.model.path",
                    f"no folder {folder.absolute()}; models are read from local folders and never downloaded",
                    ("name the folder of a Hugging Face checkpoint", "or leave the key out: the shipped base model"),
                )
            )
        elif not (folder / "config.json").is_file():
            found.append(_missing("actor_rollout_ref.model.path", str(folder / "config.json"), "file"))
    resume = config.trainer.resume
    if resume not in ("disable", "auto") and not Path(resume).expanduser().is_dir():
        found.append(_missing("trainer.resume", resume, "folder"))
    return found


def _missing(key: str, path: str, kind: str) -> Violation:
    return Violation(key, f"no {kind} {Path(path).expanduser().absolute()}", ("mend the path",))
