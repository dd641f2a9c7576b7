"""What holds for every test? It leaves nothing behind, slow ones wait to be asked for, GPUs are counted.

``pytest`` runs the fast tests; ``pytest --slow`` runs the slow ones too, ``pytest --slow -m slow`` only
those.
"""

from __future__ import annotations

import functools
import os
import shutil
import signal
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests import leak_police

LEAK_GRACE_S = 5.0
"""How long a process or thread that is ending may take; a clean test waits for nothing."""

settings.register_profile(
    "rpcrl",
    derandomize=True,
    deadline=None,
    # The leak police looks around a test once, not around each example: hypothesis need not warn about that.
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
settings.load_profile("rpcrl")

_session: dict[str, str] = {}
_left_by_others: list[str] = []


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="run the tests marked slow as well")
    parser.addoption("--vllm", action="store_true", help="run the tests marked vllm; vLLM must be installed then")
    parser.addoption("--update-public-api", action="store_true", help="rewrite tests/meta/public_api.txt")


def pytest_configure(config: pytest.Config) -> None:
    """Give the session its own temporary folder and a mark that all its descendants carry."""
    # A job in the background (`&`, nohup) ignores these, and every program that a test starts would inherit it.
    for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)
    # The tests' own folders (tmp_path) stay where pytest keeps them; what rpcrl makes goes to the other.
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
    # Short: the path of a Unix socket has room for about 100 characters.
    folder = tempfile.mkdtemp(prefix="rt-")
    token = uuid.uuid4().hex
    _session.update(folder=folder, token=token)
    os.environ[leak_police.TOKEN] = token
    os.environ["TMPDIR"] = folder
    os.environ["XDG_RUNTIME_DIR"] = folder
    tempfile.tempdir = None
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ.setdefault(name, "1")
    # Processes that a test starts import this checkout and the tests' own worker modules, however pytest was started.
    root = str(Path(__file__).resolve().parents[1])
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    # The terminal is the same everywhere: rich looks at these.
    os.environ["TERM"] = "xterm-256color"
    for name in ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "LINES", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        os.environ.pop(name, None)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for option in ("slow", "vllm"):
        marked = [item for item in items if item.get_closest_marker(option) is not None]
        if marked and not config.getoption(f"--{option}"):
            config.hook.pytest_deselected(items=marked)
            items[:] = [item for item in items if item.get_closest_marker(option) is None]


def pytest_runtest_setup(item: pytest.Item) -> None:
    for marker, needed in (("gpu", 1), ("gpu2", 2)):
        if item.get_closest_marker(marker) is not None and _cuda_devices() < needed:
            pytest.skip(f"needs {needed} CUDA device(s), this machine shows {_cuda_devices()}")


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail the session when something outlived its last test (a module's fixture that did not clean up)."""
    if not _session:
        return
    folder, token = Path(_session["folder"]), _session["token"]
    left = [
        f"process {pid}: {command}"
        for pid in leak_police.carriers(token)
        if (command := leak_police._command(pid))
        and not any(allowed in command for allowed in leak_police.ALLOWED_COMMANDS)
    ]
    left += [
        f"temporary file {path}" for path in folder.iterdir() if not path.name.startswith(leak_police.ALLOWED_TEMPORARY)
    ]
    shutil.rmtree(folder, ignore_errors=True)
    output: dict[str, object] | None = getattr(session.config, "workeroutput", None)
    if output is not None:  # one of several processes that share the tests (pytest-xdist): the first one tells
        output["left_behind"] = left
        return
    left += _left_by_others
    if left and session.exitstatus == pytest.ExitCode.OK:
        reporter = session.config.pluginmanager.get_plugin("terminalreporter")
        if reporter is not None:
            reporter.write_line("\nleft behind by the session:", red=True)
            for line in left:
                reporter.write_line(f"  {line}", red=True)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Take over what one of several test processes has left behind."""
    _left_by_others.extend(getattr(node, "workeroutput", {}).get("left_behind", []))


@pytest.fixture(autouse=True)
def leaves_nothing_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves a process, thread, descriptor, file, variable or another working directory."""
    folder, token = Path(_session["folder"]), _session["token"]
    before = leak_police.look(folder)
    yield
    left = leak_police.wait_until_clean(before, folder, token, within_s=LEAK_GRACE_S)
    leak_police.restore(before)
    if left:
        listed = "\n".join(f"  - {line}" for line in left)
        pytest.fail(f"{request.node.nodeid} left behind:\n{listed}", pytrace=False)


@pytest.fixture
def environment() -> Iterator[dict[str, str]]:
    """The process's environment, for a test to change; every variable is put back afterwards."""
    before = dict(os.environ)
    yield os.environ  # type: ignore[misc]
    os.environ.clear()
    os.environ.update(before)


@functools.cache
def _cuda_devices() -> int:
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0
