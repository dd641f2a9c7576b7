"""With which error does a call end that has failed on one of its ranks? A plain table: failures in, errors out, time
passed in.

The first failure ends the call, but not at once: what has failed for the same reason says so within a moment, and when
a rank has died, its peers often complain before its agent has reported the death. So the call is held back until every
rank has answered, or for ``GRACE_S``; failures of one text become one, with their ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from rpcrl.errors import RemoteError
from rpcrl.runtime.future import PendingReplies

__all__ = ["GRACE_S", "FailedCalls", "join"]

GRACE_S = 0.5


@dataclass
class _Failed:
    pending: PendingReplies
    due_at: float
    errors: list[RemoteError] = field(default_factory=list)


class FailedCalls:
    """The calls of one I/O thread that have failed and are held back."""

    def __init__(self) -> None:
        self._failed: dict[int, _Failed] = {}

    def add(self, pending: PendingReplies, error: RemoteError, *, now: float) -> None:
        """Take the failure of one rank."""
        failed = self._failed.setdefault(id(pending), _Failed(pending, now + GRACE_S))
        failed.errors.append(error)
        self.answered(pending)

    def answered(self, pending: PendingReplies) -> None:
        """Look whether every rank of the call has answered now; then it ends."""
        failed = self._failed.get(id(pending))
        if failed is not None and not _still_running(failed):
            self._end(failed)

    def end_due(self, *, now: float) -> None:
        """End the calls that have been held back for long enough."""
        for failed in [failed for failed in self._failed.values() if failed.due_at <= now]:
            self._end(failed)

    def next_due_at(self) -> float | None:
        """Return when ``end_due`` has something to do next."""
        return min((failed.due_at for failed in self._failed.values()), default=None)

    def withdraw(self, pending: PendingReplies) -> list[RemoteError]:
        """Give up holding a call back: it ends with another error. Returns what it has raised so far."""
        failed = self._failed.pop(id(pending), None)
        return [] if failed is None else _grouped(failed.errors)

    def _end(self, failed: _Failed) -> None:
        del self._failed[id(failed.pending)]
        failed.pending.fail(join(failed.errors, _still_running(failed)))


def _still_running(failed: _Failed) -> list[int]:
    raised = {error.rank for error in failed.errors}
    return [rank for rank in failed.pending.missing_ranks if rank not in raised]


def join(errors: Sequence[RemoteError], still_running: Sequence[int] = ()) -> RemoteError:
    """Return the earliest error; it tells of the same on other ranks, of later ones, and of ranks that still run."""
    first, *others = _grouped(errors)
    first.others, first.still_running = tuple(others), tuple(still_running)
    return first


def _grouped(errors: Sequence[RemoteError]) -> list[RemoteError]:
    """Return one error of each text, in the order of the first of each, with the ranks of all."""
    kinds: dict[tuple[str, str], RemoteError] = {}
    for error in errors:
        known = kinds.setdefault((error.type_name, error.message), error)
        if known is not error:
            known.ranks = (*known.ranks, *error.ranks)
    return list(kinds.values())
