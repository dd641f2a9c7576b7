"""Do messages become frames and come back, and is every other sequence of bytes refused?"""

from __future__ import annotations

from typing import Any, get_args

import msgpack
import pytest

from rpcrl.errors import DecodeError, EncodeError, MessageTooLargeError, ProtocolMismatchError, WorkerExit
from rpcrl.wire.codec import encode
from rpcrl.wire.frames import KINDS, FrameLimits, from_frames, to_frames
from rpcrl.wire.messages import (
    AllowImports,
    AskProgress,
    Call,
    CallId,
    Cancel,
    Encoded,
    ExpectPeer,
    Failure,
    FailureInfo,
    ForgetPeer,
    Free,
    GroupEnded,
    Hello,
    Introduce,
    Introduction,
    Message,
    PeerAddress,
    PeerExpected,
    Probe,
    Progress,
    Ready,
    Result,
    Shutdown,
    StartWorkers,
    Status,
    Step,
    StopWorkers,
    Welcome,
    WorkerExited,
    WorkerOutput,
    WorkerStart,
    WorkerStarted,
)

CALL = CallId("controller", "life-1", 7)
PAYLOAD = encode(((1, b"x" * 600), {"k": bytearray(b"y" * 700)}))

MESSAGES: dict[str, Message] = {
    "hello": Hello("worker", "w0", "i1", "host", 12, "boot", 1, {"python": "3.11"}, 29500, ("0", "1")),
    "welcome": Welcome({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}, PAYLOAD),
    "ready": Ready("w0"),
    "call": Call(CALL, "actor", "update", PAYLOAD, 5),
    "result": Result(CALL, PAYLOAD, 0, (1.5, 2.0, 2.5)),
    "failure": Failure(
        CALL, "raised", FailureInfo("ValueError", "m\ud800", "tb", ("ValueError",), ("caused by x",), "h", 3)
    ),
    "probe": Probe("controller", "life-1", (1, 2, 3), 1),
    "cancel": Cancel(CALL),
    "status": Status("controller", {4: 1.5}, (5,), "update"),
    "shutdown": Shutdown("over"),
    "start": StartWorkers(
        "g", "mod", None, (WorkerStart("w0", 0, 1, 0, 0, 1, None, ("actor",), b"\x00key"),), {"A": "b"}
    ),
    "stop": StopWorkers(("w0",), 2.0),
    "started": WorkerStarted("w0", 5, "/log"),
    "exited": WorkerExited("w0", "h", 5, None, "SIGKILL", 10, False, ("last",), "/log", ""),
    "output": WorkerOutput("w0", ("line 1", "line 2")),
    "imports": AllowImports(("mylib",)),
    "introduce": Introduce("g"),
    "expect peer": ExpectPeer("w0", "key"),
    "peer expected": PeerExpected("w0", "ipc:///p"),
    "introduction": Introduction("g", (PeerAddress("w1", "i1", 0, "ipc:///q", ""),)),
    "group ended": GroupEnded(
        "g", "lost", "why", (WorkerExit("w1", "g", 0, ("actor",), "h", 5, None, "SIGKILL", 10, False, ("l",), "/log"),)
    ),
    "forget peer": ForgetPeer("w0"),
    "free": Free((1, 2)),
    "ask progress": AskProgress((CallId("controller", "i1", 3),)),
    "progress": Progress((Step(CallId("controller", "i1", 3), True, "actor.update", 1.5, "File x"),)),
}


def test_every_kind_of_message_is_here_and_has_a_number() -> None:
    assert {type(message) for message in MESSAGES.values()} == set(get_args(Message)) == set(KINDS.values())


@pytest.mark.parametrize("name", MESSAGES)
def test_comes_back_the_same(name: str) -> None:
    message = MESSAGES[name]
    frames = to_frames(message)
    assert from_frames([bytes(frame) for frame in frames]) == message
    assert len(frames) == (3 if isinstance(message, Welcome | Call | Result) else 1)
    assert len(msgpack.unpackb(bytes(frames[0]), strict_map_key=False, unicode_errors="surrogatepass")) < 16


def test_what_a_receiver_would_refuse_is_refused_by_the_sender() -> None:
    many = Encoded(b"\xc0", (b"x" * 600,) * ((1 << 16) + 1))
    with pytest.raises(MessageTooLargeError, match=r"65537 arrays and tensors.*Stack them"):
        to_frames(Result(CALL, many))
    assert len(to_frames(Result(CALL, Encoded(b"\xc0", many.buffers[1:])))) == (1 << 16) + 1


def test_a_payload_is_encoded_once_and_its_buffers_are_not_copied() -> None:
    first = to_frames(Call(CALL, "actor", "update", PAYLOAD))
    second = to_frames(Call(CallId("controller", "life-2", 8), "actor", "update", PAYLOAD))
    assert first[1] is second[1] is PAYLOAD.buffers[0]
    assert bytes(first[0]).endswith(PAYLOAD.tree)


def test_another_version_is_told_apart_from_damage() -> None:
    frame = bytes(to_frames(Ready("w0"))[0])
    with pytest.raises(ProtocolMismatchError, match=r"version 2 .* this process version 1"):
        from_frames([frame[:1] + b"\x02" + frame[2:]])
    with pytest.raises(ProtocolMismatchError):
        from_frames([msgpack.packb([99, "anything", {}, []])])


@pytest.mark.parametrize(
    ("frames", "words"),
    [
        ([], "without frames"),
        ([b""], "not a valid envelope"),
        ([b"\x80\x04\x95\x00."], "not a valid envelope"),
        ([msgpack.packb([1, 99])], "unknown kind"),
        ([msgpack.packb([1, [1]])], "unknown kind"),
        ([msgpack.packb([1, 3])], "with 0 fields"),
        ([msgpack.packb([1, 3, "a", "b"])], "with 2 fields"),
        ([msgpack.packb([1, 3, 5])], "a int where str is due"),
        ([msgpack.packb([1, 3, "w0"]) + b"x"], "not a valid envelope"),
        ([msgpack.packb([1, 3, "w0"]), b"buffer"], "with 1 buffers; it has no payload"),
        ([msgpack.packb([1, 2, [1], None])], "where a map is due"),
        ([msgpack.packb([1, 7, "c", "i", [1, True], 0])], "a bool where int is due"),
        ([msgpack.packb([1, 8, "c", {"a": 1.0}, [], ""])], "a str where int is due"),
        ([msgpack.packb([1, 5, ["c", "i"], 0, [], 0])], "is an array of 3 fields"),
        ([msgpack.packb([1, 5, ["c", "i", 1]])], "with 1 fields; it has 4"),
        ([msgpack.packb([1, 5, ["c", "i", 1], 0, [], []])], "whose payload is a list"),
        ([msgpack.packb({"1": 2})], "no array of a version"),
        ([msgpack.packb([1])], "no array of a version"),
        ([b"\xdd\xff\xff\xff\xff\x01\x03"], "not a valid envelope"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_refuses_what_is_no_message(frames: list[bytes], words: str) -> None:
    with pytest.raises(DecodeError, match=words):
        from_frames(frames)


def test_limits() -> None:
    call = to_frames(MESSAGES["call"])
    with pytest.raises(DecodeError, match="2 buffers; the limit is 1"):
        from_frames(call, limits=FrameLimits(max_buffers=1))
    with pytest.raises(DecodeError, match="the limit is 10"):
        from_frames(call, limits=FrameLimits(max_envelope_bytes=10))


@pytest.mark.parametrize(
    "message",
    [PAYLOAD, "text", Ready(object()), Call(CALL, "r", "m", Encoded(b"\xc0"), 2**80)],
    ids=lambda m: type(m).__name__,  # type: ignore[arg-type]
)
def test_refuses_to_write_what_is_no_message(message: Any) -> None:
    with pytest.raises(EncodeError):
        to_frames(message)
