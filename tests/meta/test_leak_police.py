"""Does the leak police see each kind of leak, and nothing where there is none?"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from tests import leak_police


@contextmanager
def _thread() -> Iterator[None]:
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait, name="forgotten")
    thread.start()
    yield
    stop.set()
    thread.join()


@contextmanager
def _child() -> Iterator[None]:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL):
        yield


@contextmanager
def _orphan() -> Iterator[None]:
    """A grandchild whose parent has exited: only its environment still tells whose it is."""
    read_end, write_end = os.pipe()
    code = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'input()'])"
    subprocess.run([sys.executable, "-c", code], stdin=read_end, stderr=subprocess.DEVNULL, check=True)
    os.close(read_end)
    yield
    os.close(write_end)


@contextmanager
def _descriptor() -> Iterator[None]:
    number = os.open("/proc/self/stat", os.O_RDONLY)
    yield
    os.close(number)


@contextmanager
def _shared_memory() -> Iterator[None]:
    path = Path(f"/dev/shm/rpcrl-police-{os.getpid()}")
    path.write_bytes(b"x")
    yield
    path.unlink()


@contextmanager
def _run_directory() -> Iterator[None]:
    path = tempfile.mkdtemp(prefix="rpcrl-")
    yield
    os.rmdir(path)


@contextmanager
def _variable() -> Iterator[None]:
    os.environ["RPCRL_POLICE"] = "1"
    yield
    del os.environ["RPCRL_POLICE"]


@contextmanager
def _working_directory() -> Iterator[None]:
    before = os.getcwd()
    os.chdir("/")
    yield
    os.chdir(before)


@contextmanager
def _zmq_context() -> Iterator[None]:
    import zmq

    context = zmq.Context()
    context.socket(zmq.PAIR).close()
    yield
    context.term()


@pytest.mark.parametrize(
    ("leak", "told"),
    [
        (_thread, "thread 'forgotten'"),
        (_child, "process"),
        (_orphan, "process"),
        (_descriptor, "file descriptor"),
        (_shared_memory, "shared memory /dev/shm/rpcrl-police-"),
        (_run_directory, "temporary file"),
        (_variable, "environment variable RPCRL_POLICE"),
        (_working_directory, "working directory /"),
        (_zmq_context, "native thread ZMQbg"),
    ],
)
def test_each_kind_of_leak_is_named(leak: Callable[[], AbstractContextManager[None]], told: str) -> None:
    folder, token = Path(tempfile.gettempdir()), os.environ[leak_police.TOKEN]
    before = leak_police.look(folder)

    assert leak_police.leaks(before, folder, token) == []
    with leak():
        deadline = time.monotonic() + 5.0
        found = leak_police.leaks(before, folder, token)
        # A thread of libzmq gives itself its name a moment after it has started.
        while not any(line.startswith(told) for line in found) and time.monotonic() < deadline:
            found = leak_police.leaks(before, folder, token)
    assert any(line.startswith(told) for line in found), found
    assert leak_police.wait_until_clean(before, folder, token, within_s=5.0) == []


def test_only_a_run_that_was_open_before_may_have_new_files_in_shared_memory() -> None:
    folder, token = Path(tempfile.gettempdir()), os.environ[leak_police.TOKEN]
    run = f"/dev/shm/rpcrl-police-{os.getpid()}"
    budget, segment = Path(f"{run}-budget"), Path(f"{run}-{'0' * 16}-3")
    closed = leak_police.look(folder)
    try:
        budget.write_bytes(b"x")
        opened = leak_police.look(folder)
        segment.write_bytes(b"x")
        assert leak_police.leaks(opened, folder, token) == []
        assert leak_police.leaks(closed, folder, token) == [f"shared memory {path}" for path in (segment, budget)]
        budget.unlink()
        assert leak_police.leaks(opened, folder, token) == [f"shared memory {segment}"]
    finally:
        segment.unlink(missing_ok=True)
        budget.unlink(missing_ok=True)


def _run_pytest(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    (folder / "conftest.py").write_text(
        "from tests import conftest\nconftest.LEAK_GRACE_S = 0.1\nfrom tests.conftest import *\n"
    )
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--rootdir", str(folder), *arguments]
    return subprocess.run(
        [*command, str(folder)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_leaking_test_fails_with_the_stack_of_the_thread(tmp_path: Path) -> None:
    (tmp_path / "test_leaking.py").write_text(
        "import threading\n"
        "def wait_for_ever(event):\n"
        "    event.wait()\n"
        "def test_leaks():\n"
        "    threading.Thread(target=wait_for_ever, args=[threading.Event()], daemon=True).start()\n"
    )
    done = _run_pytest(tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "left behind" in done.stdout
    assert "in wait_for_ever" in done.stdout


@pytest.mark.parametrize("processes", [(), ("-n", "2", "--dist", "loadfile")], ids=["one process", "two"])
def test_what_a_module_leaves_fails_the_session_whichever_process_ran_it(
    tmp_path: Path, processes: tuple[str, ...]
) -> None:
    (tmp_path / "test_module.py").write_text(
        "import pathlib, tempfile, pytest\n"
        "@pytest.fixture(scope='module')\n"
        "def untidy():\n"
        "    yield\n"
        "    pathlib.Path(tempfile.gettempdir(), 'forgotten').touch()\n"
        "def test_passes(untidy):\n"
        "    pass\n"
    )
    (tmp_path / "test_other.py").write_text("def test_passes():\n    pass\n")
    done = _run_pytest(tmp_path, *processes)
    assert "2 passed" in done.stdout, done.stdout + done.stderr
    assert done.returncode == 1, done.stdout
    assert "left behind by the session" in done.stdout
    assert "forgotten" in done.stdout
