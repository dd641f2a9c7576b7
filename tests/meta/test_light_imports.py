"""What does a light process load? Looked at in a fresh interpreter, because this one has loaded everything."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.meta.sources import ROOT

HEAVY = ("torch", "zmq", "numpy", "pydantic", "transformers", "tensordict")


def _loaded_after(statement: str) -> set[str]:
    """Return the heavy packages that are loaded once ``statement`` has run."""
    code = f"import sys\n{statement}\nimport json\nprint('\\n' + json.dumps(sorted(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL
    )
    assert done.returncode == 0, done.stderr
    return set(HEAVY) & set(json.loads(done.stdout.splitlines()[-1]))


def test_import_rpcrl_loads_nothing_heavy() -> None:
    assert _loaded_after("import rpcrl") == set()


@pytest.mark.parametrize("module", ["rpcrl.wire.messages", "rpcrl.transport.base", "rpcrl.topology", "rpcrl.errors"])
def test_the_plain_modules_load_nothing_heavy(module: str) -> None:
    assert _loaded_after(f"import {module}") == set()


@pytest.mark.parametrize(
    "module",
    [
        "rpcrl.wire.codec",
        "rpcrl.transport.open",
        "rpcrl.dispatch.mode",
        "rpcrl.runtime.worker_group",
        "launcher.agent",
        "rpcrl.engines.sampling_settings",
    ],
)
def test_the_rpc_core_and_the_launcher_load_no_torch(module: str) -> None:
    assert not _loaded_after(f"import {module}") & {"torch", "transformers", "tensordict"}


def test_rpcrl_help_loads_no_torch() -> None:
    call = (
        "sys.argv = ['rpcrl', '--help']\n"
        "from rpcrl.cli.main import main\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert not end.code, end.code"
    )
    assert not _loaded_after(call) & {"torch", "transformers", "tensordict", "zmq"}
