"""Where does a worker's output go? All to its log file, the last lines to its death notice, a view to the console.

The file holds the worker's bytes as they are. Lines are put together beside it with bounded memory, whatever the
worker prints: a line keeps its first ``MAX_LINE_BYTES``, a progress bar (text after a carriage return) its last state.
Lines are never merged or left out because they look alike; when the console falls behind, the view says how many
lines are left out and which file holds them.
"""

from __future__ import annotations

import os
import re
from collections import deque
from dataclasses import dataclass, field

from rpcrl.wire.messages import WorkerOutput

__all__ = ["LAST_LINES", "MAX_LINE_BYTES", "ConsoleQueue", "LineBuffer", "LogFile", "Selector", "TailKeeper"]

LAST_LINES = 50
MAX_LINE_BYTES = 4096


class LogFile:
    """The complete output of one worker on disk. A full disk costs the log, never the worker."""

    def __init__(self, path: str) -> None:
        """Open for appending. Raises OSError when the file cannot be opened."""
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        self.path = path
        self.problem = ""
        """Why bytes are missing from the file; empty when none are."""
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)

    def write(self, data: bytes) -> bool:
        """Append ``data``; return False the first time that it cannot be written."""
        view = memoryview(data)
        try:
            while view:
                view = view[os.write(self._fd, view) :]
        except OSError as error:
            first = not self.problem
            self.problem = str(error)
            return not first
        return True

    def close(self) -> None:
        """Close the file."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class LineBuffer:
    """Bytes in, complete lines of text out; holds at most ``MAX_LINE_BYTES`` of the line that is not complete."""

    def __init__(self) -> None:
        self._line = bytearray()
        self._cut_bytes = 0
        self._at_start = False
        """A carriage return came last: more text overwrites the line."""

    def feed(self, data: bytes) -> list[str]:
        """Return the lines that ``data`` completes."""
        *complete, rest = data.split(b"\n")
        lines = []
        for piece in complete:
            self._extend(piece.removesuffix(b"\r"))
            lines.append(self._take())
        self._extend(rest)
        return lines

    def finish(self) -> list[str]:
        """Return the last line when it has no line end."""
        return [self._take()] if self._line else []

    def _extend(self, piece: bytes) -> None:
        if not piece:
            return
        if self._at_start and not piece.startswith(b"\r"):
            self._clear()
        self._at_start = piece.endswith(b"\r")
        _, returned, tail = piece.rstrip(b"\r").rpartition(b"\r")
        if returned:
            self._clear()
        room = MAX_LINE_BYTES - len(self._line)
        self._line += tail[:room]
        self._cut_bytes += max(0, len(tail) - room)

    def _take(self) -> str:
        text = self._line.decode("utf-8", errors="replace")
        if self._cut_bytes:
            text += f" … ({self._cut_bytes} more bytes on this line)"
        self._clear()
        self._at_start = False
        return text

    def _clear(self) -> None:
        self._line.clear()
        self._cut_bytes = 0


class TailKeeper:
    """The last lines that a worker wrote."""

    def __init__(self, count: int = LAST_LINES) -> None:
        self._lines: deque[str] = deque(maxlen=count)

    def add(self, line: str) -> None:
        """Remember one line and forget the oldest."""
        self._lines.append(line)

    def lines(self) -> tuple[str, ...]:
        """Return them, oldest first."""
        return tuple(self._lines)


_NOTABLE = re.compile(
    r"\b(?:WARN|WARNING|ERROR|CRITICAL|FATAL)\b"
    r"|\b\w*(?:Error|Exception|Warning)(?::|\s*$)"
    r"|\b(?:warning|error|fatal)\b:"
    r"|\b(?:Fatal Python error|Segmentation fault|[Oo]ut of memory|Aborted|terminate called)\b"
    r"|^[WEF]\d{4} "
)
_BLOCK = re.compile(r"\(most recent call (?:last|first)\):\s*$")


class Selector:
    """Decides line by line what of one worker belongs on the console.

    ``default``: everything of rank 0; of other ranks warnings, errors and whole tracebacks. ``all``; ``off``.
    """

    def __init__(self, console: str, rank: int) -> None:
        self._everything = console == "all" or (console == "default" and rank == 0)
        self._nothing = console == "off"
        self._in_block = False

    def wants(self, line: str) -> bool:
        """Tell whether this line, the next one of its worker, is shown."""
        if self._everything or self._nothing:
            return self._everything
        if _BLOCK.search(line):
            self._in_block = True
            return True
        if self._in_block:
            # Indented lines and their blank lines belong to the traceback; the first other line ends it and names
            # the exception.
            self._in_block = not line or line[0] in " \t|+"
            return True
        return bool(_NOTABLE.search(line))


@dataclass
class _Pending:
    log_path: str
    lines: list[str] = field(default_factory=list)
    left_out: int = 0


class ConsoleQueue:
    """Lines on their way to the console, bounded in number and bytes over all workers of the node."""

    def __init__(self, max_lines: int = 1000, max_bytes: int = 256 << 10) -> None:
        self._max_lines = max_lines
        self._max_bytes = max_bytes
        self._num_lines = 0
        self._num_bytes = 0
        self._pending: dict[str, _Pending] = {}

    def __bool__(self) -> bool:
        return bool(self._pending)

    def add(self, identity: str, line: str, log_path: str) -> None:
        """Queue one line, or count it as left out when the queue is full."""
        pending = self._pending.setdefault(identity, _Pending(log_path))
        # Once a line of a worker is left out, so are its later ones: the note stands where the gap is.
        if pending.left_out or self._num_lines >= self._max_lines or self._num_bytes >= self._max_bytes:
            pending.left_out += 1
            return
        pending.lines.append(line)
        self._num_lines += 1
        self._num_bytes += len(line)

    def take(self) -> list[WorkerOutput]:
        """Return what is queued, one message per worker, and empty the queue."""
        taken = [self._message(identity, pending) for identity, pending in self._pending.items()]
        self._pending.clear()
        self._num_lines = self._num_bytes = 0
        return taken

    def take_of(self, identity: str) -> list[WorkerOutput]:
        """Return what is queued of one worker: its last words go out before its death notice."""
        pending = self._pending.pop(identity, None)
        if pending is None:
            return []
        self._num_lines -= len(pending.lines)
        self._num_bytes -= sum(map(len, pending.lines))
        return [self._message(identity, pending)]

    @staticmethod
    def _message(identity: str, pending: _Pending) -> WorkerOutput:
        lines = tuple(pending.lines)
        if pending.left_out:
            noun = "line is" if pending.left_out == 1 else "lines are"
            lines += (
                f"[rpcrl] {pending.left_out} {noun} left out here because the console fell behind; "
                f"all of them are in {pending.log_path}",
            )
        return WorkerOutput(identity, lines)
