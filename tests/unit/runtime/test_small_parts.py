"""Console, agent watch and connection of a worker: what goes wrong in them is told, and stops nobody."""

from __future__ import annotations

import logging
import shutil
import socket
import threading
from pathlib import Path

import pytest

from rpcrl.errors import AuthenticationError
from rpcrl.leftovers import create_run_dir
from rpcrl.runtime.agent_process import AgentProcess
from rpcrl.runtime.console import Console
from rpcrl.runtime.worker_life import _connect
from rpcrl.transport.keys import new_key_pair


def test_a_console_that_fails_once_takes_the_next_line(caplog: pytest.LogCaptureFixture):
    taken: list[str] = []
    arrived = threading.Event()

    def sink(line: str) -> None:
        if "first" in line:
            raise BrokenPipeError("the terminal is gone")
        taken.append(line)
        arrived.set()

    console = Console(sink)
    with caplog.at_level(logging.WARNING):
        console.write("[r 0]", ("first", "first again", "second"), "log")
        assert arrived.wait(10)
    console.close()
    assert taken == ["[r 0] second"]
    assert [record.getMessage() for record in caplog.records] == [
        "the console takes no lines (BrokenPipeError: the terminal is gone)"
    ]


def test_the_end_of_an_agent_is_told_even_if_its_log_is_gone(tmp_path: Path):
    run_dir, log_dir = create_run_dir("r1", tmp_path / "run"), tmp_path / "logs"
    log_dir.mkdir()
    told: list[str] = []
    heard = threading.Event()

    def on_exit(how: str) -> None:
        told.append(how)
        heard.set()

    bootstrap = {
        "run_id": "r1",
        "run_dir": str(run_dir),
        "log_dir": str(log_dir),
        "address": f"ipc://{run_dir}/nobody.sock",
        "identity": "agent-0",
        "incarnation": "i",
    }
    agent = AgentProcess(bootstrap, on_exit=on_exit)
    shutil.rmtree(log_dir)
    agent.kill()
    assert heard.wait(20)
    assert "No such file or directory" in told[0]


def test_a_worker_takes_as_long_for_the_handshake_as_it_is_told():
    own, listener = new_key_pair(), new_key_pair()
    with socket.create_server(("127.0.0.1", 0)) as mute:  # takes connections, and says nothing
        connection = _connect(
            {
                "address": f"tcp://127.0.0.1:{mute.getsockname()[1]}",
                "identity": "w0",
                "handshake_s": 0.25,
                "keys": {"public": own.public, "secret": own.secret, "server_public": listener.public},
            }
        )
        try:
            with pytest.raises(AuthenticationError, match=r"no handshake within 0\.25 s"):
                connection.receive(20)
        finally:
            connection.close()
