"""``rpcrl logs``: which run it takes, which files, and how much of them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from rpcrl.cli.main import cli
from rpcrl.errors import UsageError
from rpcrl.runtime.membership import Member
from rpcrl.runtime.run_logs import find_run, log_parent, note_workers, open_log_dir, run_logs

RUNS = ("20260101-000000-aaaa1111", "20260102-000000-bbbb2222", "20260103-000000-bbbb3333")


@pytest.fixture(autouse=True)
def parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    return log_parent()


def logs(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["logs", *arguments])


def make_run(run_id: str, log_dir: Path | None = None, *, age_s: int = 0) -> Path:
    """Write the logs of two groups: actor+rollout on two ranks, judge on one."""
    directory = open_log_dir(run_id, log_dir)
    for group, roles, ranks in (("trainer", ("actor", "rollout"), 2), ("judge", ("reward",), 1)):
        members = [Member(f"{group}.{rank}", "", rank, roles) for rank in range(ranks)]
        note_workers(directory, run_id, group, members)
        for rank in range(ranks):
            text = "".join(f"{run_id} {group} {rank} line {number}\n" for number in range(30))
            (directory / f"{group}.rank{rank}.log").write_text(text)
    os.utime(directory / "workers.jsonl", (1_000_000_000 - age_s, 1_000_000_000 - age_s))
    return directory


def test_p73_the_latest_run_is_found_wherever_its_logs_are(tmp_path: Path) -> None:
    make_run(RUNS[2], age_s=50)
    launched = make_run(RUNS[0], tmp_path / "run" / "logs", age_s=10)
    result = logs()
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert lines[0] == f"logs of run {RUNS[0]} (it has ended): {launched}"
    assert f"[actor+rollout 1] {launched / 'trainer.rank1.log'}" in lines
    assert f"[reward 0] {launched / 'judge.rank0.log'}" in lines
    assert f"  {RUNS[0]} trainer 1 line 29" in lines
    assert f"  {RUNS[0]} trainer 1 line 10" in lines
    assert f"  {RUNS[0]} trainer 1 line 9" not in lines, "20 lines of each by default"


@pytest.mark.parametrize(
    ("options", "files"),
    [
        (["--rank", "1"], ["trainer.rank1.log"]),
        (["--role", "rollout"], ["trainer.rank0.log", "trainer.rank1.log"]),
        (["--role", "judge"], ["judge.rank0.log"]),
        (["--rank", "0", "--role", "actor"], ["trainer.rank0.log"]),
    ],
)
def test_p73_rank_and_role_choose_and_tail_counts(options: list[str], files: list[str]) -> None:
    directory = make_run(RUNS[0])
    (directory / "agent.log").write_text("the agent says something\n")
    result = logs(*options, "--tail", "3")
    assert result.exit_code == 0
    shown = [line.rpartition("/")[2] for line in result.output.splitlines() if line.startswith("[")]
    assert shown == files
    assert sum("line" in line for line in result.output.splitlines()) == 3 * len(files)
    assert "the agent says something" in logs().output
    assert "[agent]" not in result.output
    assert "line" not in logs(*options, "--tail", "0").output.partition("\n")[2]


def test_a_run_is_named_by_id_part_or_path(tmp_path: Path) -> None:
    for run_id in RUNS:
        make_run(run_id)
    launched = make_run("20260104-000000-cccc4444", tmp_path / "run" / "logs")
    assert find_run("aaaa").name == RUNS[0]
    assert find_run(RUNS[1]).name == RUNS[1]
    assert find_run(str(tmp_path / "run")) == find_run(str(launched)) == launched
    with pytest.raises(UsageError, match=r"2 runs fit 'bbbb'; .*bbbb3333, .*bbbb2222"):
        find_run("bbbb")
    with pytest.raises(UsageError, match="no run and no directory 'nowhere'"):
        find_run("nowhere")
    with pytest.raises(UsageError, match="holds no logs of a run"):
        find_run(str(tmp_path))


def test_what_is_not_there_is_told(tmp_path: Path, parent: Path) -> None:
    result = CliRunner().invoke(cli, ["logs"])
    assert isinstance(result.exception, UsageError)
    assert f"no run of rpcrl has left logs in {parent}" in str(result.exception)
    directory = make_run(RUNS[0])
    refused = logs("--rank", "7", "--role", "critic").exception
    assert str(refused) == (
        "no worker of this run is rank 7 and role 'critic'; its groups: trainer (actor+rollout, 2 ranks), "
        "judge (reward, 1 ranks)"
    )
    (directory / "trainer.rank1.log").unlink()
    assert "no such file" in logs("--rank", "1").output


def test_links_to_logs_that_were_removed_go(tmp_path: Path, parent: Path) -> None:
    gone = make_run(RUNS[0], tmp_path / "gone")
    for file in gone.iterdir():
        file.unlink()
    gone.rmdir()
    make_run(RUNS[1], tmp_path / "there")
    assert [entry.name for entry in parent.iterdir()] == [RUNS[1]]


def test_a_resumed_run_shows_its_own_workers_and_a_broken_line_is_left_out(tmp_path: Path) -> None:
    make_run(RUNS[0], tmp_path / "logs")
    directory = open_log_dir(RUNS[1], tmp_path / "logs")
    note_workers(directory, RUNS[1], "judge", [Member("judge.0", "", 0, ("reward",))])
    with (directory / "workers.jsonl").open("a") as index:
        index.write('{"run_id": "20260')
    found = run_logs(directory)
    assert found.run_id == RUNS[1]
    assert [worker.file for worker in found.workers] == ["judge.rank0.log"]


def test_bytes_that_are_no_text_and_progress_bars_are_shown(tmp_path: Path) -> None:
    directory = make_run(RUNS[0])
    (directory / "judge.rank0.log").write_bytes(b"10%\r20%\r30%\n\xff\xfe\nno line end")
    shown = logs("--role", "judge").output.splitlines()
    assert shown[-3:] == ["  30%", "  \ufffd\ufffd", "  no line end"]


def test_a_folder_of_somebody_else_is_not_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getuid", lambda: Path(tmp_path).stat().st_uid + 1)
    with pytest.raises(UsageError, match=r"belongs to user \d+, not to user \d+: name a directory"):
        open_log_dir(RUNS[0], None)
    assert open_log_dir(RUNS[0], tmp_path / "mine") == tmp_path / "mine"
    assert list(log_parent().iterdir()) == []
