"""How does the driver start the agent of its own node, and what if that agent dies?

The agent is ``python -m launcher`` in a session of its own. Its standard input is a pipe from this process: whatever
ends the driver closes the pipe, and the agent then ends everything.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rpcrl import env
from rpcrl.leftovers import remove_run_dir, sweep_processes

__all__ = ["AgentProcess"]


class AgentProcess:
    """The agent of this node, watched by a thread until it is reaped."""

    def __init__(self, bootstrap: Mapping[str, Any], *, on_exit: Callable[[str], None]) -> None:
        self.run_id: str = bootstrap["run_id"]
        self._run_dir = Path(bootstrap["run_dir"])
        self._log_path = os.path.join(bootstrap["log_dir"], "agent.log")
        handover = os.memfd_create("rpcrl-bootstrap", 0)  # inherited on purpose; holds the agent's key
        try:
            os.write(handover, json.dumps(dict(bootstrap)).encode())
            os.lseek(handover, 0, os.SEEK_SET)
            environment = env.without_launcher(env.snapshot())
            environment |= env.child_path() | {env.RUN_ID: self.run_id, env.BOOTSTRAP_FD: str(handover)}
            with open(self._log_path, "ab") as log:
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-m", "launcher"],
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                    env=environment,
                    pass_fds=(handover,),
                    start_new_session=True,
                )
        finally:
            os.close(handover)
        self._on_exit = on_exit
        self._watcher = threading.Thread(target=self._watch, name="rpcrl-agent-watch", daemon=True)
        self._watcher.start()

    @property
    def pid(self) -> int:
        """Process id of the agent."""
        return self._process.pid

    def close(self, timeout_s: float) -> None:
        """Wait for the agent's own end, then insist: close its pipe, at last kill it. Nothing of the run remains."""
        self._watcher.join(timeout_s)
        if self._watcher.is_alive():
            self.kill(timeout_s)
        self._hang_up()

    def kill(self, patience_s: float = 5.0) -> None:
        """End everything at once: the agent ends its workers when its pipe closes."""
        self._hang_up()
        self._watcher.join(patience_s)
        if self._watcher.is_alive():
            self._process.kill()
            self._watcher.join(patience_s)

    def _hang_up(self) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()

    def _watch(self) -> None:
        status = self._process.wait()
        try:
            sweep_processes(self.run_id)  # workers die with their agent; what they had started may not
            remove_run_dir(self._run_dir)
        finally:
            # Whatever went wrong above: every open call waits for this news.
            how = f"was killed by signal {-status}" if status < 0 else f"exited with code {status}"
            self._on_exit(f"the agent of this node (pid {self.pid}) {how}; log: {self._log_path}{self._last_lines()}")

    def _last_lines(self) -> str:
        try:
            with open(self._log_path, encoding="utf-8", errors="replace") as log:
                lines = log.read()[-4_096:].splitlines()[-10:]
        except OSError as error:  # a clean-up of the temporary directory may have taken it
            return f" ({error.strerror})"
        return "".join(f"\n    | {line}" for line in lines)
