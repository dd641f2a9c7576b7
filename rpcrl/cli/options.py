"""Which options do the commands share that take a configuration, and how do they become one?"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from rpcrl.config.load import Check, Loaded

__all__ = ["Given", "configuration_options", "given"]

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class Given:
    """What the command line says about the configuration."""

    config: str | None
    overrides: tuple[str, ...]
    mode: str | None
    flags: Mapping[str, tuple[str, Any]]
    """Full key → (the option's name, its value)."""

    def read(self, *, also: Sequence[Check] = ()) -> Loaded:
        """Return the configuration with all its mistakes; ``also`` are further checks."""
        from rpcrl.config.load import read

        return read(self.config, self.overrides, self.mode, also=also, flags=self.flags)


def configuration_options(command: F) -> F:
    """Add the options and arguments that make a configuration."""
    decorators = (
        click.option("--mode", metavar="MODE", help="colocate, colocate-async, separate or separate-async."),
        click.option("--config", metavar="FILE", help="YAML file of settings; key=value overrides win over it."),
        click.option("--run-dir", metavar="DIR", help="Run directory (trainer.default_local_dir)."),
        click.option(
            "--resume",
            metavar="[PATH]",
            is_flag=False,
            flag_value="auto",
            help="Go on from the run directory's last checkpoint, or from the checkpoint PATH.",
        ),
        click.option("--seed", type=int, metavar="N", help="Seed of the run (trainer.seed)."),
        click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]..."),
    )
    for decorator in reversed(decorators):
        command = decorator(command)
    return command


def given(
    *,
    config: str | None,
    overrides: tuple[str, ...],
    mode: str | None,
    run_dir: str | None,
    resume: str | None,
    seed: int | None,
) -> Given:
    """Return what the shared options say."""
    if resume is not None and "=" in resume and not Path(resume).exists():
        # `--resume rollout.n=4`: the option's value may be left out, and this is the first override.
        overrides, resume = (resume, *overrides), "auto"
    flags: dict[str, tuple[str, Any]] = {}
    for key, option, value in (
        ("trainer.default_local_dir", "--run-dir", run_dir),
        ("trainer.resume", "--resume", resume),
        ("trainer.seed", "--seed", seed),
    ):
        if value is not None:
            flags[key] = (option, value)
    return Given(config, overrides, mode, flags)
