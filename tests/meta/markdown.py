"""What stands in a Markdown file: fenced blocks, headings and links, each with its line."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.meta.sources import ROOT, tracked_files


@dataclass(frozen=True)
class Block:
    """One fenced block; ``language`` and ``tag`` are the first and second word after the fence."""

    path: Path
    line: int
    language: str
    tag: str
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}"


def documents() -> list[Path]:
    """Return the Markdown files of the project, relative to the root."""
    return [path for path in tracked_files() if path.suffix == ".md"]


def blocks(*languages: str) -> list[Block]:
    """Return the fenced blocks in one of ``languages`` (in any, when none is named), over all documents."""
    found = [block for path in documents() for block in _blocks_of(path)]
    return [block for block in found if not languages or block.language in languages]


def links(path: Path) -> Iterator[tuple[int, str]]:
    """Yield ``(line, target)`` of every link in running text; code is no text."""
    for number, line in _prose(path):
        for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`]*`", "", line)):
            yield number, target


def anchors(path: Path) -> set[str]:
    """Return the anchors of a document's headings, formed as code hosts form them."""
    found = set()
    for _, line in _prose(path):
        match = re.match(r"#{1,6}\s+(.*)", line)
        if match is not None:
            text = re.sub(r"[^\w\- ]", "", match.group(1).strip().lower())
            found.add(text.replace(" ", "-"))
    return found


def _blocks_of(path: Path) -> Iterator[Block]:
    opened: tuple[int, str, str] | None = None
    lines: list[str] = []
    for number, line in enumerate((ROOT / path).read_text(encoding="utf-8").splitlines(), start=1):
        if not line.startswith("```"):
            lines.append(line)
            continue
        if opened is None:
            words = [*line.strip("`").split(), "", ""]
            opened, lines = (number, words[0], words[1]), []
        else:
            yield Block(path, opened[0], opened[1], opened[2], "\n".join(lines) + "\n")
            opened = None
    if opened is not None:
        raise ValueError(f"{path}:{opened[0]}: a fence is not closed")


def _prose(path: Path) -> Iterator[tuple[int, str]]:
    inside = False
    for number, line in enumerate((ROOT / path).read_text(encoding="utf-8").splitlines(), start=1):
        if line.startswith("```"):
            inside = not inside
        elif not inside:
            yield number, line
