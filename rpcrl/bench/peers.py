"""What does a call cost the controller when there are a thousand workers?

The controller's own thread, with all its tables, over the transport within the process; the workers are simulated by
one thread that answers each call at once. What is left is what one controller pays for each worker and call.
"""

from __future__ import annotations

import concurrent.futures
import secrets
from types import TracebackType

from rpcrl.errors import StartError
from rpcrl.runtime.caller import Part
from rpcrl.runtime.console import Console
from rpcrl.runtime.future import PendingReplies
from rpcrl.runtime.hub import AGENT, Hub
from rpcrl.runtime.membership import Group, Member
from rpcrl.transport.base import Connection
from rpcrl.transport.open import connect, listen
from rpcrl.wire.codec import encode
from rpcrl.wire.frames import from_frames, to_frames
from rpcrl.wire.messages import Call, Hello, Message, Ready, Result, StartWorkers, Welcome

__all__ = ["LightPeers"]

WITHIN_S = 60.0


class LightPeers:
    """A controller's hub and ``count`` simulated workers in one group. A context manager; leaves no thread."""

    def __init__(self, count: int) -> None:
        self._nothing = encode(((), {}))
        listener = listen(f"inproc://light-{secrets.token_hex(8)}")
        self._console = Console(lambda _: None)
        self._hub = Hub(listener, self._console)
        self._agent = connect(listener.address, identity=AGENT)
        names = [f"w{rank}" for rank in range(count)]
        self._peers = {name: connect(listener.address, identity=name) for name in names}
        self._parts = [Part(name, self._nothing) for name in names]
        try:
            self._bring_up(names)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> LightPeers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the hub and its peers."""
        self._hub.stop()
        for peer in (self._agent, *self._peers.values()):
            peer.close()
        self._console.close()

    def call_all(self) -> None:
        """One call to every worker, and all the replies."""
        pending = PendingReplies("r.m", range(len(self._parts)))
        self._hub.post(lambda: self._hub.call("light", "r", "m", self._parts, pending))
        for peer in self._peers.values():
            call = _receive(peer)
            if isinstance(call, Call):
                _send(peer, Result(call.call_id, self._nothing))
        pending.settled.result(WITHIN_S)

    def _bring_up(self, names: list[str]) -> None:
        _send(self._agent, _hello("agent", AGENT))
        self._hub.agent_ready.result(WITHIN_S)
        group = Group("light", [Member(name, "life", rank, ("r",)) for rank, name in enumerate(names)])
        started: concurrent.futures.Future[None] = concurrent.futures.Future()
        start = StartWorkers("light", "none", None, ())
        self._hub.post(lambda: self._hub.start_group(group, start, self._nothing, "127.0.0.1", started))
        _receive(self._agent)
        for name, peer in self._peers.items():
            _send(peer, _hello("worker", name))
        for name, peer in self._peers.items():
            if not isinstance(_receive(peer), Welcome):
                raise StartError(f"simulated worker {name} was not welcomed")
            _send(peer, Ready(name))
        started.result(WITHIN_S)


def _hello(kind: str, identity: str) -> Hello:
    return Hello(kind, identity, "life", "here", 1, "boot")


def _send(peer: Connection, message: Message) -> None:
    peer.send(to_frames(message))


def _receive(peer: Connection) -> Message:
    frames = peer.receive(WITHIN_S)
    if frames is None:
        raise StartError(f"a simulated worker heard nothing for {WITHIN_S:g} s")
    return from_frames(frames)
