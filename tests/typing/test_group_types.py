"""Does mypy --strict see what a worker group takes and returns, with the plugin and without it?

The samples say it themselves, at the end of a line: ``# R:`` a revealed type (without module names), ``# E:`` a part of
the error on that line. Nothing else may be reported, and everything that they say must be.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SAMPLES = Path("tests/typing/samples")
SETTINGS = """[mypy]
strict = true
explicit_package_bases = true
{plugins}
# Their types play no part here, and reading torch takes longer than everything else.
[mypy-torch.*,numpy.*,tensordict.*,psutil.*,zmq.*]
ignore_missing_imports = true
follow_imports = skip
"""
REPORT = re.compile(r"(?P<path>[^:]+):(?P<line>\d+): (?P<kind>error|note): (?P<text>.*)")


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("mypy")


def check(cache: Path, *names: str, plugin: bool = True, exit_code: int = 1) -> dict[tuple[str, int], list[str]]:
    """Run mypy over samples; returns what it says of each line, revealed types in short."""
    settings = cache / ("with.ini" if plugin else "without.ini")
    settings.write_text(SETTINGS.format(plugins="plugins = rpcrl.mypy_plugin" if plugin else ""))
    folder = cache / settings.stem
    command = ["mypy", "--config-file", str(settings), "--cache-dir", str(folder), "--no-color-output"]
    done = subprocess.run(
        [sys.executable, "-m", *command, *(str(SAMPLES / name) for name in names)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == exit_code, done.stdout + done.stderr
    said: dict[tuple[str, int], list[str]] = {}
    for line in done.stdout.splitlines():
        match = REPORT.fullmatch(line)
        if match is None or (match["kind"] == "note" and "Revealed type" not in match["text"]):
            continue
        text = match["text"]
        if match["kind"] == "note":
            text = "R: " + re.sub(r"\b(?:\w+\.)+(\w)", r"\1", text.removeprefix('Revealed type is "').removesuffix('"'))
        said.setdefault((Path(match["path"]).name, int(match["line"])), []).append(text)
    return said


def promised(*names: str) -> dict[tuple[str, int], str]:
    found = {}
    for name in names:
        for number, line in enumerate((ROOT / SAMPLES / name).read_text().splitlines(), start=1):
            match = re.search(r"#\s(R: .*|E: .*)$", line)
            if match is not None:
                found[name, number] = match[1]
    assert len(found) >= 5
    return found


def differences(said: dict[tuple[str, int], list[str]], expected: dict[tuple[str, int], str]) -> str:
    wrong = [f"{place}: nobody expected {texts}" for place, texts in said.items() if place not in expected]
    for place, text in expected.items():
        got = said.get(place, [])
        fits = got == [text] if text.startswith("R: ") else any(text[3:] in other for other in got)
        if not fits:
            wrong.append(f"{place}: expected {text!r}, mypy says {got}")
    return "\n".join(wrong)


def test_results_and_mistakes_under_strict(cache: Path) -> None:
    # The classes first and alone: the second run has them from mypy's cache, as a second run of anybody has.
    check(cache, "workers.py", exit_code=0)
    names = ("worker_side.py", "driver.py", "forward.py")
    assert differences(check(cache, *names), promised(*names)) == ""


def test_without_the_plugin_groups_still_check(cache: Path) -> None:
    assert differences(check(cache, "no_plugin.py", plugin=False), promised("no_plugin.py")) == ""
