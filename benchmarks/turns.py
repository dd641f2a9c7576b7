"""How do several trainers take their steps in turn, each in a process of its own? Both ends of that.

One that is not at its turn waits for a line on its standard input and costs nothing. Only the standard library is used:
rivals live in virtual environments that do not have rpcrl.
"""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
START_S = 120.0
TURN_S = 60.0


class Turns:
    """The trainer's end: ``wait`` for the turn, do a step, tell its figures by ``done``."""

    def __init__(self) -> None:
        # What libraries print must not get between the figures.
        self._out = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)

    def wait(self) -> None:
        """Say that everything is ready, and wait for the turn."""
        print("ready", file=self._out)
        if not sys.stdin.readline():
            raise SystemExit("nobody gives this trainer a turn any more")

    def done(self, **figures: float) -> None:
        """Tell what the step took (``step``) and anything else worth keeping."""
        print(json.dumps(figures), file=self._out)


class Trainer:
    """The other end of one trainer: starts it and gives it turns."""

    def __init__(self, name: str, command: Sequence[str | Path], environment: Mapping[str, str] | None = None) -> None:
        self.name = name
        self._read = b""
        self.turns: list[dict[str, Any]] = []
        self._log = tempfile.NamedTemporaryFile(prefix="rpcrl-turns-", suffix=".log")  # noqa: SIM115  # closed with the process
        paths = os.pathsep.join([str(ROOT), str(ROOT / "benchmarks")])
        self._process = subprocess.Popen(
            [str(part) for part in command],
            env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", **(environment or {})},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
        )

    def ready(self, timeout_s: float = START_S) -> None:
        """Wait until the trainer could begin."""
        line = self._line(timeout_s)
        if line != "ready":
            raise SystemExit(f"{self.name} said {line!r} instead of 'ready'")

    def turn(self, *, last: bool) -> None:
        """Have one step made; its figures are in ``turns``."""
        stdin = self._process.stdin
        if stdin is None:
            raise SystemExit(f"{self.name} has no input")
        stdin.write(b"go\n")
        stdin.flush()
        self.turns.append(json.loads(self._line(TURN_S)))
        if not last:
            self.ready(TURN_S)

    def close(self) -> None:
        """End the process, which may have something to write down first."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(timeout=60.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()

    def _line(self, timeout_s: float) -> str:
        out = self._process.stdout
        if out is None:
            raise SystemExit(f"{self.name} has no output")
        deadline_s = time.monotonic() + timeout_s
        with selectors.DefaultSelector() as selector:
            selector.register(out, selectors.EVENT_READ)
            while b"\n" not in self._read:
                if time.monotonic() > deadline_s:
                    raise SystemExit(f"{self.name} said nothing for {timeout_s:.0f} s{self._told()}")
                if selector.select(timeout=0.5):
                    more = os.read(out.fileno(), 65536)
                    if not more:
                        raise SystemExit(f"{self.name} ended with exit code {self._process.wait()}{self._told()}")
                    self._read += more
        line, self._read = self._read.split(b"\n", 1)
        return line.decode().strip()

    def _told(self) -> str:
        return "; its last lines:\n" + Path(self._log.name).read_text(errors="replace")[-3000:]


def in_turn(trainers: Sequence[Trainer], steps: int, *, at_once: int = 1) -> None:
    """Give each trainer ``steps`` turns, ``at_once`` of them in a row; who begins changes from round to round."""
    try:
        for trainer in trainers:
            trainer.ready()
        for number, first in enumerate(range(0, steps, at_once)):
            shift = number % len(trainers)
            for trainer in [*trainers[shift:], *trainers[:shift]]:
                for step in range(first, min(first + at_once, steps)):
                    trainer.turn(last=step == steps - 1)
    finally:
        for trainer in trainers:
            trainer.close()
