"""Who is who on TCP? CURVE keys, and the allow-list that ties each key to one identity.

A listener on TCP asks this allow-list (ZAP, RFC 27) about every peer that shakes hands; libzmq then stamps the
identity that belongs to the key on every message, and the listener compares it with the name that the peer claims.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rpcrl.errors import AuthenticationError, UsageError
from rpcrl.logs import get_logger
from rpcrl.transport.base import Allowed, KeyPair

if TYPE_CHECKING:
    import zmq

__all__ = ["AllowList", "ZapThread", "check_key", "new_key_pair", "require_curve"]

_log = get_logger(__name__)

ZAP_DOMAIN = b"rpcrl"
_ZAP_ADDRESS = "inproc://zeromq.zap.01"
_ZAP_VERSION = b"1.0"


def require_curve() -> None:
    """Raise AuthenticationError when this libzmq was built without CURVE: there is no unprotected TCP."""
    import zmq

    if not zmq.has("curve"):
        raise AuthenticationError(
            f"the installed libzmq {zmq.zmq_version()} has no CURVE, so TCP connections cannot be protected; install a"
            " pyzmq wheel (they include it), or use ipc:// on one machine"
        )


def check_key(what: str, key: str) -> None:
    """Raise UsageError when ``key`` cannot be one; the text never shows it."""
    if len(key) != 40 or not key.isascii() or not key.isprintable():
        raise UsageError(f"the {what} has {len(key)} characters; a CURVE key is 40 characters of Z85 text")


def new_key_pair() -> KeyPair:
    """Return a fresh CURVE key pair."""
    require_curve()
    import zmq

    public, secret = zmq.curve_keypair()
    return KeyPair(public.decode("ascii"), secret.decode("ascii"))


class AllowList:
    """Public key → identity; may be changed while listeners use it, from any thread."""

    def __init__(self, identities: Mapping[str, str] | None = None) -> None:
        self._identities = dict(identities or {})

    def add(self, public_key: str, identity: str) -> None:
        """Let the holder of this key connect, as ``identity`` and nothing else."""
        self._identities[public_key] = identity

    def remove(self, public_key: str) -> None:
        """Refuse the key from now on; a connection that stands is not cut."""
        self._identities.pop(public_key, None)

    def __call__(self, public_key: str, /) -> str | None:
        """Return the identity that may use this key, or None."""
        return self._identities.get(public_key)


class ZapThread:
    """Answers libzmq's questions about keys for one context, and counts who was turned away.

    Ends by itself when the context is terminated. ``allowed`` is called on this thread.
    """

    def __init__(self, context: zmq.Context[Any], allowed: Allowed, monitor: zmq.Socket[Any]) -> None:
        import zmq

        self.rejected = 0
        self._allowed = allowed
        self._monitor = monitor
        # Bound here, not on the thread: the listener must not accept anybody before its judge sits.
        self._socket = context.socket(zmq.REP)
        self._socket.linger = 0
        self._socket.bind(_ZAP_ADDRESS)
        self._thread = threading.Thread(target=self._run, name="rpcrl-zap", daemon=True)
        self._thread.start()

    def join(self) -> None:
        """Wait for the thread's end; call after the context's term."""
        self._thread.join()

    def _run(self) -> None:
        import zmq

        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._monitor, zmq.POLLIN)
        try:
            while True:
                for socket, _ in poller.poll():
                    if socket is self._socket:
                        self._socket.send_multipart(self._answer(self._socket.recv_multipart()))
                    else:
                        self._count(self._monitor.recv_multipart())
        except zmq.ContextTerminated:
            pass
        finally:
            self._socket.close()
            self._monitor.close()

    def _answer(self, request: list[bytes]) -> list[bytes]:
        """Return the ZAP reply: version, request id, status, reason, user id, metadata."""
        request_id = request[1] if len(request) > 1 else b""
        identity = None
        if len(request) == 7 and request[0] == _ZAP_VERSION and request[2] == ZAP_DOMAIN and request[5] == b"CURVE":
            identity = self._identity_of(request[6])
        if identity is None:
            return [_ZAP_VERSION, request_id, b"400", b"this key is not on the allow-list", b"", b""]
        return [_ZAP_VERSION, request_id, b"200", b"OK", identity.encode(), b""]

    def _identity_of(self, key: bytes) -> str | None:
        from zmq.utils import z85

        try:
            return self._allowed(z85.encode(key).decode("ascii"))
        except Exception:
            _log.exception("the allow-list failed; the peer is refused")
            return None

    def _count(self, event: list[bytes]) -> None:
        """Every event that is asked for is a handshake that failed."""
        if int.from_bytes(event[0][:2], sys.byteorder) != 0x0400:  # monitoring stopped
            self.rejected += 1
