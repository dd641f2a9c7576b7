"""How does an exception cross processes without losing its story?

As text. The class is never needed on the other side, so an exception that cannot be rebuilt loses nothing. What was
a builtin exception there is that builtin here too: ``except ValueError`` works on a ``RemoteValueError``.
"""

from __future__ import annotations

import builtins
import os
import socket
import traceback
from typing import Any

from rpcrl.errors import RemoteError
from rpcrl.wire.messages import CallId, FailureInfo

__all__ = ["MAX_MESSAGE_BYTES", "MAX_TRACEBACK_BYTES", "describe", "rebuild"]

MAX_MESSAGE_BYTES = 64 << 10
MAX_TRACEBACK_BYTES = 256 << 10
_MAX_CAUSES = 16

_NEVER = frozenset({
    "BaseException", "Exception", "BaseExceptionGroup", "ExceptionGroup", "SystemExit", "KeyboardInterrupt",
    "StopIteration", "StopAsyncIteration", "GeneratorExit", "CancelledError"
})  # fmt: skip
"""Never raised as themselves: they would steer the caller's interpreter, or say nothing."""


def describe(error: BaseException) -> FailureInfo:
    """Return an exception as text: type, message, traceback, chain of causes.

    Never raises, whatever the exception's own methods do.
    """
    names = [cls.__name__ for cls in type(error).__mro__ if cls.__module__ == "builtins" and _may_be_raised(cls)]
    return FailureInfo(
        type_name=_type_name(error),
        message=_cap(_message(error), MAX_MESSAGE_BYTES, "message"),
        traceback_text=_cap(_traceback(error), MAX_TRACEBACK_BYTES, "traceback", keep_end=True),
        builtin_bases=tuple(names),
        causes=tuple(_causes(error)),
        host=socket.gethostname(),
        pid=os.getpid(),
    )


def rebuild(
    info: FailureInfo,
    *,
    method: str = "",
    role: str = "",
    group: str = "",
    rank: int = -1,
    call_id: CallId | str = "",
    log_path: str = "",
) -> RemoteError:
    """Return the exception to raise here: a RemoteError that is also the nearest builtin type, if there is one."""
    cls: type[RemoteError] = RemoteError
    for name in info.builtin_bases:
        base = getattr(builtins, name, None)
        if isinstance(base, type) and _may_be_raised(base):
            cls = _remote_class(base)
            break
    return cls(
        type_name=info.type_name,
        message=info.message,
        traceback_text=info.traceback_text,
        method=method,
        role=role,
        group=group,
        rank=rank,
        host=info.host,
        pid=info.pid,
        call_id=str(call_id),
        causes=info.causes,
        log_path=log_path,
    )


def _may_be_raised(cls: type) -> bool:
    return issubclass(cls, Exception) and cls.__name__ not in _NEVER


_classes: dict[type[Exception], type[RemoteError]] = {}


def _remote_class(base: type[Exception]) -> type[RemoteError]:
    """Return (and keep) ``Remote<Base>``, a RemoteError that is a ``base``."""
    known = _classes.get(base)
    if known is not None:
        return known

    def new(cls: Any, *args: object, **fields: object) -> Any:
        # Builtins like UnicodeDecodeError insist on arguments, and OSError picks a subclass by errno: make the bare
        # object. Which constructor is safe depends on whose memory layout the class has.
        layout = cls.__base__
        while layout is not None and layout.__new__ is new:
            layout = layout.__base__
        maker = Exception if layout is None or issubclass(layout, RemoteError) else layout
        return maker.__new__(cls)

    cls = type(
        f"Remote{base.__name__}",
        (RemoteError, base),
        {
            "__module__": __name__,
            "__doc__": f"A method raised {base.__name__} on a worker; the worker lives on.",
            "__new__": new,
        },
    )
    _classes[base] = cls
    return cls


def _type_name(error: BaseException) -> str:
    cls = type(error)
    return cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"


def _message(error: BaseException) -> str:
    if isinstance(error, RemoteError):
        return str(error)
    try:
        text = error.args[0] if isinstance(error, KeyError) and len(error.args) == 1 else str(error)
        return text if type(text) is str else repr(text)
    except BaseException as broken:
        return f"<{_type_name(error)}.__str__ itself raised {_type_name(broken)}>"


def _traceback(error: BaseException) -> str:
    try:
        return "".join(traceback.format_exception(error))
    except BaseException as broken:
        frames = "".join(traceback.format_tb(error.__traceback__))
        return f"{frames}{_type_name(error)}: <formatting it raised {_type_name(broken)}>\n"


def _causes(error: BaseException) -> list[str]:
    """One line per link of the chain that ``raise … from`` and ``except`` made, nearest first."""
    lines: list[str] = []
    seen = {id(error)}
    current = error
    while len(lines) < _MAX_CAUSES:
        word = "caused by"
        following = current.__cause__
        if following is None and not current.__suppress_context__:
            word, following = "while handling", current.__context__
        if following is None or id(following) in seen:
            break
        seen.add(id(following))
        lines.append(_cap(f"{word} {_type_name(following)}: {_message(following)}", 4096, "cause"))
        current = following
    return lines


def _cap(text: str, limit_bytes: int, what: str, *, keep_end: bool = False) -> str:
    """Cut to ``limit_bytes`` of UTF-8 with a note; a traceback keeps both ends: its last line says what happened."""
    data = text.encode("utf-8", "surrogatepass") if len(text) * 4 > limit_bytes else b""
    if len(data) <= limit_bytes:
        return text
    note = f"… [{what} cut: {len(data)} bytes, the limit is {limit_bytes}]"
    if not keep_end:
        return data[:limit_bytes].decode("utf-8", "ignore") + note
    half = limit_bytes // 2
    return f"{data[:half].decode('utf-8', 'ignore')}\n{note}\n{data[-half:].decode('utf-8', 'ignore')}"
