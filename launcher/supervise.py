"""What happens to the workers of a node from their start to their end?

One selector of the agent's main thread drives everything here: output pipes, ``SIGCHLD`` (``reap``) and timers
(``next_deadline_s``, ``on_time``). Nothing waits for a worker, so that a slow one never delays the news of another.
"""

from __future__ import annotations

import os
import selectors
import signal
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from launcher.memory import count_oom_kills
from launcher.output import ConsoleQueue, LineBuffer, LogFile, Selector, TailKeeper
from launcher.plan import ProcessSpec
from launcher.shim import CANNOT_START, START_FAILED
from launcher.spawn import Spawned, spawn
from launcher.sweep import signal_group, sweep_worker
from rpcrl.logs import get_logger
from rpcrl.wire.messages import Message, WorkerExited, WorkerStarted

__all__ = ["Supervisor"]

_READ_BYTES = 256 << 10
_FLUSH_EVERY_S = 0.05
_log = get_logger(__name__)


@dataclass
class _Worker:
    spec: ProcessSpec
    process: Spawned
    log: LogFile
    selector: Selector
    oom_kills_before: int
    lines: LineBuffer = field(default_factory=LineBuffer)
    tail: TailKeeper = field(default_factory=TailKeeper)
    output_open: bool = True
    grace_s: float = 0.0
    kill_at_s: float | None = None


class Supervisor:
    """The workers of one node; belongs to the main thread.

    ``report`` takes each message for the controller; ``console_has_room`` says whether the way there is free, else
    console lines wait in a bounded queue.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        report: Callable[[Message], None],
        *,
        run_id: str,
        host: str,
        console: str = "default",
        console_has_room: Callable[[], bool] = lambda: True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._selector = selector
        self._report = report
        self._run_id = run_id
        self._host = host
        self._console = console
        self._console_has_room = console_has_room
        self._clock = clock
        self._workers: dict[int, _Worker] = {}
        self._queue = ConsoleQueue()
        self._flushed_at_s = 0.0

    @property
    def running(self) -> list[str]:
        """Identities of the workers that have not been reaped."""
        return [worker.spec.identity for worker in self._workers.values()]

    # ---- start and stop ---------------------------------------------------------------------------------------

    def start(self, specs: Iterable[ProcessSpec]) -> None:
        """Start workers; report each as WorkerStarted, or as WorkerExited with a start error."""
        for spec in specs:
            try:
                if spec.identity in self.running:
                    raise ValueError(f"a worker named {spec.identity!r} already runs on this node")
                log = LogFile(spec.log_path)
                before = count_oom_kills()
                try:
                    process = spawn(spec)
                except BaseException:
                    log.close()
                    raise
            except (OSError, ValueError) as error:
                self.report_not_started(spec.identity, f"{type(error).__name__}: {error}", spec.log_path)
                continue
            worker = _Worker(spec, process, log, Selector(self._console, spec.rank), before)
            self._workers[process.pid] = worker
            self._selector.register(process.output_fd, selectors.EVENT_READ, lambda w=worker: self._read(w))
            self._report(WorkerStarted(spec.identity, process.pid, spec.log_path))

    def report_not_started(self, identity: str, problem: str, log_path: str = "") -> None:
        """Report a worker that does not exist, with the reason."""
        self._report(WorkerExited(identity, self._host, 0, None, None, 0, False, (), log_path, problem))

    def stop(self, identities: Sequence[str] | None, grace_s: float) -> None:
        """Ask workers (None: all) to end: SIGTERM now, SIGKILL after ``grace_s``. ``reap`` reports their ends."""
        for worker in self._workers.values():
            if identities is None or worker.spec.identity in identities:
                deadline_s = self._clock() + grace_s
                if worker.kill_at_s is None or deadline_s < worker.kill_at_s:
                    worker.grace_s, worker.kill_at_s = grace_s, deadline_s
                signal_group(worker.process.pid, signal.SIGTERM if grace_s > 0 else signal.SIGKILL)

    def kill_all(self) -> None:
        """End every worker at once and save its last output; nothing is reported."""
        for pid in self._workers:
            signal_group(pid, signal.SIGKILL)
        for worker in self._workers.values():
            self._drain(worker)
            worker.log.close()

    # ---- time -------------------------------------------------------------------------------------------------

    def next_deadline_s(self) -> float | None:
        """Return when ``on_time`` is due next, on the clock; None when nothing is."""
        times = [worker.kill_at_s for worker in self._workers.values() if worker.kill_at_s is not None]
        if self._queue:
            times.append(self._flushed_at_s + _FLUSH_EVERY_S)
        return min(times, default=None)

    def on_time(self) -> None:
        """Do what is due: SIGKILL after a grace period, console lines."""
        now_s = self._clock()
        for worker in self._workers.values():
            if worker.kill_at_s is not None and worker.kill_at_s <= now_s:
                worker.kill_at_s = None
                self._note(worker, f"did not end within {worker.grace_s:g} s of SIGTERM; sending SIGKILL")
                signal_group(worker.process.pid, signal.SIGKILL)
        if self._queue and now_s >= self._flushed_at_s + _FLUSH_EVERY_S:
            self._flushed_at_s = now_s
            if self._console_has_room():
                for message in self._queue.take():
                    self._report(message)

    # ---- output -----------------------------------------------------------------------------------------------

    def _read(self, worker: _Worker) -> int:
        """Take in what the pipe holds now, up to one buffer, so that each worker gets its turn; return the bytes."""
        try:
            data = os.read(worker.process.output_fd, _READ_BYTES)
        except BlockingIOError:
            return 0
        except OSError as error:
            _log.warning("output of %s: %s", worker.spec.identity, error)
            data = b""
        if not data:
            self._close_output(worker)
            return 0
        if not worker.log.write(data):
            self._note(worker, f"the log is incomplete: {worker.log.problem}", in_log=False)
        self._take_lines(worker, worker.lines.feed(data))
        return len(data)

    def _drain(self, worker: _Worker) -> None:
        """Read what an ended worker has left in its pipe.

        That is at most what the pipe can hold, and the bound matters: a survivor may hold the pipe open and write on.
        """
        left_bytes = worker.process.pipe_bytes
        while worker.output_open and left_bytes > 0:
            read_bytes = self._read(worker)
            if not read_bytes:
                break
            left_bytes -= read_bytes
        self._take_lines(worker, worker.lines.finish())
        self._close_output(worker)

    def _close_output(self, worker: _Worker) -> None:
        if worker.output_open:
            worker.output_open = False
            self._selector.unregister(worker.process.output_fd)
            os.close(worker.process.output_fd)

    def _take_lines(self, worker: _Worker, lines: Iterable[str]) -> None:
        for line in lines:
            worker.tail.add(line)
            if worker.selector.wants(line):
                self._queue.add(worker.spec.identity, line, worker.spec.log_path)

    def _note(self, worker: _Worker, text: str, *, in_log: bool = True) -> None:
        """Put a warning of our own among the worker's lines."""
        line = f"[rpcrl agent] WARNING: worker {worker.spec.identity} (pid {worker.process.pid}) {text}"
        sys.stderr.write(f"{line}\n")
        if in_log:
            worker.log.write(f"{line}\n".encode())
        worker.tail.add(line)
        if self._console != "off":
            self._queue.add(worker.spec.identity, line, worker.spec.log_path)

    # ---- ends -------------------------------------------------------------------------------------------------

    def reap(self) -> None:
        """Handle every child that has ended: report workers, collect adopted orphans. Due after each SIGCHLD."""
        while True:
            try:
                # WNOWAIT: the pid stays taken until its process group is swept.
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if ended is None:
                return
            worker = self._workers.pop(ended.si_pid, None)
            if worker is None:
                os.waitpid(ended.si_pid, 0)
            else:
                self._finish(worker)

    def _finish(self, worker: _Worker) -> None:
        spec, pid = worker.spec, worker.process.pid
        left = sweep_worker(self._run_id, spec.identity, pid)
        if left:
            _log.info("worker %s left processes %s behind; they are ended", spec.identity, left)
        self._drain(worker)
        worker.log.close()
        _, status, usage = os.wait4(pid, 0)
        name = _signal_name(os.WTERMSIG(status)) if os.WIFSIGNALED(status) else None
        exit_code = os.WEXITSTATUS(status) if name is None else None
        lines = worker.tail.lines()
        for message in self._queue.take_of(spec.identity):
            self._report(message)
        self._report(
            WorkerExited(
                identity=spec.identity,
                host=self._host,
                pid=pid,
                exit_code=exit_code,
                signal=name,
                peak_rss_bytes=usage.ru_maxrss * 1024,
                out_of_memory=name == "SIGKILL" and count_oom_kills() > worker.oom_kills_before,
                last_lines=lines,
                log_path=spec.log_path,
                start_error=_start_error(exit_code, lines),
            )
        )


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _start_error(exit_code: int | None, lines: Sequence[str]) -> str:
    """Return why the shim could not run the module; empty when it could."""
    if exit_code != START_FAILED:
        return ""
    return next((line.removeprefix(CANNOT_START) for line in lines if line.startswith(CANNOT_START)), "")
