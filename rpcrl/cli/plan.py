"""What would a configuration do, and what is wrong with it? ``rpcrl plan`` starts nothing."""

from __future__ import annotations

import json
from typing import Any

import click

from rpcrl.cli.options import configuration_options, given
from rpcrl.errors import ConfigError

__all__ = ["plan"]

EXIT_CONFIG = 2


@click.command()
@configuration_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object; with mistakes too (exit code 2).")
@click.option("--keys", "list_keys", is_flag=True, help="List every setting with its meaning and default.")
@click.pass_context
def plan(context: click.Context, /, *, as_json: bool, list_keys: bool, **options: Any) -> None:
    """Print the account of a configuration: samples, updates, replicas, devices, share, weight syncs.

    Takes the arguments of `rpcrl launch` and refuses what it refuses.
    """
    if list_keys:
        _print_keys()
        return
    loaded = given(**options).read()
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
    if loaded.violations:
        if not as_json:
            click.echo(str(ConfigError(loaded.violations)), err=True)
        context.exit(EXIT_CONFIG)


def _print_keys() -> None:
    from rpcrl.config.keys import settings, short_key

    for setting in settings().values():
        click.echo(f"{short_key(setting.key)}\n    {setting.description}")
