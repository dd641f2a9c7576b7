"""Which systems can be measured here, and how is one started and asked?

rpcrl, memcpy and the rivals all run in processes of their own, each by the interpreter that has it, and speak the
protocol of ``driver``. What is not installed is known before anything is started.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rpcrl import env
from rpcrl.bench.driver import Setup, Task
from rpcrl.errors import RpcrlError, UsageError

__all__ = ["ALWAYS", "RIVALS", "Running", "System", "SystemFailed", "find_system", "rivals_folder"]

ROOT = Path(__file__).resolve().parents[2]
START_S = 180.0
"""How long a system may take to start its workers; Ray's first start takes most of a minute on a small machine."""
ANSWER_S = 300.0
END_S = 30.0
_LAST_LINES = 15


class SystemFailed(RpcrlError):
    """A system could not be started or did not answer; the others go on."""


@dataclass(frozen=True)
class _Recipe:
    """How a system is run: a module of rpcrl or a script of the rivals, and in which virtual environment."""

    module: str = ""
    script: str = ""
    venv: str = ""
    needs: str = ""
    """What must be importable there."""


_RECIPES: Mapping[str, _Recipe] = {
    "rpcrl": _Recipe(module="rpcrl.bench.own"),
    "memcpy": _Recipe(module="rpcrl.bench.memory"),
    "raw_zmq": _Recipe(script="raw_zmq.py", needs="zmq"),
    "ray": _Recipe(script="ray_actors.py", venv="ray", needs="ray"),
    "verl_ray": _Recipe(script="verl_ray.py", venv="ray", needs="verl"),
    "monarch": _Recipe(script="monarch_actors.py", venv="monarch", needs="monarch"),
    "torch_rpc": _Recipe(script="torch_rpc.py", needs="torch"),
}
ALWAYS = ("rpcrl", "raw_zmq", "memcpy")
RIVALS = ("ray", "verl_ray", "monarch", "torch_rpc")


@dataclass(frozen=True)
class System:
    """A system that can be started."""

    name: str
    command: tuple[str, ...]
    missing: str = ""
    """Why it cannot, and how to get it."""


def rivals_folder() -> Path:
    """Return where the rivals' scripts lie: beside the package, in a checkout."""
    return ROOT / "benchmarks" / "rivals"


def find_system(name: str, venvs: Path, pythons: Mapping[str, str]) -> System:
    """Look for one system. ``venvs``: where `make bench-rivals` puts environments; ``pythons``: interpreters by name.

    Raises UsageError for a name that is not known.
    """
    recipe = _RECIPES.get(name)
    if recipe is None:
        raise UsageError(f"no system is called {name!r}; known: {', '.join(_RECIPES)}")
    if recipe.module:
        return System(name, (sys.executable, "-m", recipe.module))
    script = rivals_folder() / recipe.script
    if not script.is_file():
        return System(name, (), f"its script {script} is not there: rivals are measured from a checkout of rpcrl")
    python = pythons.get(name) or (str(venvs / recipe.venv / "bin" / "python") if recipe.venv else sys.executable)
    if not os.access(python, os.X_OK):
        return System(
            name,
            (),
            f"not installed: no {python}; `make bench-rivals` installs it, or name the interpreter that has it:"
            f" --rival-python {name}=PATH",
        )
    if python != sys.executable and not _has(python, recipe.needs):
        return System(name, (), f"{python} has no module {recipe.needs}; `make bench-rivals` installs it")
    return System(name, (python, str(script)))


def _has(python: str, module: str) -> bool:
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
    return (
        subprocess.run([python, "-c", code], stdin=subprocess.DEVNULL, capture_output=True, check=False).returncode == 0
    )


@dataclass
class Running:
    """A system with its workers, from ``start`` to ``close``."""

    system: System
    setup: Setup
    about: str = ""
    reasons: dict[Task, str] = field(default_factory=dict)
    """Why it has no such case."""

    def __post_init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="rpcrl-bench-")
        # The rivals' interpreters find rpcrl (its protocol needs the standard library alone), and nothing beside it.
        os.symlink(ROOT / "rpcrl", Path(self._folder.name) / "rpcrl")
        rival = self.system.name not in ("rpcrl", "memcpy")
        path = f"{self._folder.name}{os.pathsep}{rivals_folder()}" if rival else str(ROOT)
        variables = {**env.snapshot(), "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        self._errors = open(Path(self._folder.name) / "errors", "w+b")  # noqa: SIM115  # closed with the process
        self._process = subprocess.Popen(
            self.system.command,
            env=variables,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            cwd=self._folder.name,
        )
        self._pending = b""
        self._ask(asdict(self.setup))

    def wait_ready(self) -> None:
        """Wait until its workers are up. Raises SystemFailed."""
        self.about = str(self._answer(START_S)["ready"])

    def prepare(self, task: Task) -> bool:
        """Have a case prepared; False if the system has no such case. Raises SystemFailed."""
        self._ask({"prepare": asdict(task)})
        answer = self._answer(ANSWER_S)
        if not answer["supported"]:
            self.reasons[task] = str(answer["reason"])
        return bool(answer["supported"])

    def run(self, count: int) -> list[float]:
        """Have the prepared case done ``count`` times; returns the seconds of each. Raises SystemFailed."""
        self._ask({"go": count})
        return [float(seconds) for seconds in self._answer(ANSWER_S)["seconds"]]

    def close(self) -> None:
        """End it, with force if it does not by itself."""
        with contextlib.suppress(SystemFailed):
            self._ask({"end": True})
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._errors.close()
        self._folder.cleanup()

    def _ask(self, question: Mapping[str, Any]) -> None:
        if self._process.stdin is None:
            raise SystemFailed(f"{self.system.name} has no input")
        try:
            self._process.stdin.write(json.dumps(question).encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            raise SystemFailed(self._story("has ended")) from None

    def _answer(self, limit_s: float) -> dict[str, Any]:
        if self._process.stdout is None:
            raise SystemFailed(f"{self.system.name} has no output")
        deadline = time.monotonic() + limit_s
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._pending:
                left_s = deadline - time.monotonic()
                if left_s <= 0 or not selector.select(left_s):
                    raise SystemFailed(self._story(f"did not answer within {limit_s:g} s"))
                piece = os.read(self._process.stdout.fileno(), 1 << 16)
                if not piece:
                    raise SystemFailed(self._story("has ended"))
                self._pending += piece
        line, _, self._pending = self._pending.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _story(self, what: str) -> str:
        self._errors.flush()
        text = Path(self._errors.name).read_text(encoding="utf-8", errors="replace")
        lines = "\n  ".join(text.splitlines()[-_LAST_LINES:])
        return f"{self.system.name} {what}; its last lines:\n  {lines}"


def start_all(systems: Sequence[System], setup: Setup) -> tuple[list[Running], dict[str, str]]:
    """Start systems one after the other; returns (those that are up, why the others are not)."""
    up: list[Running] = []
    failed: dict[str, str] = {}
    for system in systems:
        running = Running(system, setup)
        try:
            running.wait_ready()
        except SystemFailed as error:
            failed[system.name] = str(error)
            running.close()
        else:
            up.append(running)
    return up, failed
