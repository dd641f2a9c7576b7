"""How does a YAML file with ``key=value`` overrides become a checked RunConfig, or a list of its mistakes?

Overrides win over the file, later ones over earlier ones. Keys may be spelled as verl spells them, in full or
short; one source (the file, or the command line) that gives a setting two values under two spellings is an
error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pydantic import ValidationError

from rpcrl.config import keys, rules, yaml_text
from rpcrl.config.keys import Setting, full_key, short_key
from rpcrl.config.run import RunConfig
from rpcrl.config.type_errors import violations_of
from rpcrl.config.verl_keys import RENAMED, converted, is_known, unsupported
from rpcrl.errors import ConfigError, Violation

__all__ = ["Loaded", "load", "read", "to_yaml"]

_FN_PATH = "reward.custom_reward_function.path"
_FN_NAME = "reward.custom_reward_function.name"
_RESUME_MODE = "trainer.resume_mode"
_RESUME_PATH = "trainer.resume_from_path"

SEPARATE_DEFAULTS: Mapping[str, Any] = MappingProxyType(
    {
        "trainer.n_gpus_per_node": 1,
        "actor_rollout_ref.rollout.nnodes": 1,
        "actor_rollout_ref.rollout.n_gpus_per_node": 1,
        "actor_rollout_ref.rollout.checkpoint_engine.backend": "broadcast",
    }
)
"""What holds in the separate modes when nobody sets it: the two devices of the default job, one for each pool."""

Check = Callable[[RunConfig], Sequence[Violation]]
_NO_FLAGS: Mapping[str, tuple[str, Any]] = MappingProxyType({})


@dataclass(frozen=True)
class Loaded:
    """What was read, with everything that is wrong with it."""

    config: RunConfig | None
    """None when a key is unknown or a value could not be read; one that breaks rules, or has keys of verl's that
    rpcrl does not have, is here."""
    violations: tuple[Violation, ...]


@dataclass
class _Source:
    """The settings that the file, or the command line, gives."""

    values: dict[str, Any] = field(default_factory=dict)
    spellings: dict[str, str] = field(default_factory=dict)
    problems: list[Violation] = field(default_factory=list)
    refused: list[Violation] = field(default_factory=list)
    """Keys of verl's without a setting here: they change no setting, so the others can be read."""
    unread: set[str] = field(default_factory=set)

    def put(self, key: str, value: Any, spelling: str) -> None:
        """Take a value; a second spelling with another value is a problem."""
        before = self.spellings.get(key)
        if before is not None and before != spelling and self.values[key] != value:
            self.problems.append(
                Violation(
                    key,
                    f"given twice with different values: {before}={_shown(self.values[key])} and "
                    f"{spelling}={_shown(value)}",
                    (f"leave one of them out, e.g. keep {short_key(key)}={_shown(value)}",),
                )
            )
            self.unread.add(key)
            return
        self.values[key] = value
        self.spellings[key] = spelling


def load(
    path: Path | str | None,
    overrides: Sequence[str] = (),
    mode: str | None = None,
    *,
    also: Sequence[Check] = (),
    flags: Mapping[str, tuple[str, Any]] = _NO_FLAGS,
) -> RunConfig:
    """Return the configuration of a file and overrides; ``mode`` is that of ``--mode``.

    ``flags`` are further options of the command line: full key → (the option's name, its value). Options win over
    the file and must agree with the overrides. ``also`` are further checks, e.g. those of this machine, whose
    violations join the others, less those of settings that have one already. Raises ConfigError with every mistake:
    unknown keys, wrong types, broken rules.
    """
    loaded = read(path, overrides, mode, also=also, flags=flags)
    if loaded.violations or loaded.config is None:
        raise ConfigError(loaded.violations)
    return loaded.config


def read(
    path: Path | str | None,
    overrides: Sequence[str] = (),
    mode: str | None = None,
    *,
    also: Sequence[Check] = (),
    flags: Mapping[str, tuple[str, Any]] = _NO_FLAGS,
) -> Loaded:
    """Do what ``load`` does, but return the mistakes beside what could be read."""
    sources = [_of_file(path), _of_overrides(overrides)]
    if mode is not None:
        _take(sources[-1], "trainer.mode", mode, shown="--mode")
    for key, (option, value) in flags.items():
        _take(sources[-1], key, value, shown=option)
    merged: dict[str, Any] = {}
    problems: list[Violation] = []
    refused: list[Violation] = []
    unread: set[str] = set()
    for source in sources:
        _join_reward_function(source)
        _join_resume(source)
        merged.update(source.values)
        problems.extend(source.problems)
        refused.extend(source.refused)
        unread.update(source.unread)
    if merged.get("trainer.total_epochs") is not None and "trainer.total_training_steps" not in merged:
        merged["trainer.total_training_steps"] = None
    if merged.get("trainer.mode") in ("separate", "separate-async"):
        merged = {**SEPARATE_DEFAULTS, **merged}
    config, mistyped = _validated(merged)
    problems.extend(mistyped)
    unread.update(violation.key for violation in mistyped)
    readable = not problems
    problems.extend(refused)
    problems.extend(rules.check(config, unread=unread))
    for check in also:
        told = unread | {violation.key for violation in problems}
        problems.extend(violation for violation in check(config) if violation.key not in told)
    return Loaded(config if readable else None, tuple(problems))


def to_yaml(config: RunConfig) -> str:
    """Return the whole configuration as YAML under verl's full keys; ``load`` reads it back equal."""
    return yaml_text.dump(config.model_dump(mode="json"))


def _of_file(path: Path | str | None) -> _Source:
    source = _Source()
    if path is None:
        return source
    try:
        tree = yaml_text.parse(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        source.problems.append(
            Violation(str(path), f"cannot read the configuration file: {reason}", ("check --config",))
        )
        return source
    except yaml_text.YamlError as error:
        source.problems.append(Violation(str(path), f"is not YAML: {error}", ("mend the line that it names",)))
        return source
    if tree is None:
        return source
    if not isinstance(tree, dict):
        source.problems.append(
            Violation(
                str(path),
                f"holds a {type(tree).__name__}, not sections",
                ("write e.g. 'trainer: {seed: 1}'",),
            )
        )
        return source
    for spelling, value in _flat(tree, ""):
        _take(source, spelling, value)
    return source


def _of_overrides(overrides: Sequence[str]) -> _Source:
    source = _Source()
    for text in overrides:
        spelling, equals, raw = text.partition("=")
        # Hydra's "+key=value" adds a key; here it is an ordinary override, so a misspelt key stays an error.
        spelling = spelling.strip().lstrip("+")
        if not equals or not spelling or spelling.startswith("~"):
            source.problems.append(
                Violation(text, "is not a key=value override", ("write e.g. rollout.n=4; null unsets a value",))
            )
            continue
        try:
            value = _override_value(full_key(spelling), raw)
        except yaml_text.YamlError as error:
            problem = str(error).replace("\n", " ")
            source.problems.append(
                Violation(full_key(spelling), f"{raw!r} is not YAML: {problem}", ("quote the value",))
            )
            continue
        if isinstance(value, dict) and not _takes_mapping(full_key(spelling)):
            for inner, inner_value in _flat(value, f"{spelling}."):
                _take(source, inner, inner_value)
        else:
            _take(source, spelling, value)
    return source


def _override_value(key: str, raw: str) -> Any:
    """Read a value as YAML; where a text is wanted, a bare number or an odd character is meant literally."""
    setting = _setting_of(key)
    wants_text = setting is not None and setting.takes_text
    try:
        value = yaml_text.parse(raw)
    except yaml_text.YamlError:
        if wants_text:
            return raw
        raise
    if wants_text and isinstance(value, bool | int | float | dict):
        return raw
    return value


def _setting_of(key: str) -> Setting | None:
    return keys.settings().get(RENAMED.get(key, key))


def _takes_mapping(key: str) -> bool:
    setting = _setting_of(key)
    return setting is not None and setting.takes_mapping


def _flat(tree: dict[Any, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) of every leaf; an empty section has none."""
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict) and not _takes_mapping(full_key(key)):
            yield from _flat(value, f"{key}.")
        elif value is None and keys.is_section(full_key(key)):
            continue
        else:
            yield key, value


def _take(source: _Source, spelling: str, value: Any, *, shown: str = "") -> None:
    """Put one given value where it belongs, or say why it belongs nowhere; ``shown`` is what the user wrote."""
    key, spelling = full_key(spelling), shown or spelling
    if key in (_FN_PATH, _FN_NAME, _RESUME_MODE, _RESUME_PATH):
        source.put(key, value, spelling)
        return
    if key in RENAMED:
        value, key = converted(key, value), RENAMED[key]
        if key in (_FN_PATH, _FN_NAME):
            source.put(key, value, spelling)
            return
    if key == "trainer.mode" and isinstance(value, str):
        value = value.replace("_", "-")
    if key in keys.settings():
        source.put(key, value, spelling)
        return
    if is_known(key):
        source.refused.extend(_refusal(key, value, spelling))
    else:
        source.problems.append(_no_setting(key, value, spelling))


def _refusal(key: str, value: Any, spelling: str) -> Iterator[Violation]:
    entry = unsupported(key, value)
    if entry is None:
        return
    remedies = [entry.remedy]
    if entry.same_as_ours:
        same = " or ".join(_shown(same) for same in entry.same_as_ours)
        remedies.append(f"or give what rpcrl does: {spelling}={same}")
    yield Violation(
        key, f"a key of verl's without a setting here (given: {_shown(value)}): {entry.why}", tuple(remedies)
    )


def _no_setting(key: str, value: Any, spelling: str) -> Violation:
    if keys.is_section(key):
        inside = [name for name in keys.settings() if name.startswith(f"{key}.")]
        return Violation(
            key,
            f"is a section with {len(inside)} settings, not a setting; it cannot be {_shown(value)}",
            (f"set one of them, e.g. {short_key(inside[0])}",),
        )
    near = keys.nearest(key, tuple(RENAMED))
    if near is None:
        return Violation(key, "unknown key", ("`rpcrl plan --keys` lists every key",))
    name = short_key(near) if spelling != key or not key.startswith(keys.PREFIX) else near
    return Violation(key, f"unknown key; did you mean {name}?", (f"write {name}={_shown(value)}",))


def _join_reward_function(source: _Source) -> None:
    """Turn verl's path and name of a reward function into reward.fn."""
    path_spelling = source.spellings.pop(_FN_PATH, "")
    name_spelling = source.spellings.pop(_FN_NAME, "")
    path, name = source.values.pop(_FN_PATH, None), source.values.pop(_FN_NAME, None)
    if path is not None:
        source.put("reward.fn", f"{path}:{name or 'compute_score'}", path_spelling)
    elif name is not None:
        source.problems.append(
            Violation(
                _FN_NAME,
                f"{name_spelling}={name} names a function but no file",
                (f"set reward.fn=my_file.py:{name}", f"or set {_FN_PATH} too"),
            )
        )


def _join_resume(source: _Source) -> None:
    """Turn verl's resume mode and path into trainer.resume."""
    mode_spelling = source.spellings.pop(_RESUME_MODE, "")
    path_spelling = source.spellings.pop(_RESUME_PATH, "")
    mode, path = source.values.pop(_RESUME_MODE, None), source.values.pop(_RESUME_PATH, None)
    if mode == "resume_path" and path is None:
        source.problems.append(
            Violation(
                _RESUME_MODE,
                "resume_path needs the path of a checkpoint, and none is given",
                ("set trainer.resume=PATH", f"or set {_RESUME_PATH} too"),
            )
        )
    elif mode is not None and mode != "resume_path":
        source.put("trainer.resume", mode, mode_spelling)
    if path is not None:
        source.put("trainer.resume", path, path_spelling)


def _validated(values: dict[str, Any]) -> tuple[RunConfig, list[Violation]]:
    """Return the tree and the mistyped settings; those have their defaults in it."""
    try:
        return RunConfig.model_validate(_tree(values)), []
    except ValidationError as error:
        found = violations_of(error)
    broken = {violation.key for violation in found}
    kept = {key: value for key, value in values.items() if key not in broken}
    return RunConfig.model_validate(_tree(kept)), found


def _tree(values: dict[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for key, value in values.items():
        *sections, name = key.split(".")
        place = tree
        for section in sections:
            place = place.setdefault(section, {})
        place[name] = value
    return tree


def _shown(value: Any) -> str:
    """Return a value as it would be written on the command line."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value)
