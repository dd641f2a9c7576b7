"""Who has fallen silent? A thread of the controller watches its workers' heartbeats and judges by a rule.

Three things are not a death: a connection that is back within half a heartbeat, the driver's own pause (a laptop that
slept, a debugger, SIGSTOP: whatever was cut meanwhile gets time to come back), and a worker that is gone in order.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping

from rpcrl.logs import get_logger
from rpcrl.transport.base import Allowed, KeyPair
from rpcrl.transport.pulse import CUT_AFTER, PulseListener

__all__ = ["PulseWatch", "Silences"]

_LOOK_EVERY = 0.25
_GRACE = 0.5
"""Heartbeats that a lost connection has to come back; with ``CUT_AFTER`` and the pace a death is told within three."""
_PAUSED_AFTER = 1.0
"""Heartbeats without a look: this process itself was stopped meanwhile."""
_FORGIVE_FOR = 2.0

logger = get_logger(__name__)


class Silences:
    """Judges by what is seen at each look; no clock and no socket of its own."""

    def __init__(self, heartbeat_s: float, *, now: float) -> None:
        self._heartbeat_s = heartbeat_s
        self._looked_at = now
        self._forgive_until = now
        self._lost_at: dict[str, float] = {}

    def on_look(self, connected: Mapping[str, bool], *, now: float) -> list[tuple[str, float]]:
        """Take who is connected; return who is given up, and the seconds for which each has been silent at least."""
        if now - self._looked_at > self._heartbeat_s * _PAUSED_AFTER:
            self._forgive_until = now + self._heartbeat_s * _FORGIVE_FOR
        self._looked_at = now
        silent: list[tuple[str, float]] = []
        self._lost_at = {
            peer: self._lost_at.get(peer, now) for peer, is_connected in connected.items() if not is_connected
        }
        for peer, lost_at in self._lost_at.items():
            if now >= max(lost_at + self._heartbeat_s * _GRACE, self._forgive_until):
                silent.append((peer, now - lost_at + self._heartbeat_s * CUT_AFTER))
        return silent


class PulseWatch:
    """Listens at ``address`` in a thread of its own; ``on_silent(identity, silent_s)`` is called there, once a worker.

    ``keys`` and ``allowed`` are those of a listener. Raises TransportError when it cannot listen.
    """

    def __init__(
        self,
        address: str,
        heartbeat_s: float,
        *,
        keys: KeyPair | None,
        allowed: Allowed,
        on_silent: Callable[[str, float], None],
    ) -> None:
        self._listener = PulseListener(
            address, heartbeat_s=heartbeat_s, keys=keys, allowed=allowed if keys is not None else None
        )
        self._heartbeat_s = heartbeat_s
        self._on_silent = on_silent
        self._stopping = False
        self._owner_pid = os.getpid()
        self._thread = threading.Thread(target=self._run, name="rpcrl-pulse", daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        """Where workers connect their pulse."""
        return self._listener.address

    def close(self) -> None:
        """End the thread and close the listener."""
        if os.getpid() != self._owner_pid:
            return
        self._stopping = True
        self._listener.wake()
        self._thread.join(timeout=10.0)

    def _run(self) -> None:
        silences = Silences(self._heartbeat_s, now=time.monotonic())
        try:
            while not self._stopping:
                connected = self._listener.look(self._heartbeat_s * _LOOK_EVERY)
                for peer, silent_s in silences.on_look(connected, now=time.monotonic()):
                    self._listener.forget(peer)
                    self._on_silent(peer, silent_s)
        except Exception:
            logger.exception("heartbeats are not watched any more; exits of workers still are")
        finally:
            self._listener.close()
