import json

import tensorboardX  # noqa: F401  (sets an environment variable when it is first imported)

from rpcrl.trainer.run_directory import RunDirectory
from rpcrl.trainer.tracking import Tracking, cut_metrics


def new_run(tmp_path):
    run = RunDirectory(tmp_path / "run")
    run.path.mkdir()
    return run


def lines(run):
    return [json.loads(line) for line in run.metrics.read_text().splitlines()]


def test_a_line_a_step_and_tensorboard_events(tmp_path):
    run = new_run(tmp_path)
    with Tracking(run) as tracking:
        tracking.log(0, {"heldout/accuracy": 0.5})
        tracking.log(1, {"actor/loss": 0.25, "actor/grad_norm": float("nan")})
        assert len(lines(run)) == 2, "a line is on the disk before the run ends"
    assert lines(run) == [
        {"step": 0, "heldout/accuracy": 0.5},
        {"step": 1, "actor/loss": 0.25, "actor/grad_norm": None},
    ]
    events = list(run.tensorboard.glob("events.out.tfevents.*"))
    assert len(events) == 1
    assert events[0].stat().st_size > 100


def test_a_resumed_run_loses_the_lines_after_its_checkpoint(tmp_path):
    run = new_run(tmp_path)
    with Tracking(run) as tracking:
        for step in range(5):
            tracking.log(step, {"x": step})
    with Tracking(run, start_step=2) as tracking:
        tracking.log(3, {"x": 30})
    assert [(line["step"], line["x"]) for line in lines(run)] == [(0, 0), (1, 1), (2, 2), (3, 30)]


def test_a_run_that_starts_again_from_nothing_keeps_no_line(tmp_path):
    run = new_run(tmp_path)
    with Tracking(run) as tracking:
        tracking.log(0, {"x": 0})
    with Tracking(run) as tracking:
        tracking.log(0, {"x": 5})
    assert [line["x"] for line in lines(run)] == [5]
    assert len(list(run.tensorboard.iterdir())) == 1, "events of the first life are gone too"


def test_a_line_that_a_kill_cut_short_is_dropped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "x": 1}\n{"step": 2, "x"')
    assert cut_metrics(path, after_step=2) == 1
    assert path.read_text() == '{"step": 1, "x": 1}\n'


def test_cutting_without_a_file_is_no_error(tmp_path):
    assert cut_metrics(tmp_path / "none", after_step=2) == 0
