"""A controller for tests, on each transport."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rpcrl import Controller


@pytest.fixture(params=["ipc", "tcp"])
def controller(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Controller]:
    with Controller(transport=request.param, log_dir=tmp_path / "logs", start_timeout_s=60) as opened:
        assert opened.address.startswith(request.param), "the transport that was asked for is the one that runs"
        yield opened


@pytest.fixture
def ipc(tmp_path: Path) -> Iterator[Controller]:
    with Controller(log_dir=tmp_path / "logs", start_timeout_s=60) as opened:
        yield opened


@pytest.fixture
def lines() -> list[str]:
    return []


@pytest.fixture
def listening(tmp_path: Path, lines: list[str]) -> Iterator[Callable[[], Controller]]:
    """A controller whose console lines are gathered."""
    with Controller(log_dir=tmp_path / "logs", console_sink=lines.append, start_timeout_s=60) as opened:
        yield lambda: opened
