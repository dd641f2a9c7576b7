"""Do lines come out of bytes as they were written, in bounded memory, and does the console get the right ones?"""

from __future__ import annotations

import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.output import LAST_LINES, MAX_LINE_BYTES, ConsoleQueue, LineBuffer, LogFile, Selector, TailKeeper


def lines_of(*chunks: bytes) -> list[str]:
    buffer = LineBuffer()
    found = [line for chunk in chunks for line in buffer.feed(chunk)]
    return found + buffer.finish()


@given(st.lists(st.text(alphabet="ab é\t", max_size=20), max_size=8), st.integers(1, 7))
def test_lines_do_not_depend_on_how_the_bytes_are_cut(lines: list[str], size: int) -> None:
    data = "".join(f"{line}\n" for line in lines).encode()
    assert lines_of(*(data[at : at + size] for at in range(0, len(data), size))) == lines


def test_windows_line_ends_progress_bars_and_partial_lines() -> None:
    assert lines_of(b"one\r\ntwo\r", b"\nthree") == ["one", "two", "three"]
    assert lines_of(b"10%\r20%\r100%\n") == ["100%"]
    assert lines_of(b"10%\r", b"20%\r", b"100%") == ["100%"]
    assert lines_of(b"\r10%", b"\r20%\n") == ["20%"]
    assert lines_of(b"a\n\nb\n") == ["a", "", "b"]


def test_bytes_that_are_no_text_are_shown() -> None:
    assert lines_of(b"\xff\xfe!\n") == ["\ufffd\ufffd!"]


def test_p69_fifty_megabytes_without_a_line_end_cost_little_memory() -> None:
    buffer = LineBuffer()
    chunk = b"x" * (1 << 16)
    tracemalloc.start()
    for _ in range(800):
        assert buffer.feed(chunk) == []
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 20
    (line,) = buffer.finish()
    assert line.startswith("x" * MAX_LINE_BYTES)
    assert f"({800 * len(chunk) - MAX_LINE_BYTES} more bytes on this line)" in line


def test_the_last_lines_are_kept() -> None:
    tail = TailKeeper()
    for number in range(LAST_LINES + 3):
        tail.add(str(number))
    assert tail.lines() == tuple(str(number) for number in range(3, LAST_LINES + 3))


def shown(console: str, rank: int, lines: list[str]) -> list[str]:
    selector = Selector(console, rank)
    return [line for line in lines if selector.wants(line)]


PLAIN = ["step 1 loss 0.5", "error rate 0.1", "warning lights: none", "INFO all is well"]
TRACEBACK = [
    "Traceback (most recent call last):",
    '  File "x.py", line 1, in f',
    "    raise ValueError",
    "ValueError: bad",
    "",
    "During handling of the above exception, another exception occurred:",
    "",
    "Traceback (most recent call last):",
    '  File "x.py", line 3, in g',
    "my.CustomProblem",
]


def test_p71_the_default_view_is_rank_0_and_what_is_notable_of_others() -> None:
    notable = [
        "WARNING 12:00 low disk",
        "2024 ERROR: gone",
        "x.py:3: UserWarning: old",
        "RuntimeError: boom",
        "Fatal Python error: Segmentation fault",
        "E0101 10:00 nccl.cc failed",
        "error: cannot open",
    ]
    assert shown("default", 0, PLAIN + notable) == PLAIN + notable
    assert shown("default", 3, PLAIN[:2] + PLAIN[3:] + notable) == notable
    assert shown("all", 3, PLAIN) == PLAIN
    assert shown("off", 0, PLAIN + notable) == []


def test_tracebacks_of_other_ranks_are_shown_whole() -> None:
    block = [line for line in TRACEBACK if line not in ("", TRACEBACK[5])]
    assert [line for line in shown("default", 2, [*PLAIN[:2], *TRACEBACK, *PLAIN[:2]]) if line] == block


def test_p71_eight_ranks_with_a_hundred_lines_make_a_hundred_console_lines() -> None:
    total = sum(len(shown("default", rank, [f"step {step}" for step in range(100)])) for rank in range(8))
    assert total == 100


def test_p70_lines_that_differ_only_in_numbers_are_all_delivered() -> None:
    queue = ConsoleQueue()
    lines = [f"loss 0.{number:04d}" for number in range(300)] + ["same", "same"]
    for line in lines:
        queue.add("a", line, "/log")
    (message,) = queue.take()
    assert list(message.lines) == lines


def test_a_console_that_falls_behind_is_told_how_much_is_left_out_and_where_it_is() -> None:
    queue = ConsoleQueue(max_lines=3, max_bytes=1 << 20)
    for number in range(10):
        queue.add("a", f"a{number}", "/logs/a.log")
    queue.add("b", "b0", "/logs/b.log")
    a, b = queue.take()
    assert a.lines[:3] == ("a0", "a1", "a2")
    assert a.lines[3].startswith("[rpcrl] 7 lines are left out here")
    assert a.lines[3].endswith("/logs/a.log")
    assert b.lines[0].startswith("[rpcrl] 1 line is left out here")
    queue.add("a", "a10", "/logs/a.log")
    assert [message.lines for message in queue.take()] == [("a10",)]
    assert not queue


def test_the_console_queue_is_bounded_in_bytes() -> None:
    queue = ConsoleQueue(max_lines=1000, max_bytes=100)
    for _ in range(10):
        queue.add("a", "x" * 60, "/log")
    (message,) = queue.take()
    assert len(message.lines) == 3


def test_taking_one_worker_frees_its_room() -> None:
    queue = ConsoleQueue(max_lines=2)
    queue.add("a", "1", "/log")
    queue.add("b", "2", "/log")
    assert [message.identity for message in queue.take_of("a")] == ["a"]
    assert queue.take_of("a") == []
    queue.add("b", "3", "/log")
    assert queue.take()[0].lines == ("2", "3")


def test_a_full_disk_costs_the_log_and_is_said_once() -> None:
    log = LogFile("/dev/full")
    assert log.write(b"x") is False
    assert log.write(b"y") is True
    assert "No space left" in log.problem
    log.close()


def test_a_log_is_appended_to(tmp_path) -> None:
    for text in (b"one\n", b"two\n"):
        log = LogFile(str(tmp_path / "deep" / "a.log"))
        assert log.write(text)
        log.close()
    assert (tmp_path / "deep" / "a.log").read_bytes() == b"one\ntwo\n"


@pytest.mark.parametrize("bad", ["/proc/none/a.log"])
def test_a_log_that_cannot_be_opened_is_an_error(bad: str) -> None:
    with pytest.raises(OSError):
        LogFile(bad)
