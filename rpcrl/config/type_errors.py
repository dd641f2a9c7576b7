"""What is said about a value of the wrong type or outside its range?"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from rpcrl.config import keys
from rpcrl.config.keys import Setting, short_key
from rpcrl.errors import Violation

__all__ = ["violations_of"]

QUOTE = '"'
_WANTED = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "string_type": "a text",
    "dict_type": "a mapping",
    "tuple_type": "a list of two numbers",
    "missing": "a list of two numbers",
    "too_long": "a list of two numbers",
}
_BOUNDS = {
    "greater_than": (">", "gt"),
    "greater_than_equal": (">=", "ge"),
    "less_than": ("<", "lt"),
    "less_than_equal": ("<=", "le"),
}


def violations_of(error: ValidationError) -> list[Violation]:
    """Return one violation per mistyped setting, in the order of the tree."""
    found: dict[str, Violation] = {}
    for detail in error.errors():
        key = _key_of(detail["loc"])
        if key not in found:
            found[key] = _violation(key, detail)
    return list(found.values())


def _key_of(location: tuple[int | str, ...]) -> str:
    """Return the setting that pydantic's location lies in."""
    parts: list[str] = []
    for part in location:
        parts.append(str(part))
        if ".".join(parts) in keys.settings():
            break
    return ".".join(parts)


def _violation(key: str, detail: Mapping[str, Any]) -> Violation:
    setting = keys.settings()[key]
    kind, given, context = detail["type"], detail["input"], detail.get("ctx", {})
    if kind in _BOUNDS:
        sign, name = _BOUNDS[kind]
        problem = f"{given} must be {sign} {context[name]}"
    elif kind == "literal_error":
        problem = f"{given!r} is not one of {context['expected']}"
    elif kind in _WANTED:
        problem = f"{given!r} is not {_WANTED[kind]}"
    else:
        problem = f"{given!r}: {detail['msg']}"
    return Violation(key, problem, (*_near(key, given, context), _example(setting)))


def _example(setting: Setting) -> str:
    """Return a value that is accepted, with what it means."""
    default = list(setting.default) if isinstance(setting.default, tuple) else setting.default
    meaning = setting.description.rpartition(" (default:")[0]
    return f"write e.g. {short_key(setting.key)}={json.dumps(default).strip(QUOTE)} ({meaning})"


def _near(key: str, given: object, context: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the choice that a mistyped one is near to."""
    if "expected" not in context or not isinstance(given, str):
        return ()
    choices = [choice.strip("' ") for choice in context["expected"].replace(" or ", ",").split(",")]
    near = difflib.get_close_matches(given, choices, n=1, cutoff=0.75)
    return (f"did you mean {short_key(key)}={near[0]}?",) if near else ()
