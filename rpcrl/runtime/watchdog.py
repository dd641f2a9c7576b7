"""Which call takes long, and where is each of its ranks? Reported, and never acted on: a deadline is the method's own.

When a call is older than a bound, its ranks are asked for their stacks; what they answer within a second is told, ranks
of one stack together. A rank that does not answer is alive (heartbeats see to that) and holds its interpreter in one
long step. The same call is told of again each time it is twice as old.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from rpcrl.errors import RpcrlError, name_ranks
from rpcrl.logs import get_logger
from rpcrl.runtime.caller import Caller
from rpcrl.runtime.console import Console
from rpcrl.runtime.future import PendingReplies
from rpcrl.wire.messages import AskProgress, CallId, Message, Progress, Step

__all__ = ["Reports", "Watchdog"]

ANSWER_S = 1.0
LOOK_EVERY = 0.25
"""Of the bound; calls are looked at no more often than that."""
REPORT_FILE = "slow-calls.log"

logger = get_logger(__name__)


class Reports:
    """Tells of slow calls: on the console, unless it is off, and in a file beside the workers' logs."""

    def __init__(self, console: Console | None, log_dir: Path | None) -> None:
        self._console = console
        self._path = log_dir / REPORT_FILE if log_dir is not None else None

    def __call__(self, text: str) -> None:
        """Tell one report."""
        if self._path is not None:
            try:
                with self._path.open("a", encoding="utf-8") as file:
                    file.write(f"{text}\n")
            except OSError as error:
                logger.warning("%s cannot be written: %s", self._path, error)
        if self._console is not None:
            self._console.write("[rpcrl]", tuple(text.splitlines()), str(self._path or "no file"))


@dataclass
class _Inquiry:
    pending: PendingReplies
    age_s: float
    until: float
    asked: dict[CallId, int]
    """Call → rank."""
    answers: dict[int, Step] = field(default_factory=dict)


class Watchdog:
    """Watches the open calls of one I/O thread, which alone uses it; the time is passed in."""

    def __init__(
        self,
        caller: Caller,
        send: Callable[[str, Message], None],
        *,
        report_after_s: float | None,
        tell: Callable[[str], None],
    ) -> None:
        self._caller = caller
        self._send = send
        self._report_after_s = report_after_s
        self._tell = tell
        self._look_at = 0.0
        self._due_at: dict[PendingReplies, float] = {}
        """Calls that have been told of: when they are told of next."""
        self._inquiries: list[_Inquiry] = []

    def tick(self, *, now: float) -> None:
        """Ask about calls that are due, and tell what is known of those that were asked about."""
        if self._report_after_s is None:
            return
        for inquiry in [inquiry for inquiry in self._inquiries if inquiry.until <= now]:
            self._report(inquiry)
        if now >= self._look_at:
            self._look_at = now + self._report_after_s * LOOK_EVERY
            self._look(now, self._report_after_s)

    def next_tick_at(self) -> float | None:
        """Return when ``tick`` has something to do next."""
        due = [inquiry.until for inquiry in self._inquiries]
        if self._report_after_s is not None and self._caller.num_open:
            due.append(self._look_at)
        return min(due, default=None)

    def take(self, progress: Progress) -> None:
        """Take a worker's answer."""
        for step in progress.steps:
            for inquiry in self._inquiries:
                rank = inquiry.asked.get(step.call_id)
                if rank is not None:
                    inquiry.answers[rank] = step
        for inquiry in [each for each in self._inquiries if len(each.answers) == len(each.asked)]:
            self._report(inquiry)

    def _look(self, now: float, report_after_s: float) -> None:
        calls: dict[PendingReplies, list[tuple[str, int, CallId]]] = {}
        opened: dict[PendingReplies, float] = {}
        for identity, rank, pending, call_id, opened_at in self._caller.open_calls():
            calls.setdefault(pending, []).append((identity, rank, call_id))
            opened[pending] = min(opened.get(pending, opened_at), opened_at)
        self._due_at = {pending: due_at for pending, due_at in self._due_at.items() if pending in calls}
        for pending, ranks in calls.items():
            age_s = now - opened[pending]
            if now >= self._due_at.get(pending, opened[pending] + report_after_s):
                self._due_at[pending] = now + age_s
                self._ask(pending, ranks, age_s, now)

    def _ask(self, pending: PendingReplies, ranks: Iterable[tuple[str, int, CallId]], age_s: float, now: float) -> None:
        inquiry = _Inquiry(pending, age_s, now + ANSWER_S, {})
        self._inquiries.append(inquiry)
        for identity, rank, call_id in ranks:
            inquiry.asked[call_id] = rank
            try:
                self._send(identity, AskProgress((call_id,)))
            except RpcrlError as error:
                logger.debug("rank %s is not asked: %s", rank, error)

    def _report(self, inquiry: _Inquiry) -> None:
        self._inquiries.remove(inquiry)
        if inquiry.pending.settled.done():
            return
        where: dict[tuple[bool, str, str] | None, list[int]] = {}
        for rank in sorted(inquiry.asked.values()):
            step = inquiry.answers.get(rank)
            where.setdefault(None if step is None else (step.runs, step.method, step.stack), []).append(rank)
        lines = [
            f"{inquiry.pending.description} has no reply for {inquiry.age_s:.1f} s "
            f"(Controller(report_after_s={self._report_after_s:g})); it goes on:"
        ]
        for place, ranks in where.items():
            steps = [inquiry.answers[rank] for rank in ranks if rank in inquiry.answers]
            longest = max(steps, key=lambda step: step.seconds, default=None)
            stack = place[2].splitlines() if place is not None else []
            lines += [f"  {name_ranks(ranks)} {_words(longest)}", *(f"    {line}" for line in stack)]
        self._tell("\n".join(lines))


def _words(step: Step | None) -> str:
    if step is None:
        return f"gave no answer within {ANSWER_S:g} s: the interpreter is held by one long step"
    within = f" for {step.seconds:.1f} s" if step.seconds else ""
    if step.runs:
        return f"in {step.method or 'it'}{within}, at" if step.stack else "in it"
    return f"has not begun it: in {step.method}{within}, at" if step.method else "has not begun it"
