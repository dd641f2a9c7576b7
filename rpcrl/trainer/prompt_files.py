"""Where do prompts come from? The built-in task, a file of rows in verl's format, or GSM8K's own files.

``data.train_files`` (and ``val_files``) is one of

* ``sort_digits`` or null: the built-in task, whose training prompts have no end;
* ``rows.jsonl``, ``rows.json`` (a list) or ``rows.parquet`` (needs pyarrow): rows in verl's format;
* ``gsm8k:PATH``: a file of GSM8K's own records, made into rows by ``rpcrl.tasks.gsm8k``.

A row has ``prompt`` (a list of chat messages, or a string that is given to the model as it is), ``data_source``,
``reward_model.ground_truth`` (null where the reward needs none) and optionally ``extra_info``; for agent loops also
``agent_name`` and ``sampling_params``. What a file holds is decided by its name or the prefix, never by looking inside.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rpcrl.agents.tasks import AGENT_NAME, SAMPLING_PARAMS, row_sampling
from rpcrl.config.run import GSM8K_PREFIX
from rpcrl.engines.sampling_settings import SamplingSettings
from rpcrl.errors import BatchError, UsageError
from rpcrl.tasks import gsm8k
from rpcrl.tasks.built_in import BUILT_IN_TASKS, BuiltInTask

__all__ = [
    "AGENT_FIELDS",
    "DEFAULT_TASK",
    "PromptSource",
    "Row",
    "built_in_task",
    "heldout_source",
    "read_rows",
    "task_reward",
    "train_source",
]

Row = dict[str, Any]
AGENT_FIELDS = (AGENT_NAME, SAMPLING_PARAMS)
"""Fields of a row that only agent loops read."""
DEFAULT_TASK = "sort_digits"


@dataclass(frozen=True)
class PromptSource:
    """Rows by number."""

    name: str
    size: int | None
    """Number of rows; None when there is no end."""
    row: Callable[[int], Row]


def built_in_task(train_files: str | None) -> BuiltInTask | None:
    """Return the built-in task that ``data.train_files`` names, or None when it names a file."""
    return BUILT_IN_TASKS.get(DEFAULT_TASK if train_files is None else train_files)


def task_reward(train_files: str | None) -> str | None:
    """Return the reward function that goes with ``data.train_files`` when ``reward.fn`` is null, if any."""
    task = built_in_task(train_files)
    if task is not None:
        return task.reward
    return "rpcrl.tasks.gsm8k:score" if train_files and train_files.startswith(GSM8K_PREFIX) else None


def train_source(
    train_files: str | None, *, seed: int, prompt_key: str = "prompt", max_samples: int = -1
) -> PromptSource:
    """Open the training prompts; ``seed`` picks the stream of a built-in task. ``max_samples`` -1 takes all.

    Raises UsageError for a file that cannot be read and BatchError, with its place, for a row that is none.
    """
    task = built_in_task(train_files)
    if task is None:
        return _of_rows(str(train_files), read_rows(str(train_files), "train", prompt_key), max_samples)
    endless = task.train_row
    return PromptSource(task.name, None if max_samples < 0 else max_samples, lambda index: endless(seed, index))


def heldout_source(
    val_files: str | None, train_files: str | None, *, prompt_key: str = "prompt", max_samples: int = -1
) -> PromptSource | None:
    """Open the held-out prompts: those of ``val_files``, else the built-in task's own, else None."""
    task = built_in_task(train_files if val_files is None else val_files)
    if task is not None:
        return _of_rows(f"{task.name} (held out)", task.heldout_rows(), max_samples)
    if val_files is None:
        return None
    return _of_rows(val_files, read_rows(val_files, "test", prompt_key), max_samples)


def _of_rows(name: str, rows: list[Row], max_samples: int) -> PromptSource:
    kept = rows if max_samples < 0 else rows[:max_samples]
    if not kept:
        raise UsageError(f"{name} has no prompts" + (f" (max_samples is {max_samples})" if rows else ""))
    return PromptSource(name, len(kept), kept.__getitem__)


def read_rows(files: str, split: str, prompt_key: str = "prompt") -> list[Row]:
    """Return the rows of a file, each checked; ``split`` goes into ``extra_info`` where a row does not say.

    Raises UsageError when the file is missing, of an unknown kind, or parquet without pyarrow; BatchError naming
    file and line for what is not JSON or not a row.
    """
    own_format = files.startswith(GSM8K_PREFIX)
    path = Path(files.removeprefix(GSM8K_PREFIX)).expanduser()
    if not path.is_file():
        known = ", ".join(map(repr, BUILT_IN_TASKS))
        what = "is a folder; name one file in it" if path.is_dir() else "does not exist"
        raise UsageError(
            f"the data file {path} {what} (seen from {Path.cwd()}); data.train_files takes a .jsonl, .json or .parquet "
            f"file, gsm8k:PATH, or a built-in task: {known}"
        )
    rows = []
    for index, (where, record) in enumerate(_records(path)):
        try:
            if not isinstance(record, dict):
                raise BatchError(f"a row is a JSON object, got {type(record).__name__}")
            if own_format:
                rows.append(gsm8k.row_from_record(record, index=index, split=split))
            else:
                rows.append(_checked(record, index, split, prompt_key))
        except BatchError as error:
            raise BatchError(f"{where}: {error}") from None
    return rows


def _records(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield each record with its place."""
    if path.suffix == ".parquet":
        yield from ((f"{path}, row {index}", record) for index, record in enumerate(_parquet_records(path)))
        return
    if path.suffix not in (".jsonl", ".json"):
        raise UsageError(f"{path} is no .jsonl, .json or .parquet file; what it holds is told by its name")
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".json":
        content = _json(text, str(path))
        if not isinstance(content, list):
            raise BatchError(f"{path}: a .json file is one list of rows, got {type(content).__name__}")
        yield from ((f"{path}, row {index}", record) for index, record in enumerate(content))
        return
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            where = f"{path}:{number}"
            yield where, _json(line, where)


def _json(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise BatchError(f"{where}: not JSON: {error}") from None


def _parquet_records(path: Path) -> list[Any]:
    try:
        parquet: Any = importlib.import_module("pyarrow.parquet")
    except ImportError:
        raise UsageError(
            f"{path} is a parquet file, and pyarrow is not installed: pip install pyarrow, or write the rows as .jsonl"
        ) from None
    records: list[Any] = parquet.read_table(path).to_pylist()
    return records


def _checked(record: Row, index: int, split: str, prompt_key: str) -> Row:
    """Return a record as a complete row; raises BatchError naming the field."""
    if prompt_key not in record:
        raise BatchError(
            f"no field {prompt_key!r} (data.prompt_key); there are {', '.join(map(repr, record)) or 'none'}. A file of "
            "GSM8K's own records is named gsm8k:PATH"
        )
    reward_model = record.get("reward_model")
    if not isinstance(reward_model, dict) or "ground_truth" not in reward_model:
        raise BatchError(
            'no field reward_model.ground_truth; write "reward_model": {"style": "rule", "ground_truth": …}, with null '
            "where the reward needs none"
        )
    data_source = record.get("data_source")
    if not isinstance(data_source, str):
        raise BatchError(f"field 'data_source' must be a string, got {type(data_source).__name__}")
    extra_info = record.get("extra_info") or {}
    if not isinstance(extra_info, dict):
        raise BatchError(f"field 'extra_info' must be an object, got {type(extra_info).__name__}")
    return {
        "data_source": data_source,
        "prompt": _checked_prompt(record[prompt_key], prompt_key),
        "reward_model": reward_model,
        "extra_info": {"index": index, "split": split, **extra_info},
        **_agent_fields(record),
    }


def _agent_fields(record: Row) -> Row:
    """Return what a row says to agent loops: which one makes its samples, and how they are drawn."""
    fields = {name: record[name] for name in AGENT_FIELDS if record.get(name) is not None}
    name, given = fields.get(AGENT_NAME, ""), fields.get(SAMPLING_PARAMS, {})
    if not isinstance(name, str):
        raise BatchError(f"field {AGENT_NAME!r} must be a string, got {type(name).__name__}")
    if not isinstance(given, dict):
        raise BatchError(f"field {SAMPLING_PARAMS!r} must be an object, got {type(given).__name__}")
    try:
        row_sampling(SamplingSettings(), given, where=f"field {SAMPLING_PARAMS!r}")
    except UsageError as error:
        raise BatchError(str(error)) from None
    return fields


def _checked_prompt(prompt: Any, prompt_key: str) -> str | list[dict[str, Any]]:
    if isinstance(prompt, str) and prompt:
        return prompt
    if isinstance(prompt, Sequence) and not isinstance(prompt, str) and len(prompt) > 0:
        messages = list(prompt)
        if all(isinstance(message, dict) and {"role", "content"} <= message.keys() for message in messages):
            return messages
    raise BatchError(
        f"field {prompt_key!r} must be a text or a list of messages with 'role' and 'content', not empty; got "
        f"{str(prompt)[:80]!r} ({type(prompt).__name__})"
    )
