"""Which ports does a running controller open? None on one machine; one, with keys, on TCP."""

from __future__ import annotations

import psutil
import pytest

from rpcrl import Controller, Dispatch, ResourcePool, Worker, WorkerGroup, register

pytestmark = pytest.mark.cluster


class Answering(Worker):
    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def pid(self) -> int:
        import os

        return os.getpid()


def _listening() -> set[tuple[str, int]]:
    """Return where this process and its descendants accept TCP connections."""
    processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
    return {
        (connection.laddr.ip, connection.laddr.port)
        for process in processes
        for connection in process.net_connections(kind="tcp")
        if connection.status == psutil.CONN_LISTEN
    }


def test_p83_no_tcp_port_is_opened_on_one_machine() -> None:
    before = _listening()
    with Controller(console="off"), WorkerGroup(ResourcePool([2]), Answering) as group:
        descendants = {child.pid for child in psutil.Process().children(recursive=True)}
        assert set(group.pid()) <= descendants, "the workers must be among the processes that are looked at"
        assert _listening() - before == set()


def test_p83_on_tcp_one_port_is_opened_and_only_on_the_loopback() -> None:
    before = _listening()
    with Controller(transport="tcp", console="off"), WorkerGroup(ResourcePool([2]), Answering) as group:
        assert len(set(group.pid())) == 2
        opened = _listening() - before
    assert len(opened) == 1, opened
    assert {address for address, _ in opened} == {"127.0.0.1"}
