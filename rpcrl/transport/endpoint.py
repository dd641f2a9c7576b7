"""What must hold before any end of any transport is used? The same process, not closed, and a message within limits."""

from __future__ import annotations

import os
from collections.abc import Sequence

from rpcrl.errors import ClosedError, MessageTooLargeError, UsageError
from rpcrl.shm.buffers import Buffer, num_bytes
from rpcrl.transport.base import Limits

__all__ = ["Endpoint"]


class Endpoint:
    """The guards that listeners and connections share."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._pid = os.getpid()
        self._closed = False

    def _check_usable(self) -> None:
        if os.getpid() != self._pid:
            raise UsageError(
                f"this {type(self).__name__} belongs to process {self._pid}; it cannot be used after a fork. Start"
                " processes with the spawn method (multiprocessing.get_context('spawn')) or subprocess"
            )
        if self._closed:
            raise ClosedError(f"this {type(self).__name__} was closed")

    def _check_message(self, frames: Sequence[Buffer]) -> None:
        """Check a whole message before its first frame goes out: half a message would glue itself to the next one."""
        if not frames:
            raise UsageError("a message needs at least one frame")
        size = sum(num_bytes(frame) for frame in frames)
        if size > self._limits.max_message_bytes:
            raise MessageTooLargeError(
                f"a message of {size} bytes; this connection takes at most {self._limits.max_message_bytes}"
                " (Limits.max_message_bytes); nothing was sent"
            )
