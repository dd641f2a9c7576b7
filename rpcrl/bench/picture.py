"""How do the rows look in one picture? Bars per case on a logarithmic scale, as SVG written by hand.

By hand, because a plotting library would be a dependency of every user for one command; the file needs no fonts, no
script and no network, and any browser shows it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

from rpcrl.bench.measure import Row, duration

__all__ = ["draw"]

COLOURS: Mapping[str, str] = {
    "rpcrl": "#c2410c",
    "raw_zmq": "#475569",
    "memcpy": "#94a3b8",
    "ray": "#2563eb",
    "verl_ray": "#0f766e",
    "monarch": "#7c3aed",
    "torch_rpc": "#b45309",
}
_BAR, _GAP, _HEAD, _LEFT, _WIDTH, _RIGHT = 13, 12, 70, 290, 560, 90


def draw(rows: Sequence[Row], title: str, subtitle: str) -> str:
    """Return an SVG document with one bar a row: its length is the median, on a logarithmic axis."""
    groups = _grouped(rows)
    seconds = [row.p50_s for row in rows if row.p50_s > 0]
    low = math.floor(math.log10(min(seconds, default=1e-4)))
    high = max(low + 1, math.ceil(math.log10(max(seconds, default=1.0))))

    def x_of(value_s: float) -> float:
        return _LEFT + _WIDTH * (math.log10(max(value_s, 10.0**low)) - low) / (high - low)

    height = _HEAD + sum(len(group) * _BAR + _GAP for group in groups.values()) + 40
    width = _LEFT + _WIDTH + _RIGHT
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="12" y="22" font-size="15" font-weight="bold">{escape(title)}</text>',
        f'<text x="12" y="40" fill="#475569">{escape(subtitle)}</text>',
    ]
    for power in range(low, high + 1):
        x = x_of(10.0**power)
        parts.append(f'<line x1="{x:.1f}" y1="{_HEAD - 8}" x2="{x:.1f}" y2="{height - 30}" stroke="#e2e8f0"/>')
        label = duration(10.0**power).replace(".00", "").replace(".0 ", " ")
        parts.append(f'<text x="{x:.1f}" y="{_HEAD - 12}" text-anchor="middle" fill="#475569">{label}</text>')
    y = float(_HEAD)
    for label, group in groups.items():
        middle = y + len(group) * _BAR / 2 + 4
        parts.append(f'<text x="{_LEFT - 70}" y="{middle:.1f}" text-anchor="end">{escape(label)}</text>')
        for row in group:
            parts += _bar(row, x_of(row.p50_s), y)
            y += _BAR
        y += _GAP
    parts.append(f'<text x="12" y="{height - 10}" fill="#475569">medians; a shorter bar is better</text></svg>')
    return "\n".join(parts) + "\n"


def _bar(row: Row, x: float, y: float) -> list[str]:
    colour = COLOURS.get(row.system, "#64748b")
    return [
        f'<text x="{_LEFT - 5}" y="{y + 10:.1f}" text-anchor="end" fill="{colour}">{escape(row.system)}</text>',
        f'<rect x="{_LEFT}" y="{y + 1:.1f}" width="{max(1.0, x - _LEFT):.1f}" height="{_BAR - 2}" fill="{colour}">'
        f"<title>{escape(f'{row.system}: {duration(row.p50_s)}')}</title></rect>",
        f'<text x="{max(x, _LEFT + 1) + 4:.1f}" y="{y + 10:.1f}">{duration(row.p50_s)}</text>',
    ]


def _grouped(rows: Sequence[Row]) -> dict[str, list[Row]]:
    groups: dict[str, list[Row]] = {}
    for row in rows:
        size = f" {row.mib:g} MiB" if row.mib >= 1 else f" {row.mib * 1024:g} KiB" if row.mib else ""
        groups.setdefault(f"{row.case}{size} {row.variant} × {row.workers}".replace("  ", " "), []).append(row)
    return groups
