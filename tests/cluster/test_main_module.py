"""Classes and functions of ``__main__``: scripts, ``python -m``, and the starts that cannot work and say so."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.cluster

ROOT = Path(__file__).parents[2]

SCRIPT = """
from dataclasses import dataclass
from rpcrl import Controller, Dispatch, ResourcePool, Worker, WorkerGroup, register

LOADED = print("the top level runs")

@dataclass
class Job:
    name: str
    size: int

def triple(x):
    return 3 * x

class Mine(Worker):
    @register
    def work(self, job: Job, function):
        return Job(job.name + "!", function(job.size))

def main():
    with Controller() as controller:
        group = WorkerGroup(ResourcePool([2]), Mine)
        results = group.work(Job("a", 5), triple)
        assert all(type(result) is Job for result in results), results
        print([(result.name, result.size) for result in results])

"""
GUARD = 'if __name__ == "__main__":\n    main()\n'


def run(arguments: list[str], cwd: Path, *, stdin: str = "") -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        input=stdin,
        capture_output=True,
        text=True,
        timeout=90,
        env=environment,
        check=False,
    )


def test_a_guarded_script(tmp_path: Path):
    (tmp_path / "script.py").write_text(SCRIPT + GUARD)
    done = run(["script.py"], tmp_path)
    assert done.returncode == 0, done.stderr
    assert "[('a!', 15), ('a!', 15)]" in done.stdout


def test_a_script_elsewhere_imports_its_neighbours(tmp_path: Path):
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "neighbour.py").write_text("def triple(x):\n    return 3 * x\n")
    text = SCRIPT.replace("def triple(x):\n    return 3 * x\n", "from neighbour import triple\n")
    text = text.replace("Controller()", 'Controller(allow_imports=["neighbour"])')
    (folder / "script.py").write_text(text + GUARD)
    done = run([str(folder / "script.py")], tmp_path)
    assert done.returncode == 0, done.stderr
    assert "[('a!', 15), ('a!', 15)]" in done.stdout


@pytest.mark.parametrize("name", ["program.tool", "program"])
def test_under_dash_m(tmp_path: Path, name: str):
    package = tmp_path / "program"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "constants.py").write_text("FACTOR = 3\n")
    text = SCRIPT.replace("return 3 * x", "return FACTOR * x")
    file = package / ("tool.py" if "." in name else "__main__.py")
    file.write_text("from .constants import FACTOR\n" + text + GUARD)
    done = run(["-m", name], tmp_path)
    assert done.returncode == 0, done.stderr
    assert "[('a!', 15), ('a!', 15)]" in done.stdout


def test_an_unguarded_script_gets_a_message_and_no_fork_bomb(tmp_path: Path):
    (tmp_path / "script.py").write_text(SCRIPT + "main()\n")
    done = run(["script.py"], tmp_path)
    assert done.returncode != 0
    assert 'if __name__ == "__main__":' in done.stderr
    assert "inside a worker process" in done.stderr
    assert done.stdout.count("the top level runs") == 1


@pytest.mark.parametrize("arguments", [["-c", SCRIPT + GUARD], ["-"]])
def test_a_class_that_no_worker_can_load_gets_a_message(tmp_path: Path, arguments: list[str]):
    done = run(arguments, tmp_path, stdin=SCRIPT + GUARD if arguments == ["-"] else "")
    assert done.returncode != 0
    assert "interactive session" in done.stderr
    assert "put it into a .py file" in done.stderr


def test_a_local_class_gets_a_message(tmp_path: Path):
    text = SCRIPT.replace("def main():\n", "def main():\n    class Mine(Worker):\n        pass\n\n")
    (tmp_path / "script.py").write_text(text + GUARD)
    done = run(["script.py"], tmp_path)
    assert "defined inside a function" in done.stderr
    assert done.returncode != 0


def test_a_users_own_launcher_folder_is_not_taken_for_ours(tmp_path: Path):
    (tmp_path / "launcher").mkdir()
    (tmp_path / "launcher" / "__init__.py").write_text("raise RuntimeError('the user has a launcher too')\n")
    (tmp_path / "script.py").write_text(SCRIPT + GUARD)
    done = run(["script.py"], tmp_path)
    assert done.returncode == 0, done.stderr
    assert "[('a!', 15), ('a!', 15)]" in done.stdout
