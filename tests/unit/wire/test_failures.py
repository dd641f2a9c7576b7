"""Does an exception's story survive, whatever the exception is? And can it be caught as what it was?"""

from __future__ import annotations

import asyncio
import builtins
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rpcrl.errors import RemoteError, WorkerLostError
from rpcrl.wire.failures import MAX_MESSAGE_BYTES, MAX_TRACEBACK_BYTES, describe, rebuild
from rpcrl.wire.frames import from_frames, to_frames
from rpcrl.wire.messages import CallId, Failure, FailureInfo


def caught(raiser: Callable[[], Any]) -> BaseException:
    try:
        raiser()
    except BaseException as error:
        return error
    raise AssertionError("nothing was raised")


def over_the_wire(error: BaseException) -> FailureInfo:
    message = Failure(CallId("c", "i", 1), "raised", describe(error))
    back = from_frames([bytes(frame) for frame in to_frames(message)])
    assert isinstance(back, Failure)
    return back.info


class NeedsKeywords(Exception):
    def __init__(self, *, code: int) -> None:
        super().__init__(f"code {code}")
        self.code = code


class HoldsALambda(ValueError):
    def __init__(self) -> None:
        super().__init__("holds a lambda")
        self.callback = lambda: 1


class StrFails(RuntimeError):
    def __str__(self) -> str:
        raise MemoryError("no text")

    __repr__ = __str__


class OddMeta(Exception):
    args = property(lambda self: 1 / 0)  # type: ignore[assignment]


def raise_it(error: BaseException) -> Callable[[], None]:
    def function_that_raises() -> None:
        raise error

    return function_that_raises


def test_p31_exceptions_that_cannot_be_rebuilt_keep_their_story() -> None:
    for error, kind, words in (
        (NeedsKeywords(code=7), RemoteError, "code 7"),
        (HoldsALambda(), ValueError, "holds a lambda"),
        (StrFails(), RuntimeError, "__str__ itself raised MemoryError"),
        (OddMeta("odd"), RemoteError, "OddMeta"),
    ):
        info = over_the_wire(caught(raise_it(error)))
        back = rebuild(info, method="update", role="actor", group="g", rank=3, call_id=CallId("c", "i", 9))
        assert isinstance(back, kind)
        assert isinstance(back, RemoteError)
        assert type(error).__qualname__ in back.type_name
        assert "function_that_raises" in back.traceback_text
        text = str(back)
        for part in (words, "actor.update raised", "rank 3 of group 'g'", "c#9@i", "function_that_raises"):
            assert part in text


def test_p31_sizes_are_capped_with_a_note() -> None:
    info = over_the_wire(caught(raise_it(ValueError("ü" * 10_000_000))))
    assert len(info.message.encode()) < MAX_MESSAGE_BYTES + 200
    assert "[message cut: 20000000 bytes, the limit is 65536]" in info.message
    assert len(info.traceback_text.encode("utf-8", "surrogatepass")) < MAX_TRACEBACK_BYTES + 200
    assert "traceback cut" in info.traceback_text
    assert "function_that_raises" in info.traceback_text


def test_p31_the_chain_of_causes_is_kept() -> None:
    def chain() -> None:
        try:
            try:
                raise KeyError("first")
            except KeyError:
                raise ValueError("second")  # noqa: B904 (the implicit chain is what is tested)
        except ValueError as error:
            raise RuntimeError("third") from error

    info = over_the_wire(caught(chain))
    assert info.causes == ("caused by ValueError: second", "while handling KeyError: first")
    assert all(word in info.traceback_text for word in ("first", "second", "third", "direct cause"))

    def hidden() -> None:
        try:
            raise KeyError("secret")
        except KeyError:
            raise ValueError("shown") from None

    assert over_the_wire(caught(hidden)).causes == ()


def test_a_chain_that_bites_its_tail_ends() -> None:
    first, second = ValueError("1"), ValueError("2")
    first.__cause__, second.__cause__ = second, first
    assert describe(first).causes == ("caused by ValueError: 2",)


BUILTINS = sorted(
    {value for value in vars(builtins).values() if isinstance(value, type) and issubclass(value, BaseException)},
    key=lambda cls: cls.__name__,
)
NOT_AS_THEMSELVES = (
    SystemExit,
    KeyboardInterrupt,
    StopIteration,
    StopAsyncIteration,
    GeneratorExit,
    BaseExceptionGroup,
)


@pytest.mark.parametrize("cls", BUILTINS, ids=lambda cls: cls.__name__)
def test_every_builtin_can_be_caught_as_itself(cls: type[BaseException]) -> None:
    names = tuple(base.__name__ for base in cls.__mro__ if base.__module__ == "builtins")
    error = rebuild(FailureInfo(cls.__name__, "the message", "", names))
    assert isinstance(error, RemoteError)
    assert "the message" in str(error)
    assert repr(error)
    if issubclass(cls, NOT_AS_THEMSELVES):
        assert not isinstance(error, NOT_AS_THEMSELVES)
    elif cls not in (BaseException, Exception):
        assert isinstance(error, cls)
        assert type(error).__name__ == f"Remote{cls.__name__}"
        assert type(rebuild(FailureInfo("x", "", "", names))) is type(error)  # one class each, made once


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (caught(lambda: b"\xff".decode()), UnicodeDecodeError),
        (caught(lambda: Path("/nonexistent/file").read_bytes()), FileNotFoundError),
        (caught(lambda: {}["key"]), KeyError),
        (caught(lambda: [][1]), IndexError),
        (caught(lambda: 1 / 0), ZeroDivisionError),
        (caught(lambda: None.x), AttributeError),  # type: ignore[attr-defined]
        (TimeoutError("late"), TimeoutError),
        (caught(lambda: int("x")), ValueError),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_raised_here_and_caught_by_its_builtin_type(error: BaseException, kind: type[Exception]) -> None:
    with pytest.raises(kind, match=re.escape(str(error.args[-1]))) as info:
        raise rebuild(over_the_wire(error))
    assert isinstance(info.value, RemoteError)
    assert info.value.type_name == type(error).__name__


def test_cancelled_is_never_raised_as_itself() -> None:
    info = over_the_wire(asyncio.CancelledError("stop"))
    assert info.type_name == "asyncio.exceptions.CancelledError"
    assert not isinstance(rebuild(info), asyncio.CancelledError)


def test_a_peer_cannot_choose_a_type_that_is_no_builtin_exception() -> None:
    for name in ("eval", "int", "SystemExit", "os", "", "Warning.__class__"):
        assert type(rebuild(FailureInfo("x", "m", "", (name,)))) is RemoteError


def test_a_remote_error_seen_again_keeps_both_stories() -> None:
    inner = rebuild(FailureInfo("ValueError", "deep", "inner traceback", ("ValueError",)), role="ref", method="m")
    outer = rebuild(over_the_wire(caught(raise_it(inner))), role="actor", method="n")
    assert isinstance(outer, ValueError)
    assert all(word in str(outer) for word in ("deep", "inner traceback", "ref.m", "actor.n"))


def test_errors_of_rpcrl_itself_travel_too() -> None:
    assert issubclass(WorkerLostError, Exception)
    info = describe(caught(raise_it(RemoteError(type_name="X", message="m", traceback_text=""))))
    assert info.builtin_bases == ()
