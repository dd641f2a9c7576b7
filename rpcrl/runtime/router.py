"""What does a group's handle need in order to call its workers? The controller gives it, and so does a worker's end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from rpcrl.runtime.caller import Part
    from rpcrl.runtime.future import PendingReplies
    from rpcrl.wire.imports import ImportPolicy
    from rpcrl.wire.messages import Encoded

__all__ = ["Router"]


class Router(Protocol):
    """The way to the workers of all groups of a run; every method may be called from any thread."""

    @property
    def run_id(self) -> str:
        """Name of the run."""
        ...

    @property
    def imports(self) -> ImportPolicy:
        """Which modules' functions and classes may travel."""
        ...

    def check_usable(self) -> None:
        """Raise ClosedError or UsageError if nothing can be called by this router."""
        ...

    def call(self, group: str, role: str, method: str, parts: Sequence[Part], pending: PendingReplies) -> None:
        """Send one call; ``pending`` settles with the replies or with the reason why there are none."""
        ...

    def defer(self, work: Callable[[], None]) -> None:
        """Run ``work``, which waits for nothing, outside of the I/O thread soon."""
        ...

    def place(self, payload: Encoded, receivers: Sequence[str]) -> Encoded:
        """Put large buffers into shared memory, for receivers that see it: they are copied when this returns."""
        ...

    def cancel(self, pending: PendingReplies) -> None:
        """Give a call up."""
        ...
