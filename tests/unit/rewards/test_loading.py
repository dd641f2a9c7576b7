"""Reward functions by path: what loads, and what each mistake is answered with."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rpcrl.errors import ConfigError
from rpcrl.rewards import batch_reward, load_reward, resolve_reward

ROW = """\
def score(data_source, solution_str, ground_truth, extra_info=None):
    return float(solution_str == ground_truth)
"""


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    def _write(text: str, name: str = "my_reward.py") -> Path:
        path = tmp_path / name
        path.write_text(text)
        return path

    return _write


def problem_of(path: str, **kwargs: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        load_reward(path, kwargs)
    (violation,) = caught.value.violations
    assert violation.key in ("reward.fn", "reward.reward_kwargs")
    assert violation.remedies
    return str(violation)


def test_a_function_of_a_file_is_loaded_once_under_a_stable_name(write: Callable[..., Path]) -> None:
    path = write(ROW)
    reward = load_reward(f"{path}:score")
    assert reward.function("d", "1", "1") == 1.0
    assert not reward.per_batch
    module = reward.function.__module__
    assert module.startswith("rpcrl_file_my_reward_")
    assert sys.modules[module].__file__ == str(path)
    assert load_reward(f"{path}:score").function is reward.function
    (path.parent / "other").mkdir()
    other = write(ROW, "other/my_reward.py")
    assert load_reward(f"{other}:score").function.__module__ != module, "two files of one name must not be one module"


def test_a_function_of_a_module_is_loaded() -> None:
    from rpcrl.tasks.sort_digits import score

    assert load_reward("rpcrl.tasks.sort_digits:score").function is score


def test_keyword_arguments_are_kept_and_checked(write: Callable[..., Path]) -> None:
    path = write(ROW.replace("extra_info=None", "extra_info=None, *, scale"))
    assert load_reward(f"{path}:score", {"scale": 2}).kwargs == {"scale": 2}
    assert "missing a required" in problem_of(f"{path}:score")
    assert "unexpected keyword argument 'scales'" in problem_of(f"{path}:score", scale=1, scales=2)
    assert "solution_str is given by rpcrl itself" in problem_of(f"{path}:score", solution_str="x", scale=1)


def test_a_batch_reward_is_known_by_its_declaration_only(write: Callable[..., Path]) -> None:
    batch = (
        "def many(data_sources, solution_strs, ground_truths, extra_infos):\n    return [0.0 for _ in solution_strs]\n"
    )
    undeclared = write(batch, "undeclared.py")
    text = problem_of(f"{undeclared}:many")
    assert "cannot be called per row" in text
    assert "fix: declare it with @batch_reward" in text
    declared = write(f"from rpcrl.rewards import batch_reward\n@batch_reward\n{batch}", "declared.py")
    assert load_reward(f"{declared}:many").per_batch
    wrong = write(f"from rpcrl.rewards import batch_reward\n@batch_reward\n{ROW}", "wrong.py")
    assert "cannot be called per batch (declared with @batch_reward)" in problem_of(f"{wrong}:score")


def test_declaring_leaves_the_function_itself() -> None:
    def function() -> None: ...

    assert batch_reward(function) is function


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("score", "'score' does not name a function"),
        ("my_reward.py", "does not name a function"),
        (":score", "does not name a function"),
        ("rpcrl.tasks.nothing:score", "there is no module 'rpcrl.tasks.nothing'"),
        ("no_such_package.rewards:score", "(no 'no_such_package' on the import path)"),
        ("rpcrl.tasks.sort_digits:scare", "has no function 'scare'; did you mean 'score'?"),
        ("rpcrl.tasks.sort_digits:CLAIM", "is a str, not a function"),
    ],
)
def test_what_is_not_there_is_named(path: str, problem: str) -> None:
    assert problem in problem_of(path)


def test_a_missing_file_names_its_neighbour(write: Callable[..., Path]) -> None:
    path = write(ROW)
    text = problem_of(f"{path.parent}/my_rewards.py:score")
    assert f"there is no file {path.parent}/my_rewards.py; did you mean 'my_reward.py'?" in text


def test_a_file_that_fails_to_import_says_why_and_leaves_no_module(write: Callable[..., Path]) -> None:
    path = write("import nothing_of_this_name\n")
    before = {*sys.modules}
    assert "raised ModuleNotFoundError: No module named 'nothing_of_this_name'" in problem_of(f"{path}:score")
    assert not [name for name in {*sys.modules} - before if name.startswith("rpcrl_file_")]
    path.write_text(ROW)
    assert load_reward(f"{path}:score").function("d", "1", "2") == 0.0, "mended, it loads"


def test_an_async_function_is_refused(write: Callable[..., Path]) -> None:
    path = write(f"async {ROW}")
    assert "is an async def" in problem_of(f"{path}:score")


def test_a_relative_file_is_made_absolute_for_another_process(
    write: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(ROW)
    monkeypatch.chdir(path.parent)
    assert resolve_reward("my_reward.py:score") == f"{path}:score"
    assert resolve_reward("sub/r.py:score", base=Path("/data")) == "/data/sub/r.py:score"
    assert resolve_reward("rpcrl.tasks.gsm8k:score") == "rpcrl.tasks.gsm8k:score"
