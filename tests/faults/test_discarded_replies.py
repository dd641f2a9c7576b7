"""A reply that was lost and is no longer kept: the caller hears that the method has run, and it is not run again."""

from __future__ import annotations

from pathlib import Path

import pytest

from rpcrl import Controller, Dispatch, ResourcePool, Worker, WorkerGroup, register
from rpcrl.errors import ReplyDiscardedError
from rpcrl.runtime.replies import MAX_BYTES
from rpcrl.testing.proxy import FaultProxy
from rpcrl.wire.messages import Result

pytestmark = pytest.mark.cluster


class Counting(Worker):
    """Counts its calls and answers with as many bytes as asked for."""

    def __init__(self) -> None:
        self.num_calls = 0

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def grow(self, num_bytes: int) -> bytes:
        self.num_calls += 1
        return bytes(num_bytes)

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def calls(self) -> int:
        return self.num_calls


def test_a_lost_reply_over_the_bound_is_reported_and_the_method_runs_once(tmp_path: Path) -> None:
    with (
        Controller(log_dir=tmp_path / "logs", console="off", shared_memory_bytes=0) as controller,
        FaultProxy(controller.address, f"ipc://{controller._run_dir}/proxy.sock") as proxy,
    ):
        controller.worker_address = proxy.address
        group = WorkerGroup(ResourcePool([1]), Counting)
        lost = proxy.drop(lambda message: isinstance(message, Result), count=1)
        with pytest.raises(ReplyDiscardedError):
            group.grow.submit(MAX_BYTES + 1).result(timeout_s=30)
        assert lost.num_matched == 1
        assert group.calls() == 1
        assert len(group.grow(MAX_BYTES + 1)) == MAX_BYTES + 1, "a reply that is not lost may be of any size"
        group.close()


def test_a_lost_reply_in_shared_memory_is_kept_whatever_its_size(tmp_path: Path) -> None:
    with (
        Controller(log_dir=tmp_path / "logs", console="off") as controller,
        FaultProxy(controller.address, f"ipc://{controller._run_dir}/proxy.sock") as proxy,
    ):
        controller.worker_address = proxy.address
        group = WorkerGroup(ResourcePool([1]), Counting)
        lost = proxy.drop(lambda message: isinstance(message, Result), count=1)
        assert group.grow.submit(MAX_BYTES + 1).result(timeout_s=30) == bytes(MAX_BYTES + 1)
        assert lost.num_matched == 1
        assert group.calls() == 1
        group.close()
