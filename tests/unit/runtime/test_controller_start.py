"""A controller that cannot start leaves nothing: no run directory, no thread, no process.

The tests' names are short because they stand in the path of a socket.
"""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from rpcrl.errors import TransportError
from rpcrl.runtime import controller as module
from rpcrl.runtime.controller import Controller


@pytest.fixture
def parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    runtime_dir = tmp_path / "r"
    runtime_dir.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime_dir))
    return runtime_dir


def leave_nothing(parent: Path, before: set[threading.Thread]) -> None:
    assert list(parent.iterdir()) == []
    assert not {thread.name for thread in set(threading.enumerate()) - before}


def test_no_log_directory(parent: Path, tmp_path: Path):
    before = set(threading.enumerate())
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        Controller(log_dir=tmp_path / "file" / "logs")
    leave_nothing(parent, before)


def test_no_listener(parent: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    before = set(threading.enumerate())

    def refuse(*args: object, **kwargs: object) -> None:
        raise TransportError("cannot listen")

    monkeypatch.setattr(module, "listen", refuse)
    with pytest.raises(TransportError, match="cannot listen"):
        Controller(log_dir=tmp_path / "logs")
    leave_nothing(parent, before)


def test_no_agent(parent: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    before = set(threading.enumerate())
    monkeypatch.setattr("sys.executable", str(tmp_path / "no-python"))
    with pytest.raises(FileNotFoundError, match="no-python"):
        Controller(log_dir=tmp_path / "logs")
    leave_nothing(parent, before)
