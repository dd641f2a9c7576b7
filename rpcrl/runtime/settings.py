"""Can a controller be opened with these settings?"""

from __future__ import annotations

from rpcrl.errors import UsageError

__all__ = ["check_settings"]

MIN_HEARTBEAT_S = 0.1
TRANSPORTS = ("ipc", "tcp", "inproc")
CONSOLES = ("default", "all", "off")


def check_settings(
    transport: str,
    console: str,
    heartbeat_s: float | None,
    report_after_s: float | None,
    shared_memory_bytes: int | None,
) -> None:
    """Raise UsageError for the first setting of ``Controller`` that cannot be."""
    if transport not in TRANSPORTS:
        raise UsageError(f"Controller(transport={transport!r}) must be 'ipc', 'tcp' or 'inproc'")
    if console not in CONSOLES:
        raise UsageError(f"Controller(console={console!r}) must be 'default', 'all' or 'off'")
    if heartbeat_s is not None and heartbeat_s < MIN_HEARTBEAT_S:
        raise UsageError(f"Controller(heartbeat_s={heartbeat_s!r}) must be at least {MIN_HEARTBEAT_S}, or None")
    if report_after_s is not None and report_after_s <= 0:
        raise UsageError(f"Controller(report_after_s={report_after_s!r}) must be more than 0, or None for no report")
    if shared_memory_bytes is not None and shared_memory_bytes < 0:
        raise UsageError(f"Controller(shared_memory_bytes={shared_memory_bytes}) must be 0 or more, or None")
