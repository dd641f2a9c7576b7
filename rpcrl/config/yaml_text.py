"""How are YAML scalars read? As YAML 1.2 does, so that ``5e-4`` is a number and ``off`` is a word.

PyYAML's own rules are those of YAML 1.1: ``lr: 5e-4`` is text there, ``no`` is false, ``12:30`` is 750, and
the second of two equal keys wins silently. Here two equal keys in one mapping are an error.
"""

from __future__ import annotations

import re
from collections.abc import Hashable
from typing import Any

import yaml

__all__ = ["YamlError", "dump", "parse"]

YamlError = yaml.YAMLError

_FLOAT = re.compile(r"[-+]?(?:\d+\.\d*|\.\d+|\d+)(?:[eE][-+]?\d+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)")


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader with YAML 1.2's core scalars and without duplicate keys."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012 - PyYAML's own attribute

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        """Return the mapping; raises on a key that stands in it twice."""
        seen: dict[Hashable, yaml.Node] = {}
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, Hashable) and key in seen:
                raise yaml.constructor.ConstructorError(
                    "in a mapping", node.start_mark, f"the key {key!r} stands twice", key_node.start_mark
                )
            seen[key] = key_node
        return super().construct_mapping(node, deep=deep)


def _core_resolvers() -> None:
    add = _Loader.add_implicit_resolver
    add("tag:yaml.org,2002:bool", re.compile(r"(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF"))
    add("tag:yaml.org,2002:null", re.compile(r"(?:~|null|Null|NULL|None|)$"), ["~", "n", "N", ""])
    # Integers first: the pattern of numbers with a point or an exponent matches plain digits too.
    add("tag:yaml.org,2002:int", re.compile(r"[-+]?\d+$"), list("-+0123456789"))
    add("tag:yaml.org,2002:float", re.compile(f"(?:{_FLOAT.pattern})$"), list("-+0123456789."))


def _construct_int(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int:
    """Decimal only: PyYAML would read 010 as 8."""
    return int(loader.construct_scalar(node))


_core_resolvers()
_Loader.add_constructor("tag:yaml.org,2002:int", _construct_int)


def parse(text: str) -> Any:
    """Return the value of a YAML text. Raises YamlError with line and column."""
    return yaml.load(text, Loader=_Loader)


def dump(value: Any) -> str:
    """Return ``value`` as block YAML, keys in their order; ``parse`` reads it back equal."""
    return yaml.safe_dump(value, sort_keys=False, allow_unicode=True)
