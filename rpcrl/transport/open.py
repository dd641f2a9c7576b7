"""Which transport serves this address?

``inproc://name`` is queues in this process, for tests; ``ipc:///path`` and ``tcp://host:port`` are ZeroMQ.
"""

from __future__ import annotations

from rpcrl.errors import UsageError
from rpcrl.transport.addresses import split_address
from rpcrl.transport.base import Allowed, ClientKeys, Connection, Dialer, KeyPair, Limits, Listener

__all__ = ["connect", "dialer", "listen"]


def listen(
    address: str, *, limits: Limits | None = None, keys: KeyPair | None = None, allowed: Allowed | None = None
) -> Listener:
    """Return a listener bound to ``address``. TCP needs ``keys`` and ``allowed``.

    ``allowed`` is asked on another thread. Raises UsageError, TransportError, AuthenticationError (no CURVE here).
    """
    limits = limits if limits is not None else Limits()
    if split_address(address)[0] == "inproc":
        if keys is not None:
            raise UsageError(f"{address}: keys protect nothing within a process; pass keys=None")
        from rpcrl.transport.inproc import InprocListener

        return InprocListener(address, limits)
    from rpcrl.transport.zeromq import ZmqListener

    return ZmqListener(address, limits, keys, allowed)


def connect(address: str, *, identity: str, limits: Limits | None = None, keys: ClientKeys | None = None) -> Connection:
    """Return a connection to the listener at ``address``, which need not be there yet. TCP needs ``keys``.

    The listener knows the peer from its first message on. ``identity`` should be unique per listener and over time
    (name + incarnation): of two peers of one name both are heard, and the one heard last gets the answers.
    Raises UsageError, TransportError, AuthenticationError (no CURVE here).
    """
    limits = limits if limits is not None else Limits()
    if split_address(address)[0] == "inproc":
        if keys is not None:
            raise UsageError(f"{address}: keys protect nothing within a process; pass keys=None")
        from rpcrl.transport.inproc import InprocConnection

        return InprocConnection(address, identity, limits)
    from rpcrl.transport.zeromq import ZmqConnection

    return ZmqConnection(address, identity, limits, keys)


def dialer(scheme: str, *, identity: str, limits: Limits | None = None, keys: KeyPair | None = None) -> Dialer:
    """Return an end that reaches many listeners of one scheme (``inproc``, ``ipc`` or ``tcp``). TCP needs ``keys``.

    Listeners know it by its identity, as they know a connection. Raises as ``connect`` does.
    """
    limits = limits if limits is not None else Limits()
    if scheme == "inproc":
        from rpcrl.transport.inproc import InprocDialer

        return InprocDialer(identity, limits)
    from rpcrl.transport.dialer import ZmqDialer

    return ZmqDialer(identity, limits, keys)
