"""Do imports go down only? The contracts stand in pyproject.toml; `make check` runs them as well."""

from __future__ import annotations

import subprocess
import sys

from tests.meta.sources import ROOT, imports_of, package_files


def test_import_contracts_hold() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "from importlinter.cli import lint_imports_command; lint_imports_command()"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 broken" in done.stdout


def test_zeromq_is_imported_by_the_transport_only() -> None:
    # The linter sees imports at any depth of a file too; this one also covers modules it does not list.
    elsewhere = [
        f"{path}:{line}"
        for path in package_files()
        for line, module in imports_of(path)
        if module.split(".")[0] == "zmq" and path.parts[:2] != ("rpcrl", "transport")
    ]
    assert elsewhere == []
