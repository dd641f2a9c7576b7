"""How is a run started, watched and ended from the command line?

Everything that can be wrong is checked before any process starts (exit code 2). A run that fails ends with exit code
1, its error and the place of its logs; the traceback of rpcrl itself goes to a file, or to the screen with --debug.
"""

from __future__ import annotations

import logging
import shlex
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rpcrl.cli.options import configuration_options, given
from rpcrl.cli.signals import Ended, ending_in_order
from rpcrl.errors import ConfigError, RpcrlError

if TYPE_CHECKING:
    from rich.console import Console

    from rpcrl.cli.view import RunView
    from rpcrl.config.run import RunConfig
    from rpcrl.trainer.base import Trainer

__all__ = ["launch", "run_to_exit_code"]

EXIT_FAILED, EXIT_CONFIG, EXIT_INTERRUPTED = 1, 2, 130


@click.command()
@configuration_options
@click.option(
    "--dry-run", is_flag=True, help="Print processes, ranks, devices, environment and addresses; start nothing."
)
@click.option("--generate-only", is_flag=True, help="Sample the training prompts and score them; train nothing.")
@click.option("--eval-only", is_flag=True, help="Answer the held-out prompts once; train nothing.")
@click.option(
    "--console",
    type=click.Choice(["default", "all", "off"]),
    help="Which lines of the workers are shown: rank 0 and warnings of all (default), all, or none (off).",
)
@click.option("--debug", is_flag=True, help="Show tracebacks, the log of the driver, and all lines of the workers.")
@click.pass_context
def launch(
    context: click.Context,
    /,
    *,
    dry_run: bool,
    generate_only: bool,
    eval_only: bool,
    console: str | None,
    debug: bool,
    **options: Any,
) -> None:
    """Train: `rpcrl launch --mode colocate [--config FILE] [KEY=VALUE]...`.

    Without settings it runs the default job: a small model learns on a CPU, in about a minute, which word means which
    direction. Every setting takes verl's name; `rpcrl plan --keys` lists them.
    """
    if generate_only and eval_only:
        raise click.UsageError("--generate-only and --eval-only exclude each other")
    try:
        config = _checked(given(**options).read)
        if dry_run:
            _dry_run(config)
            return
    except ConfigError as error:
        click.echo(str(error), err=True)
        context.exit(EXIT_CONFIG)
    what = "generate" if generate_only else "evaluate" if eval_only else "fit"
    context.exit(_launch(config, what, lines=console or ("all" if debug else "default"), debug=debug))


def _checked(read: Callable[..., Any]) -> RunConfig:
    """Return the configuration, or raise ConfigError with every mistake; a dry run refuses what the real one would."""
    from rpcrl.cli.processes import device_checks
    from rpcrl.config.launch_rules import resume_checks, version_checks
    from rpcrl.trainer.sources import source_checks

    loaded = read(also=(version_checks, device_checks, resume_checks, source_checks))
    if loaded.violations or loaded.config is None:
        raise ConfigError(loaded.violations)
    config: RunConfig = loaded.config
    return config


def _dry_run(config: RunConfig) -> None:
    from rpcrl.cli.account_text import account_lines, title
    from rpcrl.cli.processes import dry_run_lines

    click.echo(f"dry run, nothing is started: {title(config)}")
    for line in (*account_lines(config), *dry_run_lines(config)):
        click.echo(line)


def _launch(config: RunConfig, what: str, *, lines: str, debug: bool) -> int:
    from rich.console import Console

    from rpcrl.cli.view import RunView
    from rpcrl.trainer.modes import trainer_of

    console = Console(highlight=False)
    _print_header(console, config)
    view = RunView(console)
    _set_up_logging(console, debug=debug)
    trainer = trainer_of(config.trainer.mode)(config, observer=view, console=lines, console_sink=view.worker_line)
    with ending_in_order():
        return run_to_exit_code(
            lambda: _run(trainer, view, what, console, config),
            lambda: _logs(trainer, view),
            lambda: interrupted_lines(view.where, trainer if what == "fit" else None),
            debug=debug,
        )


def _run(trainer: Trainer, view: RunView, what: str, console: Console, config: RunConfig) -> None:
    with view:
        if what == "fit":
            trainer.fit()
        elif what == "evaluate":
            trainer.evaluate()
        else:
            console.print(f"samples {trainer.generate()}", markup=False, soft_wrap=True)
    if what == "fit":
        for line in _claim(config)[:1]:
            console.print(line, markup=False, style="dim")


def interrupted_lines(where: str, trainer: Trainer | None) -> list[str]:
    """Return where a run was interrupted, and how a training goes on; ``trainer`` is None where none goes on."""
    lines = [f"interrupted in {where}; every process of the run was ended" if where else "interrupted"]
    if trainer is None or not hasattr(trainer, "run"):
        return lines
    checkpoint, run, freq = trainer.last_checkpoint(), trainer.run, trainer.config.trainer.save_freq
    if checkpoint is not None and run.config.is_file():
        command = ["rpcrl", "launch", "--config", str(run.config), "--run-dir", str(run.path), "--resume"]
        lines += [f"last checkpoint: {checkpoint}", f"to go on from it: {shlex.join(command)}"]
    else:
        often = "writes only the final one" if freq < 1 else f"writes one every {freq} steps"
        lines.append(
            f"there is no checkpoint to go on from: trainer.save_freq={freq} {often}; set e.g. trainer.save_freq=1"
        )
    return lines


def run_to_exit_code(
    run: Callable[[], None], logs: Callable[[], Path | None], interrupted: Callable[[], list[str]], *, debug: bool
) -> int:
    """Call ``run`` and return the command's exit code; an error is told in words, with the place of the logs."""
    try:
        run()
    except ConfigError as error:
        click.echo(str(error), err=True)
        return EXIT_CONFIG
    except KeyboardInterrupt as signal:
        for line in interrupted():
            click.echo(line, err=True)
        _tell_logs(logs())
        return signal.exit_code if isinstance(signal, Ended) else EXIT_INTERRUPTED
    except Exception as error:
        return _failed(error, logs(), debug=debug)
    return 0


def _failed(error: Exception, logs: Path | None, *, debug: bool) -> int:
    """Tell an error: one that rpcrl raises on purpose in its own words, any other with its type."""
    expected = isinstance(error, RpcrlError | click.ClickException)
    click.echo(f"the run failed: {error if expected else f'{type(error).__name__}: {error}'}", err=True)
    trace = "".join(traceback.format_exception(error))
    if debug:
        click.echo(trace, err=True)
    elif logs is not None and logs.is_dir():
        (logs / "driver-error.txt").write_text(trace, encoding="utf-8")
        click.echo(f"traceback of the driver: {logs / 'driver-error.txt'} (or --debug)", err=True)
    elif not expected:
        click.echo("--debug shows the traceback", err=True)
    _tell_logs(logs)
    return EXIT_FAILED


def _tell_logs(logs: Path | None) -> None:
    if logs is not None:
        click.echo(f"logs of the processes: {logs}", err=True)


def _logs(trainer: Trainer, view: RunView) -> Path | None:
    """Return the run's log folder; None when the run failed before it had one."""
    run = getattr(trainer, "run", None)
    if run is not None:
        return Path(run.logs)
    return None if view.run_dir is None else view.run_dir / "logs"


def _set_up_logging(console: Console, *, debug: bool) -> None:
    """Send the driver's log through the console, so that it does not tear the progress bar."""
    from rich.logging import RichHandler

    handler = RichHandler(console=console, show_path=debug, markup=False, rich_tracebacks=False)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.DEBUG if debug else logging.WARNING)


def _print_header(console: Console, config: RunConfig) -> None:
    from rpcrl.cli.account_text import account_lines, title
    from rpcrl.version import __version__

    console.print(f"rpcrl {__version__}: {title(config)}", markup=False, soft_wrap=True)
    for line in account_lines(config):
        console.print(line, markup=False, soft_wrap=True)
    for line in _claim(config):
        console.print(line, markup=False, style="dim")


def _claim(config: RunConfig) -> list[str]:
    """Return what a run of a built-in task shows, and how to read it; a reward of one's own makes another task."""
    from rpcrl.config.run import BUILT_IN_TASK
    from rpcrl.tasks.built_in import BUILT_IN_TASKS

    task = BUILT_IN_TASKS.get(config.data.train_files or BUILT_IN_TASK)
    return [] if task is None or config.reward.fn is not None else task.claim.splitlines()
