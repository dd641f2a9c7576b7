"""Did the kernel kill something for lack of memory? A counter, read before and after."""

from __future__ import annotations

from pathlib import Path

__all__ = ["count_oom_kills"]


def count_oom_kills() -> int:
    """Return the out-of-memory kills of this process's cgroup (v2 or v1), else of the machine; 0 when none is known."""
    for path in _counter_files():
        try:
            text = path.read_text()
        except OSError:
            continue
        for line in text.splitlines():
            name, _, value = line.partition(" ")
            if name == "oom_kill" and value.strip().isdecimal():
                return int(value)
    return 0


def _counter_files() -> list[Path]:
    files = []
    root = Path("/sys/fs/cgroup")
    try:
        memberships = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        memberships = []
    for membership in memberships:
        _, controllers, path = membership.split(":", 2)
        if not controllers:
            files.append(root / path.lstrip("/") / "memory.events")
        elif "memory" in controllers.split(","):
            # A container often sees its own group as the root, whatever the path says.
            files.append(root / "memory" / path.lstrip("/") / "memory.oom_control")
            files.append(root / "memory" / "memory.oom_control")
    return [*files, Path("/proc/vmstat")]
