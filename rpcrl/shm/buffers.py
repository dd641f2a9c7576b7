"""What stands in a message's list of buffers when the bytes lie in shared memory?

``Placed`` on the sender's side, ``Lent`` on the receiver's. Both are light: no system call, no lock.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from rpcrl.errors import DecodeError

__all__ = ["Buffer", "Hold", "Lent", "Placed"]

Buffer = bytes | bytearray | memoryview


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

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.view.nbytes


class Lent:
    """One buffer that lies in another process's arena; it may be taken once, and then belongs to who took it."""

    __slots__ = ("_view", "nbytes")

    def __init__(self, view: memoryview) -> None:
        self._view: memoryview | None = view
        self.nbytes = view.nbytes

    def take(self) -> memoryview:
        """Hand the memory over, writable. The lease ends when the last thing made from it is gone."""
        view = self._view
        if view is None:
            raise DecodeError("this message was decoded before: its buffers in shared memory were handed over then")
        self._view = None
        return view
