"""What is a worker doing right now? The stacks of its methods, read by another thread while they run."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Any

from rpcrl.wire.messages import CallId, Step

__all__ = ["Running", "running_here", "step_of"]

MAX_FRAMES = 25
"""The innermost ones: those say what is waited for."""
_RUNTIME = ("serve.py", "_invoke")
"""File and function below which a method's own frames begin."""


@dataclass(frozen=True)
class Running:
    """The synchronous method that runs in the main thread."""

    call_id: CallId
    method: str
    since: float
    thread: int


def step_of(call_id: CallId, running: Running | None, tasks: Mapping[CallId, asyncio.Task[Any]]) -> Step:
    """Return what a call does: it runs, or waits for the synchronous method that runs now."""
    task = tasks.get(call_id)
    if task is not None:
        return Step(call_id, True, "", 0.0, _written(_frames_of_task(task)))
    if running is None:
        return Step(call_id, False, "", 0.0, "")
    frames = _frames_of_thread(running.thread)
    seconds = time.monotonic() - running.since
    return Step(call_id, running.call_id == call_id, running.method, seconds, _written(frames))


def running_here(call_id: CallId, method: str) -> Running:
    """Note that a call runs from now on in this thread."""
    return Running(call_id, method, time.monotonic(), threading.get_ident())


def _frames_of_thread(ident: int) -> list[FrameType]:
    frame = sys._current_frames().get(ident)
    frames: list[FrameType] = []
    while frame is not None:
        code = frame.f_code
        if code.co_name == _RUNTIME[1] and code.co_filename.endswith(_RUNTIME[0]):
            break
        frames.append(frame)
        frame = frame.f_back
    return frames[::-1]


def _frames_of_task(task: asyncio.Task[Any]) -> list[FrameType]:
    """Return the frames of a coroutine and of what it awaits; of a task itself only the outermost would be told."""
    frames: list[FrameType] = []
    awaited: Any = task.get_coro()
    while awaited is not None:
        frame = getattr(awaited, "cr_frame", None) or getattr(awaited, "gi_frame", None)
        if frame is not None:
            frames.append(frame)
        awaited = getattr(awaited, "cr_await", None) or getattr(awaited, "gi_yieldfrom", None)
    return frames[1:]  # the first is the server's own


def _written(frames: list[FrameType]) -> str:
    summary = traceback.StackSummary.extract((frame, frame.f_lineno) for frame in frames[-MAX_FRAMES:])
    return "".join(summary.format())
