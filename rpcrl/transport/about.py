"""Which ZeroMQ is this, and can it encrypt?"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ZeromqFacts", "zeromq_facts"]


@dataclass(frozen=True)
class ZeromqFacts:
    """Versions and abilities of the installed ZeroMQ."""

    pyzmq: str
    libzmq: str
    has_curve: bool
    """TCP sockets can be encrypted and authenticated; without it rpcrl refuses TCP."""


def zeromq_facts() -> ZeromqFacts:
    """Return what the installed ZeroMQ is; loads zmq."""
    import zmq

    return ZeromqFacts(zmq.pyzmq_version(), zmq.zmq_version(), bool(zmq.has("curve")))
