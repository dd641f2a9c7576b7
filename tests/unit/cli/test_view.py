"""The view: the same figures on a terminal and in plain lines, and a display that ends with the run."""

from __future__ import annotations

import io
import threading
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from rpcrl.cli import waiting
from rpcrl.cli.view import RunView, phase_seconds, summary_lines
from rpcrl.trainer.observer import RunInfo

METRICS = {
    "critic/score/mean": 0.53125,
    "timing_s/gen": 0.02,
    "timing_s/update_actor": 0.07,
    "timing_s/step": 0.1,
    "perf/total_num_tokens": 250.0,
}
SUMMARY: dict[str, object] = {
    "mode": "colocate",
    "steps": 3,
    "wall_s": 12.5,
    "phases_s": {"gen": 1.0, "update_actor": 3.0},
    "heldout_accuracy": {"start": 0.488, "end": 0.984},
    "weight_syncs": 3,
    "tokens": 75000,
    "peak_rss_bytes": {"driver": 400 * 2**20, "actor": 500 * 2**20},
}


def _watch(view: RunView, run_dir: Path, steps: int = 3) -> None:
    with view:
        view.on_status("starting 2 workers")
        view.on_start(RunInfo("colocate", run_dir, 0, steps, {"actor": 2, "reward": 1}))
        view.on_validate(0, {"heldout/accuracy": 0.488})
        for step in range(1, steps + 1):
            view.on_phase(step, "gen")
            view.on_step(step, METRICS)
        view.on_validate(steps, {"heldout/accuracy": 0.984})
        view.on_end(SUMMARY)


def test_without_a_terminal_there_are_plain_lines(tmp_path: Path) -> None:
    out = io.StringIO()
    (tmp_path / "hf").mkdir()
    _watch(RunView(Console(file=out, width=40)), tmp_path)
    text = out.getvalue()
    assert "\x1b" not in text
    line = "step 2/3  reward 0.531  held-out 0.488  2,500 tokens/s  100 ms/step  (gen 20 ms  update_actor 70 ms)\n"
    assert line in text
    assert "held-out accuracy 0.488 before training\n" in text
    assert "held-out accuracy  0.488 -> 0.984   (prompts that training never saw)\n" in text
    assert "time by phase      gen 1.00 s (25%), update_actor 3.00 s (75%)\n" in text
    assert f"model              {tmp_path / 'hf'}" in text


@pytest.mark.parametrize(("steps", "lines"), [(3, 3), (100, 21), (1000, 21)])
def test_plain_lines_stay_few(tmp_path: Path, steps: int, lines: int) -> None:
    out = io.StringIO()
    _watch(RunView(Console(file=out, width=200)), tmp_path, steps)
    assert sum(line.startswith("step ") for line in out.getvalue().splitlines()) == lines


def test_on_a_terminal_there_is_a_bar_with_the_same_figures(tmp_path: Path) -> None:
    out = io.StringIO()
    _watch(RunView(Console(file=out, width=120, force_terminal=True)), tmp_path)
    text = out.getvalue()
    assert "\x1b" in text
    assert "3/3" in text
    assert "reward 0.531  held-out 0.984  2,500 tokens/s" in text
    assert "0.488 -> 0.984" in text


def test_the_display_ends_when_the_run_fails(tmp_path: Path) -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True)
    view = RunView(console)

    def run() -> None:
        with view:
            view.on_start(RunInfo("colocate", tmp_path, 0, 3))
            raise RuntimeError("lost")

    with pytest.raises(RuntimeError):
        run()
    hides, shows = "\x1b[?25l", "\x1b[?25h"
    assert out.getvalue().count(hides) == out.getvalue().count(shows) == 1
    with console.capture() as captured:
        view.worker_line("[actor 0] text with [brackets]\n")
    assert captured.get() == "[actor 0] text with [brackets]\n"


def test_a_long_phase_is_told_with_its_step_and_then_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    told = threading.Event()

    class Console_(Console):
        def print(self, *args: Any, **options: Any) -> None:
            super().print(*args, **options)
            told.set()

    monkeypatch.setattr(waiting, "FIRST_NOTICE_S", 0.01)
    with RunView(Console_(file=out, width=100)) as view:
        view.on_phase(3, "update_actor")
        assert view.where == "step 3: update_actor"
        assert told.wait(10)
    assert "still in step 3: update_actor, for 0 s" in out.getvalue()


def test_notices_become_rarer() -> None:
    times, waited_s = [], 0.0
    while waited_s < 1200:
        waited_s = waiting.next_notice_s(waited_s)
        times.append(waited_s)
    assert times == [10, 20, 40, 80, 160, 320, 620, 920, 1220]


def test_the_time_of_the_steps_is_told_apart_from_the_rest() -> None:
    lines = summary_lines({**SUMMARY, "phases_s": {"gen": 1.0, "update_actor": 3.0, "testing": 2.0}}, None)
    assert "steps              3 in 4.0 s, 75,000 tokens, 3 weight syncs" in lines
    assert "whole command      12.5 s, of it 8.5 s start, evaluations and saving" in lines


def test_the_whole_step_is_no_phase() -> None:
    assert phase_seconds(METRICS) == {"gen": 0.02, "update_actor": 0.07}


def test_a_summary_without_held_out_prompts_has_no_accuracy() -> None:
    lines = summary_lines({**SUMMARY, "heldout_accuracy": {"start": None, "end": None}}, None)
    assert not any(line.startswith("held-out") for line in lines)


def test_an_evaluation_has_one_accuracy() -> None:
    accuracy = {"start": 0.488, "end": 0.488}
    line = summary_lines({**SUMMARY, "mode": "eval-only", "heldout_accuracy": accuracy}, None)[0]
    assert line == "held-out accuracy  0.488   (prompts that training never saw)"
