"""Who owns a transport's end? One thread, which takes messages, runs what others post to it, and keeps time.

When the thread has ended, for whatever reason, its owner has been told, and posted commands run in the thread that
posts them: nobody waits for a thread that is gone.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from rpcrl.logs import get_logger
from rpcrl.runtime.commands import Commands
from rpcrl.runtime.threads import new_thread
from rpcrl.shm.buffers import Buffer
from rpcrl.transport.base import ManyPeers

__all__ = ["Handler", "IoThread", "leave_signals_to_main"]

IDLE_S = 1.0
"""Finalizers cannot wake the thread: what they leave is taken up at the latest after this."""
MESSAGES_PER_TURN = 64
"""Between two looks at the commands: neither calls nor replies wait for ever."""

logger = get_logger(__name__)


class Handler(Protocol):
    """What the thread works for; all of it is called in the thread."""

    def take(self, peer: str, frames: Sequence[Buffer]) -> None:
        """Take a message."""
        ...

    def tick(self) -> None:
        """Do what is due by now."""
        ...

    def next_tick_at(self) -> float | None:
        """Return when ``tick`` has something to do next, on the monotonic clock."""
        ...

    def failed(self, error: BaseException) -> None:
        """Take the error that has ended the thread."""
        ...


class IoThread:
    """The thread that owns one end. ``post`` and ``stop`` are for any thread, everything else is for itself."""

    def __init__(self, end: ManyPeers, handler: Handler, *, name: str) -> None:
        self._end = end
        self._handler = handler
        self._name = name
        self._commands = Commands()
        self._timers: list[tuple[float, Callable[[], None]]] = []
        self._stopping = False
        self._thread = new_thread(self._run, name=name)

    def start(self) -> None:
        """Start the thread; called once, when the handler is complete."""
        self._thread.start()

    def post(self, command: Callable[[], None]) -> None:
        """Run ``command`` in the thread soon; here and now when that thread has ended."""
        self._commands.put(command)
        self._end.wake()

    def stop(self, last: Callable[[], None]) -> None:
        """Run ``last`` in the thread and end it; the end of the transport is closed then."""

        def run_last() -> None:
            last()
            self._stopping = True

        self.post(run_last)
        self._thread.join(timeout=30.0)

    def end(self) -> None:
        """End the thread after this turn; called in it."""
        self._stopping = True

    def join(self, timeout_s: float) -> None:
        """Wait for the thread's end."""
        self._thread.join(timeout_s)

    def after(self, seconds: float, command: Callable[[], None]) -> None:
        """Run ``command`` in so many seconds."""
        self._timers.append((time.monotonic() + seconds, command))

    def _run(self) -> None:
        leave_signals_to_main()
        try:
            while not self._stopping:
                received = self._end.receive(self._patience_s())
                self._commands.run()
                self._take_messages(received)
                self._run_timers()
                self._handler.tick()
        except BaseException as error:
            logger.exception("the I/O thread %s failed", self._name)
            self._handler.failed(error)
        finally:
            self._commands.end()
            self._end.close()

    def _take_messages(self, received: tuple[str, Sequence[Buffer]] | None) -> None:
        for _ in range(MESSAGES_PER_TURN):
            if received is None:
                return
            self._handler.take(*received)
            received = self._end.receive(0.0)
        if received is not None:
            self._handler.take(*received)

    def _patience_s(self) -> float:
        if self._commands:
            return 0.0
        due = [at for at, _ in self._timers]
        if (tick_at := self._handler.next_tick_at()) is not None:
            due.append(tick_at)
        return max(0.0, min(due) - time.monotonic()) if due else IDLE_S

    def _run_timers(self) -> None:
        now = time.monotonic()
        due = [entry for entry in self._timers if entry[0] <= now]
        for entry in due:
            self._timers.remove(entry)
            entry[1]()


def leave_signals_to_main() -> None:
    """A signal that another thread takes does not interrupt the main thread's wait, and would be seen too late."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
