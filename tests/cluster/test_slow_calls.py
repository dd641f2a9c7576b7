"""A call takes long: its ranks' stacks are told while it runs, and it runs on."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rpcrl import Controller, ResourcePool, WorkerGroup
from rpcrl.errors import CallTimeoutError, UsageError
from tests.cluster.group_workers import Concurrent, Slow, Toy

pytestmark = pytest.mark.cluster

REPORT_AFTER_S = 0.4


@pytest.fixture(params=["ipc", "tcp"])
def watching(request: pytest.FixtureRequest, tmp_path: Path, lines: list[str]) -> Iterator[Controller]:
    with Controller(
        transport=request.param, log_dir=tmp_path / "logs", console_sink=lines.append, report_after_s=REPORT_AFTER_S
    ) as opened:
        yield opened


def until(told: Callable[[], bool], lines: list[str], within_s: float = 20.0) -> None:
    deadline = time.monotonic() + within_s
    while not told():
        assert time.monotonic() < deadline, "\n".join(lines)
        threading.Event().wait(0.01)


def told_ranks(lines: list[str]) -> set[int]:
    """Return whose stacks were told; ranks are told together where their stacks are the same at that moment."""
    ranks: set[int] = set()
    for listed in re.findall(r"ranks? ([0-9–, ]+) in actor\.slow_inc for ", "\n".join(lines)):
        for first, last in re.findall(r"(\d+)(?:–(\d+))?", listed):
            ranks |= set(range(int(first), int(last or first) + 1))
    return ranks


def test_p02_where_each_rank_is_is_told_while_the_call_runs(watching: Controller, lines: list[str], tmp_path: Path):
    group = WorkerGroup(ResourcePool([3]), Toy, name="actor")
    future = group.slow_inc(str(tmp_path / "gate"))
    until(lambda: any("in wait_for" in line for line in lines) and told_ranks(lines) == {0, 1, 2}, lines)
    text = "\n".join(lines)
    assert "[rpcrl] actor.slow_inc on group 'actor' has no reply for " in text
    assert "in slow_inc" in text
    assert "serve.py" not in text, "rpcrl's own frames say nothing"
    assert "in wait_for" in (watching.log_dir / "slow-calls.log").read_text()
    (tmp_path / "gate").touch()
    assert future.result(20) == [1, 1, 1], "it is told of and goes on"


def test_a_call_behind_another_and_an_asynchronous_one(watching: Controller, lines: list[str], tmp_path: Path):
    group = WorkerGroup(ResourcePool([1]), Toy, name="toy")
    first, second = group.slow_inc(str(tmp_path / "gate")), group.inc.submit()
    until(lambda: any("rank 0 has not begun it: in toy.slow_inc for" in line for line in lines), lines)
    (tmp_path / "gate").touch()
    assert (first.result(20), second.result(20)) == ([1], [2])
    others = WorkerGroup(ResourcePool([1]), Concurrent, name="side")
    waiting = others.meet.submit("first")
    until(lambda: any("in meet" in line for line in lines), lines)
    assert "side.meet on group 'side' has no reply" in "\n".join(lines)
    others.meet("second")
    assert waiting.result(20) == ["first"]


def test_a_rank_that_holds_its_interpreter_is_told_as_such(watching: Controller, lines: list[str]):
    group = WorkerGroup(ResourcePool([1]), Slow)
    assert group.hold_the_lock(3.0) == [0]
    assert any("rank 0 gave no answer within 1 s: the interpreter is held" in line for line in lines), lines


def test_a_method_with_a_deadline_still_raises_at_it(watching: Controller, tmp_path: Path):
    group = WorkerGroup(ResourcePool([1]), Toy)
    with pytest.raises(CallTimeoutError):
        group.with_deadline(str(tmp_path / "gate"))
    (tmp_path / "gate").touch()


def test_a_bound_of_nothing_is_refused():
    with pytest.raises(UsageError, match="report_after_s=0"):
        Controller(report_after_s=0)
