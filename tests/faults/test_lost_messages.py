"""Messages get lost between the driver and a worker: a call still runs once, and its caller gets the value."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rpcrl import Controller, DataProto, ResourcePool, WorkerGroup
from rpcrl.testing.proxy import FaultProxy
from rpcrl.wire.messages import Call, Result
from tests.cluster.group_workers import Toy
from tests.cluster.reference_workers import Producer

pytestmark = pytest.mark.cluster


def test_p64_a_lost_reply_and_a_lost_call_run_once(tmp_path: Path):
    with (
        Controller(log_dir=tmp_path / "logs") as controller,
        FaultProxy(controller.address, f"ipc://{controller._run_dir}/proxy.sock") as proxy,
    ):
        controller.worker_address = proxy.address
        group = WorkerGroup(ResourcePool([1]), Toy)
        replies = proxy.drop(lambda message: isinstance(message, Result), count=1)
        assert group.inc.submit().result(20) == [1]
        assert replies.num_matched == 1
        calls = proxy.drop(lambda message: isinstance(message, Call), count=2)
        assert group.inc.submit().result(20) == [2]
        assert calls.num_matched == 2
        assert group.inc() == [3]
        group.close()


def test_p63_rows_whose_acknowledgement_is_lost_are_stored_once(tmp_path: Path):
    rows = DataProto.from_dict({"x": torch.arange(4)})
    with (
        Controller(log_dir=tmp_path / "logs") as controller,
        FaultProxy(controller.address, f"ipc://{controller._run_dir}/proxy.sock") as proxy,
    ):
        controller.worker_address = proxy.address
        group = WorkerGroup(ResourcePool([1]), Producer)
        acknowledgements = proxy.drop(lambda message: isinstance(message, Result), count=1)
        kept = group.make.submit(rows).result(20)
        assert acknowledgements.num_matched == 1
        assert group.kept() == [1], "the retry has stored nothing a second time"
        assert kept["y"].tolist() == [0, 2, 4, 6]
        group.close()
