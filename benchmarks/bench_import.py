"""What does starting cost? Seconds of ``import rpcrl`` and of ``rpcrl --help``, each in a fresh interpreter.

The first row is an interpreter that does nothing: subtract it to see what rpcrl itself adds.
"""

from __future__ import annotations

import os
import subprocess
import sys

from report import ROOT, options, report

from rpcrl.bench.measure import Case, measure, timed


def _command(*arguments: str) -> list[str]:
    return [sys.executable, *arguments]


def main() -> None:
    chosen = options(__doc__ or "")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}

    def run(*arguments: str) -> None:
        subprocess.run(
            _command(*arguments),
            env=environment,
            cwd="/",
            check=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )

    cases = [
        Case("python", "start", timed(lambda: run("-c", "pass"))),
        Case("rpcrl", "import rpcrl", timed(lambda: run("-c", "import rpcrl"))),
        Case("rpcrl", "rpcrl --help", timed(lambda: run("-m", "rpcrl.cli.main", "--help"))),
        Case("rpcrl", "import DataProto", timed(lambda: run("-c", "from rpcrl import DataProto"))),
    ]
    rows = measure(cases, rounds=3 if chosen.quick else 15, warm_up=1, per_turn=1, budget_s=10 if chosen.quick else 90)
    report("bench_import: seconds to start", rows, chosen.json)


if __name__ == "__main__":
    main()
