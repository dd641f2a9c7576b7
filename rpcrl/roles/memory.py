"""How much memory has this process used at most?"""

from __future__ import annotations

import resource

__all__ = ["peak_rss_bytes"]


def peak_rss_bytes() -> int:
    """Return the largest resident size that this process has had, in bytes (Linux counts in KiB)."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
