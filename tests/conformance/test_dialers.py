"""Does every dialer keep every promise of ``transport/base.py``?"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rpcrl.testing.dialer_kit import DIALER_CHECKS
from rpcrl.testing.transport_harness import Harness


@pytest.fixture(params=["inproc", "ipc", "tcp"])
def harness(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Harness]:
    directory: Path = tmp_path_factory.mktemp("d")
    directory.chmod(0o700)
    with Harness(request.param, directory) as opened:
        yield opened


@pytest.mark.parametrize("check", DIALER_CHECKS, ids=lambda check: check.__name__)
def test_dialer_keeps_its_promise(harness: Harness, check: Callable[[Harness], None]) -> None:
    check(harness)
