"""What would a configuration do, and what is wrong with it? ``rpcrl plan`` starts nothing."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from rpcrl.cli.options import configuration_options, given
from rpcrl.errors import ConfigError

if TYPE_CHECKING:
    from rpcrl.config.run import RunConfig

__all__ = ["plan"]

EXIT_CONFIG = 2


@click.command()
@configuration_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object; with mistakes too (exit code 2).")
@click.option("--keys", "list_keys", is_flag=True, help="List every setting with its meaning and default.")
@click.pass_context
def plan(context: click.Context, /, *, as_json: bool, list_keys: bool, **options: Any) -> None:
    """Print the account of a configuration: samples, updates, replicas, devices, share, weight syncs.

    Takes the arguments of `rpcrl launch`. Broken rules, and models, prompts or rewards that cannot be loaded, are
    refused as a launch would (exit code 2). Modes, engines and devices that it would not run are accounted with a note.
    """
    if list_keys:
        _print_keys()
        return
    from rpcrl.config.launch_rules import resume_checks
    from rpcrl.trainer.sources import source_checks

    loaded = given(**options).read(also=(resume_checks, source_checks))
    if as_json:
        from rpcrl.config.account import account, account_json

        figures = None if loaded.config is None else account(loaded.config)
        violations = [
            {"key": found.key, "problem": found.problem, "remedies": list(found.remedies)}
            for found in loaded.violations
        ]
        click.echo(json.dumps({**account_json(figures), "violations": violations}, indent=2))
    elif loaded.config is not None:
        from rpcrl.cli.account_text import account_lines, title

        click.echo(title(loaded.config))
        click.echo("\n".join(account_lines(loaded.config)))
        for line in _notes(loaded.config):
            click.echo(line)
    if loaded.violations:
        if not as_json:
            click.echo(str(ConfigError(loaded.violations)), err=True)
        context.exit(EXIT_CONFIG)


def _notes(config: RunConfig) -> list[str]:
    """Return what is accounted here and would not run: a line each."""
    from rpcrl.cli.processes import device_checks
    from rpcrl.config.launch_rules import version_checks

    refused = (*version_checks(config), *device_checks(config))
    return [f"launch in this version refuses: {violation}" for violation in refused]


def _print_keys() -> None:
    from rpcrl.config.keys import settings, short_key

    for setting in settings().values():
        click.echo(f"{short_key(setting.key)}\n    {setting.description}")
