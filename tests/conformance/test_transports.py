"""Does every transport keep every promise of ``transport/base.py``?"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rpcrl.testing.transport_kit import CHECKS, Harness


@pytest.fixture(params=["inproc", "ipc", "tcp"])
def harness(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Harness]:
    directory: Path = tmp_path_factory.mktemp("t")
    directory.chmod(0o700)
    with Harness(request.param, directory) as opened:
        yield opened


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_transport_keeps_its_promise(harness: Harness, check: Callable[[Harness], None]) -> None:
    check(harness)
