"""What stands in a message's list of buffers when the bytes lie in shared memory?

``Placed`` on the sender's side, ``Lent`` on the receiver's. Both are light: no system call, no lock.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from rpcrl.errors import DecodeError

__all__ = ["Buffer", "Hold", "Lent", "Placed", "Raw", "num_bytes", "view_of"]

Raw = bytes | bytearray | memoryview


class Hold:
    """Keeps a slot from being used again, for as long as the sender may still send what is in it."""

    __slots__ = ("__weakref__",)


@dataclass(frozen=True, eq=False)
class Placed:
    """One buffer that the sender has written into its arena. Its bytes do not change any more."""

    slot: int
    """Number of the segment."""
    offset: int
    view: memoryview = field(repr=False)
    """The bytes themselves, read-only: for receivers that do not share memory with this process."""
    hold: Hold = field(repr=False)


class Lent:
    """One buffer that lies in another process's arena; it may be taken once, and then belongs to who took it."""

    __slots__ = ("_view", "num_bytes")

    def __init__(self, view: memoryview) -> None:
        self._view: memoryview | None = view
        self.num_bytes = view.nbytes

    @property
    def view(self) -> memoryview:
        """The memory. Raises DecodeError when it was taken."""
        if self._view is None:
            raise DecodeError("this message was decoded before: its buffers in shared memory were handed over then")
        return self._view

    def take(self) -> memoryview:
        """Hand the memory over, writable. The lease ends when the last thing made from it is gone."""
        view = self.view
        self._view = None
        return view


Buffer = Raw | Placed | Lent


def view_of(buffer: Buffer) -> memoryview:
    """Return the bytes of a buffer, wherever they are."""
    return buffer.view if isinstance(buffer, Placed | Lent) else memoryview(buffer)


def num_bytes(buffer: Buffer) -> int:
    """Return the size of a buffer."""
    return buffer.num_bytes if isinstance(buffer, Lent) else view_of(buffer).nbytes
