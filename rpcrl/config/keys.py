"""Which setting does a key mean? Full and short spellings, and the nearest key to an unknown one."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from types import UnionType
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from rpcrl.config.run import RunConfig

__all__ = ["Setting", "full_key", "is_section", "nearest", "settings", "short_key"]

PREFIX = "actor_rollout_ref."
_SHORT_HEADS = ("model", "actor", "ref", "rollout")


@dataclass(frozen=True)
class Setting:
    """One leaf of the tree."""

    key: str
    default: Any
    description: str
    takes_text: bool
    """The value may be a text, so a bare word or number on the command line is meant literally."""
    takes_mapping: bool


def full_key(key: str) -> str:
    """Return ``key`` with the prefix that ``rollout.n`` and its like leave out."""
    head = key.partition(".")[0]
    return PREFIX + key if head in _SHORT_HEADS else key


def short_key(key: str) -> str:
    """Return the shortest spelling of a full key."""
    return key.removeprefix(PREFIX)


def _kinds(annotation: Any) -> Iterator[Any]:
    """Yield the plain types of an annotation, out of unions and Annotated."""
    if get_origin(annotation) in (Union, UnionType):
        for part in get_args(annotation):
            yield from _kinds(part)
    elif hasattr(annotation, "__metadata__"):
        yield from _kinds(annotation.__origin__)
    else:
        yield get_origin(annotation) or annotation


def _leaves(model: type[BaseModel], prefix: str) -> Iterator[Setting]:
    for name, field in model.model_fields.items():
        key = f"{prefix}{name}"
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from _leaves(field.annotation, f"{key}.")
        else:
            yield _setting(key, field)


def _setting(key: str, field: FieldInfo) -> Setting:
    kinds = list(_kinds(field.annotation))
    return Setting(
        key=key,
        default=field.get_default(call_default_factory=True),
        description=field.description or "",
        takes_text=str in kinds,
        takes_mapping=dict in kinds,
    )


@cache
def settings() -> Mapping[str, Setting]:
    """Return every setting by its full key, in the order of the tree."""
    return {setting.key: setting for setting in _leaves(RunConfig, "")}


@cache
def _sections() -> frozenset[str]:
    sections: set[str] = set()
    for key in settings():
        parts = key.split(".")
        sections.update(".".join(parts[:length]) for length in range(1, len(parts)))
    return frozenset(sections)


def is_section(key: str) -> bool:
    """Say whether a full key names a part of the tree rather than a setting."""
    return key in _sections()


def nearest(key: str, also: tuple[str, ...] = ()) -> str | None:
    """Return the known key that an unknown full ``key`` most likely means; None when nothing is near.

    The same name elsewhere goes first, then a sibling with a similar name, then the whole path. ``also`` are
    further keys that would be understood.
    """
    known = [*settings(), *also]
    section, _, name = key.rpartition(".")
    elsewhere = [full for full in known if full.rpartition(".")[2] == name]
    if elsewhere:
        # the critic has many names of the actor's; it is meant only where it is named
        head = key.partition(".")[0]
        return max(
            elsewhere,
            key=lambda full: (
                full.startswith(f"{head}."),
                not full.startswith("critic."),
                difflib.SequenceMatcher(None, full, key).ratio(),
            ),
        )
    siblings = {full.rpartition(".")[2]: full for full in known if full.rpartition(".")[0] == section}
    near = difflib.get_close_matches(name, siblings, n=1, cutoff=0.6)
    if near:
        return siblings[near[0]]
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.7)
    if near:
        return near[0]
    by_name = {full.rpartition(".")[2]: full for full in known}
    near = difflib.get_close_matches(name, by_name, n=1, cutoff=0.75)
    return by_name[near[0]] if near else None
