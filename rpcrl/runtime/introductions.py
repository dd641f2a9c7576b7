"""Which workers may call which groups? A plain table of the controller, with a way of sending.

A worker that wants to call a group is announced to each member; when every member has answered where it listens, the
worker gets the addresses, and from then on the two talk without the controller. The controller stays the one that
tells of ends: of a group to its callers, of a caller to the members.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from rpcrl.runtime.membership import Group, Member
from rpcrl.wire.messages import (
    ExpectPeer,
    ForgetPeer,
    GroupEnded,
    Introduction,
    Message,
    PeerAddress,
    PeerExpected,
)

__all__ = ["Introductions"]


@dataclass
class _Callers:
    group: Group
    members: frozenset[str]
    introduced: set[str] = field(default_factory=set)
    """Every worker that was announced to the members."""
    answers: dict[str, dict[str, str]] = field(default_factory=dict)
    """Worker that waits → member → address."""
    complete: dict[str, Introduction] = field(default_factory=dict)
    """Worker that was introduced → what it was told."""


class Introductions:
    """Who was introduced to whom; belongs to the controller's I/O thread."""

    def __init__(self, insist: Callable[[str, Message], None]) -> None:
        self._insist = insist
        self._groups: dict[str, _Callers] = {}

    def begin(self, caller: Member, group: Group) -> None:
        """Announce a worker to every member of a group that is ready; say it again to one that asks again."""
        callers = self._groups.setdefault(group.name, _Callers(group, frozenset(group.identities)))
        if caller.identity in callers.complete:
            self._insist(caller.identity, callers.complete[caller.identity])
            return
        callers.introduced.add(caller.identity)
        callers.answers[caller.identity] = {}
        for member in group.members:
            self._insist(member.identity, ExpectPeer(caller.identity, caller.public_key))

    def expected(self, member: str, answer: PeerExpected) -> None:
        """Take a member's answer; the last one brings the introduction to its end."""
        for callers in self._groups.values():
            answers = callers.answers.get(answer.identity)
            if answers is None or member not in callers.members:
                continue
            answers[member] = answer.address
            if len(answers) == len(callers.group.members):
                del callers.answers[answer.identity]
                introduction = callers.complete[answer.identity] = _introduction(callers.group, answers)
                self._insist(answer.identity, introduction)

    def end(self, group: Group, ended: GroupEnded) -> None:
        """Tell a group's callers that it takes no calls any more."""
        callers = self._groups.pop(group.name, None)
        for identity in sorted(callers.introduced) if callers is not None else ():
            self._insist(identity, ended)

    def gone(self, caller: str) -> None:
        """Tell the groups that a worker was introduced to that it will not call again."""
        for callers in self._groups.values():
            if caller in callers.introduced:
                callers.introduced.discard(caller)
                callers.answers.pop(caller, None)
                callers.complete.pop(caller, None)
                for identity in callers.group.alive:
                    self._insist(identity, ForgetPeer(caller))


def _introduction(group: Group, addresses: dict[str, str]) -> Introduction:
    return Introduction(
        group.name,
        tuple(
            PeerAddress(member.identity, member.incarnation, member.rank, addresses[member.identity], member.public_key)
            for member in group.members
        ),
    )
