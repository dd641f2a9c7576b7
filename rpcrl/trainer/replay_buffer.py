"""Which groups of samples does the trainer take next, and how old may they be?

Metadata only: a group is the n samples of one prompt, and its rows may be a value or a reference. Nothing here waits,
looks at a clock or calls anybody: whoever hears of an end says so (``finish``, ``fail``), and asks again.

Versions count weight syncs. The staleness of a group is the trainer's version less the lowest version that sampled a
token of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from rpcrl.errors import UsageError

__all__ = ["Drop", "Group", "ReplayBuffer", "Strategy"]

Strategy = Literal["wait", "drop"]


@dataclass(frozen=True)
class Group:
    """The samples of one prompt; ``rows`` is None until they are all there."""

    uid: str
    data_source: str
    version: int
    """Lowest version that samples it: of its submission, and once it is finished of its tokens."""
    order: int
    """Number of its submission: of two groups of one version the earlier one goes first."""
    rows: Any = None

    def staleness(self, version: int) -> int:
        """Return how many versions older than the trainer's this group is, or will at least be."""
        return version - self.version


@dataclass(frozen=True)
class Drop:
    """A prompt that was submitted and is not trained on."""

    uid: str
    data_source: str
    reason: str


class ReplayBuffer:
    """Groups that are being sampled (pending) and those that are there (finished), oldest version first.

    ``max_staleness`` bounds what ``take`` returns. Strategy ``wait`` keeps the bound by waiting: nothing is taken while
    more pending groups are due than could still be taken at this version. Strategy ``drop`` keeps it by dropping what
    has become too old; a prompt that was dropped never comes back.
    """

    def __init__(self, *, max_staleness: int, strategy: Strategy = "wait") -> None:
        if max_staleness < 0:
            raise UsageError(f"max_staleness={max_staleness} must be 0 or more")
        if strategy not in ("wait", "drop"):
            raise UsageError(f"strategy={strategy!r} is neither wait nor drop")
        self._max_staleness = max_staleness
        self._strategy = strategy
        self._pending: dict[str, Group] = {}
        self._finished: dict[str, Group] = {}
        self._submitted = 0
        self._dropped: Counter[tuple[str, str]] = Counter()
        self._news: list[Drop] = []

    def __len__(self) -> int:
        """Return the number of groups that are pending or finished."""
        return len(self._pending) + len(self._finished)

    @property
    def pending(self) -> tuple[Group, ...]:
        """Groups that are being sampled, in order of submission."""
        return tuple(self._pending.values())

    @property
    def num_finished(self) -> int:
        """Number of groups that could be taken, whatever else they wait for."""
        return len(self._finished)

    @property
    def dropped(self) -> Mapping[tuple[str, str], int]:
        """Number of dropped groups by (reason, data source), since the start."""
        return dict(self._dropped)

    def uids(self) -> list[str]:
        """Return the prompts that are neither taken nor dropped, in order of submission."""
        return [group.uid for group in sorted((*self._pending.values(), *self._finished.values()), key=_order)]

    def submit(self, uid: str, *, data_source: str, version: int) -> None:
        """Take note that a prompt is being sampled, by weights of ``version`` or later."""
        if uid in self._pending or uid in self._finished:
            raise UsageError(f"prompt {uid!r} is in the buffer already; each is sampled once")
        self._pending[uid] = Group(uid, data_source, version, self._submitted)
        self._submitted += 1

    def finish(self, uid: str, rows: Any, *, version: int) -> None:
        """Take the samples of a pending prompt; ``version`` is the lowest that sampled one of their tokens."""
        group = self._known(uid)
        self._finished[uid] = Group(uid, group.data_source, version, group.order, rows)

    def fail(self, uid: str, reason: str) -> None:
        """Drop a pending prompt: ``failed``, ``filtered``, or whatever else ``reason`` is to be counted as."""
        self._drop(self._known(uid), reason)

    def evict(self, version: int) -> int:
        """With strategy ``drop``, drop what is too old for ``version``; returns how many groups went."""
        if self._strategy != "drop":
            return 0
        old = [group for group in self._finished.values() if group.staleness(version) > self._max_staleness]
        for group in old:
            del self._finished[group.uid]
            self._drop(group, "stale")
        return len(old)

    def missing(self, count: int, *, version: int, later: int = 0) -> int:
        """Return how many groups have to end before ``count`` can be taken at ``version``; 0: ``take`` returns.

        ``later``: how many more will be taken at this version, after these.
        """
        few = max(0, count - len(self._finished))
        if self._strategy == "drop":
            return few
        due = sum(group.staleness(version) >= self._max_staleness for group in self._pending.values())
        return max(few, due - later)

    def take(self, count: int, *, version: int, later: int = 0) -> list[Group]:
        """Return ``count`` finished groups, lowest version first, then in order of submission; they leave the buffer.

        Raises UsageError unless ``missing`` says 0, or if the bound would not hold.
        """
        missing = self.missing(count, version=version, later=later)
        if missing:
            raise UsageError(f"{missing} groups have to end before {count} can be taken; ask missing() first")
        chosen = sorted(self._finished.values(), key=lambda group: (group.version, group.order))[:count]
        worst = max((group.staleness(version) for group in chosen), default=0)
        if worst > self._max_staleness:
            raise UsageError(
                f"a group is {worst} versions old, and max_staleness is {self._max_staleness}: more prompts were "
                "submitted than this bound has room for"
            )
        for group in chosen:
            del self._finished[group.uid]
        return chosen

    def news(self) -> list[Drop]:
        """Return the drops since the last call."""
        news, self._news = self._news, []
        return news

    def _known(self, uid: str) -> Group:
        if uid not in self._pending:
            raise UsageError(f"prompt {uid!r} is not being sampled")
        return self._pending.pop(uid)

    def _drop(self, group: Group, reason: str) -> None:
        self._dropped[reason, group.data_source] += 1
        self._news.append(Drop(group.uid, group.data_source, reason))


def _order(group: Group) -> int:
    return group.order
