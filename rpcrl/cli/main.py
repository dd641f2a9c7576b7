"""Which commands does ``rpcrl`` have? Each loads what it needs when it runs: ``rpcrl --help`` loads no torch.

Exit codes: 0 done, 1 the run or a check failed, 2 the command line or the configuration is wrong and nothing was
started, 130 interrupted (143 by SIGTERM, 129 by SIGHUP).
"""

from __future__ import annotations

import errno
import os
import sys
from typing import NoReturn

import click

from rpcrl.cli.bench import bench
from rpcrl.cli.doctor import doctor
from rpcrl.cli.launch import launch
from rpcrl.cli.logs import logs
from rpcrl.cli.plan import plan
from rpcrl.errors import ConfigError, RpcrlError
from rpcrl.version import __version__

__all__ = ["cli", "main"]

EXIT_FAILED, EXIT_CONFIG, EXIT_INTERRUPTED = 1, 2, 130


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="rpcrl")
def cli() -> None:
    """RL post-training of language models: one driver program, worker groups over ZeroMQ, no Ray."""


cli.add_command(launch)
cli.add_command(plan)
cli.add_command(doctor)
cli.add_command(logs)
cli.add_command(bench)


def main(arguments: list[str] | None = None) -> NoReturn:
    """Run one command and leave the process with its exit code."""
    try:
        code = cli.main(arguments, prog_name="rpcrl", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        code = error.exit_code
    except ConfigError as error:
        click.echo(str(error), err=True)
        code = EXIT_CONFIG
    except RpcrlError as error:
        click.echo(f"rpcrl: {error}", err=True)
        code = EXIT_FAILED
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EIO, errno.EPIPE):
            raise
        code = _output_lost(error)
    except click.Abort:
        code = EXIT_INTERRUPTED
    try:
        sys.stdout.flush()
    except OSError as error:
        code = _output_lost(error)
    sys.exit(code if isinstance(code, int) else 0)


def _output_lost(error: OSError) -> int:
    """Say that standard output took no more, and keep the interpreter from trying again at its end."""
    click.echo(f"rpcrl: the output could not be written: {error.strerror}", err=True)
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return EXIT_FAILED


if __name__ == "__main__":
    main()
