"""How do the agent's messages reach the controller? One thread owns the connection; the main thread never waits for it.

Towards the controller there is a queue, back there is a list and an eventfd that the main thread's selector watches.
"""

from __future__ import annotations

import os
import threading
from collections import deque

from rpcrl.errors import DecodeError, PeerUnreachableError
from rpcrl.logs import get_logger
from rpcrl.transport.base import ClientKeys, Connection, Limits
from rpcrl.transport.open import connect
from rpcrl.wire.frames import from_frames, to_frames
from rpcrl.wire.messages import Message

__all__ = ["Link"]

_RETRY_S = 0.05
_log = get_logger(__name__)


class Link:
    """The agent's end of its connection. ``send``, ``received`` and ``close`` are for the main thread."""

    def __init__(self, address: str, *, identity: str, limits: Limits, keys: ClientKeys | None) -> None:
        self._address = address
        self._identity = identity
        self._limits = limits
        self._keys = keys
        self._outgoing: deque[Message] = deque()
        self._incoming: deque[Message] = deque()
        self._connection: Connection | None = None
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="agent-link", daemon=True)
        self.event_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        """Readable when there is something to take from ``received``."""
        self.failure: BaseException | None = None
        """Why the link has ended; None while it works."""

    def start(self) -> None:
        """Connect in the background."""
        self._thread.start()

    def send(self, message: Message) -> None:
        """Queue a message; order is kept."""
        self._outgoing.append(message)
        self._wake()

    @property
    def backlog(self) -> int:
        """Number of messages that the transport has not taken yet."""
        return len(self._outgoing)

    def received(self) -> list[Message]:
        """Return the messages that have come since the last call. Look at ``failure``, too."""
        try:
            os.eventfd_read(self.event_fd)
        except BlockingIOError:
            pass
        messages = []
        while self._incoming:
            messages.append(self._incoming.popleft())
        return messages

    def close(self, timeout_s: float) -> None:
        """Send what is queued and close, in at most ``timeout_s``; a thread that takes longer dies with the process."""
        self._closing = True
        self._wake()
        self._thread.join(timeout_s)

    def _wake(self) -> None:
        connection = self._connection
        if connection is not None:
            connection.wake()

    def _run(self) -> None:
        try:
            connection = connect(self._address, identity=self._identity, limits=self._limits, keys=self._keys)
            try:
                self._connection = connection
                self._serve(connection)
            finally:
                self._connection = None
                connection.close()
        except BaseException as error:
            self.failure = error
            os.eventfd_write(self.event_fd, 1)

    def _serve(self, connection: Connection) -> None:
        while True:
            all_sent = self._send_queued(connection)
            if self._closing and all_sent:
                return
            frames = connection.receive(None if all_sent else _RETRY_S)
            if frames is None:
                continue
            try:
                message = from_frames(frames)
            except DecodeError as error:
                _log.warning("a message of the controller is dropped: %s", error)
                continue
            self._incoming.append(message)
            os.eventfd_write(self.event_fd, 1)

    def _send_queued(self, connection: Connection) -> bool:
        """Hand queued messages to the transport; return False when it takes no more now."""
        while self._outgoing:
            try:
                connection.send(to_frames(self._outgoing[0]))
            except PeerUnreachableError:
                # Its queue is full: the controller does not read. Nothing is lost, console lines wait in their queue.
                return False
            self._outgoing.popleft()
        return True
