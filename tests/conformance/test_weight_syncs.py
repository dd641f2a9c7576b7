"""Does every way of weights from trainer to rollout keep every promise of the kit?"""

from pathlib import Path

import pytest

from rpcrl import Controller
from rpcrl.testing.sync_kit import CHECKS, SyncHarness

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(180)]
FILES = f"{Path(__file__).parent / 'file_channel.py'}:FileChannel"
CASES = {
    "naive": ("naive", 2, 2),
    "broadcast-1-to-2": ("broadcast", 1, 2),
    "broadcast-2-to-1": ("broadcast", 2, 1),
    "own-1-to-2": (FILES, 1, 2),
}


@pytest.fixture(scope="module", params=CASES.values(), ids=CASES)
def harness(request, tmp_path_factory):
    backend, trainers, rollouts = request.param
    with (
        Controller(log_dir=tmp_path_factory.mktemp("logs"), start_timeout_s=60) as controller,
        SyncHarness(controller, backend, trainers=trainers, rollouts=rollouts) as opened,
    ):
        yield opened


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_weight_sync_keeps_its_promise(harness, check):
    check(harness)
