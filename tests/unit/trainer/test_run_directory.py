import json
import subprocess
import sys

import pytest

from rpcrl.errors import ConfigError
from rpcrl.trainer.run_directory import SUMMARY_KEYS, RunDirectory, write_atomically


def take(path, *, resume=False):
    with RunDirectory.held(path, resume=resume) as run:
        run.make_parts()
        return run


def test_a_new_directory_is_made_with_its_parts(tmp_path):
    run = take(tmp_path / "a" / "b")
    assert run.logs.is_dir()
    assert run.samples.is_dir()
    assert run.checkpoints.is_dir()
    assert run.read_summary() is None


def test_a_directory_with_something_in_it_is_refused_and_left_alone(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    with pytest.raises(ConfigError, match=r"already holds 1 entries \(metrics.jsonl\)") as caught:
        take(tmp_path)
    assert "--resume" in str(caught.value)
    assert [entry.name for entry in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_resume_takes_a_run_and_refuses_a_folder_that_is_none(tmp_path):
    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(ConfigError, match=r"is no run of rpcrl: it holds 1 entries \(thesis.tex\)"):
        take(tmp_path, resume=True)
    assert [entry.name for entry in tmp_path.iterdir()] == ["thesis.tex"]
    run = take(tmp_path / "run")
    run.metrics.write_text("{}\n")
    assert take(run.path, resume=True).metrics.read_text() == "{}\n"
    assert take(tmp_path / "new", resume=True).logs.is_dir()


def test_two_live_runs_do_not_share_a_directory(tmp_path):
    run = take(tmp_path / "run")
    code = (
        "import sys\nfrom rpcrl.trainer.run_directory import RunDirectory\n"
        f"with RunDirectory.held({str(run.path)!r}, resume=True):\n    print('held', flush=True)\n    input()\n"
    )
    command = [sys.executable, "-c", code]
    other = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert other.stdout.readline() == "held\n"
        with pytest.raises(ConfigError, match=f"is in use: process {other.pid} on "):
            take(run.path, resume=True)
        other.kill()
        other.wait()
        assert take(run.path, resume=True) == run, "the kernel gives the lock back at any death"
    finally:
        other.kill()
        other.communicate()


def test_an_empty_directory_is_taken(tmp_path):
    assert take(tmp_path).path == tmp_path


def test_a_file_and_a_place_where_nothing_can_be_made_are_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="is not a directory"):
        take(tmp_path / "file", resume=True)
    with pytest.raises(ConfigError, match="/proc/x cannot be made or written") as caught:
        take("/proc/x")
    assert "--run-dir runs/mine" in str(caught.value)


def test_the_summary_needs_every_frozen_key_and_keeps_further_ones(tmp_path):
    run = take(tmp_path / "run")
    full = dict.fromkeys(SUMMARY_KEYS, 1)
    for key in SUMMARY_KEYS:
        with pytest.raises(KeyError, match=key):
            run.write_summary({name: value for name, value in full.items() if name != key})
    assert not run.summary.exists()
    run.write_summary({"more": 2, **full})
    assert list(json.loads(run.summary.read_text())) == [*SUMMARY_KEYS, "more"]


def test_the_frozen_keys():
    assert SUMMARY_KEYS == (
        "mode",
        "steps",
        "wall_s",
        "phases_s",
        "heldout_accuracy",
        "weight_syncs",
        "tokens",
        "peak_rss_bytes",
    )


def test_a_file_is_replaced_whole_and_nothing_is_left_beside_it(tmp_path):
    path = tmp_path / "x.json"
    path.write_text("old")
    write_atomically(path, "new")
    assert path.read_text() == "new"
    assert [entry.name for entry in tmp_path.iterdir()] == ["x.json"]


def test_an_evaluation_leaves_the_summary_of_the_training(tmp_path):
    run = take(tmp_path)
    trained, evaluated = ({**dict.fromkeys(SUMMARY_KEYS, 0), "mode": mode} for mode in ("colocate", "eval-only"))
    run.write_summary(evaluated)
    assert run.read_summary() == evaluated, "nothing was trained here yet"
    run.write_summary(trained)
    run.write_summary(evaluated)
    assert run.read_summary() == trained
    assert json.loads((tmp_path / "summary-eval-only.json").read_text()) == evaluated
