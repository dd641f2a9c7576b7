import json

import pytest

from rpcrl.errors import ConfigError
from rpcrl.trainer.run_directory import SUMMARY_KEYS, RunDirectory, write_atomically


def test_a_new_directory_is_made_with_its_parts(tmp_path):
    run = RunDirectory.open(tmp_path / "a" / "b", resume=False)
    assert run.logs.is_dir()
    assert run.samples.is_dir()
    assert run.checkpoints.is_dir()
    assert run.read_summary() is None


def test_a_directory_with_something_in_it_is_refused_and_left_alone(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    with pytest.raises(ConfigError, match=r"already holds 1 entries \(metrics.jsonl\)") as caught:
        RunDirectory.open(tmp_path, resume=False)
    assert "--resume" in str(caught.value)
    assert [entry.name for entry in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_resume_takes_a_directory_with_something_in_it(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    assert RunDirectory.open(tmp_path, resume=True).metrics.read_text() == "{}\n"


def test_an_empty_directory_is_taken(tmp_path):
    assert RunDirectory.open(tmp_path, resume=False).path == tmp_path


def test_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="is not a directory"):
        RunDirectory.open(tmp_path / "file", resume=True)


def test_the_summary_needs_every_frozen_key_and_keeps_further_ones(tmp_path):
    run = RunDirectory.open(tmp_path / "run", resume=False)
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
    run = RunDirectory.open(tmp_path, resume=False)
    trained, evaluated = ({**dict.fromkeys(SUMMARY_KEYS, 0), "mode": mode} for mode in ("colocate", "eval-only"))
    run.write_summary(evaluated)
    assert run.read_summary() == evaluated, "nothing was trained here yet"
    run.write_summary(trained)
    run.write_summary(evaluated)
    assert run.read_summary() == trained
    assert json.loads((tmp_path / "summary-eval-only.json").read_text()) == evaluated
